"""Runs that train once for all tests of a session, which read what they measured, saved and reported.

Four steps: evaluated before the first and after each, saved after the second and the fourth.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.runs.loops import Loop
from tether.loop.parts import Callbacks

STEPS = 4
SCHEDULE = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "trainer.test_freq=1",
    "trainer.val_before_train=True",
]
Event = tuple[str, int]


class Notebook:
    """A callback that writes down all calls, and raises KeyError in one of them."""

    def __init__(self, raises_at: Event | None = None) -> None:
        self.raises_at = raises_at
        self.events: list[Event] = []
        self.metrics: dict[Event, dict[str, float]] = {}
        self.paths: list[Path] = []

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        self._note("step", step, metrics)

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._note("test", step, metrics)

    def on_checkpoint(self, step: int, path: Path) -> None:
        assert (path / "run.yaml").is_file()
        self.paths.append(path)
        self._note("save", step, {})

    def _note(self, what: str, step: int, metrics: dict[str, float]) -> None:
        self.events.append((what, step))
        self.metrics[what, step] = dict(metrics)
        metrics.clear()  # its own copy
        if self.raises_at == (what, step):
            raise KeyError("mine")


@dataclass(frozen=True)
class Golden:
    """A finished run."""

    loop: Loop
    made: Path

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return self.made / "run"

    @cached_property
    def notebooks(self) -> list[Notebook]:
        """Return its two callbacks."""
        return pickle.loads((self.made / "notebooks.pkl").read_bytes())  # type: ignore[no-any-return]

    def overrides(self, folder: Path, *more: str) -> list[str]:
        """Return the overrides of the same run in another folder."""
        return self.loop.overrides(folder, *SCHEDULE, *more)

    def train(self, folder: Path, *more: str, callbacks: Sequence[object] = (), **options: Any) -> Any:
        """Train the same run in another folder, with more options; for `options` see `Loop.train`."""
        return train_with(self.loop, self.overrides(folder, *more), callbacks, **options)


def train_with(loop: Loop, overrides: Sequence[str], callbacks: Sequence[object], **options: Any) -> Any:
    """Train, and tell the callbacks."""

    def tell(run: Any) -> None:
        run.trainer.callbacks = Callbacks(callbacks)

    return loop.train(overrides, before=tell, **options)


def train_golden(loop: Loop, folder: Path) -> None:
    """Train a golden run in a folder of its own."""
    notebooks = [Notebook(), Notebook()]
    train_with(loop, loop.overrides(folder / "run", *SCHEDULE), notebooks)
    (folder / "notebooks.pkl").write_bytes(pickle.dumps(notebooks))
