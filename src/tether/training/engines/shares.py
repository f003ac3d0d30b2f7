"""Which rank writes which weights of a checkpoint, and the thread that writes them while the rank goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from tether.checkpoints import moments_path
from tether.models.language.save import join_parts
from tether.training.division import balanced

CHECKED_BYTES = 2**30
"""Of the weights that are written before the first step, to see that they can be: seconds, and no full disk."""


def writers(model: PreTrainedModel, ranks: int) -> list[int]:
    """The rank that writes each of `model.parameters()`, about as much each; a layer stays together, since classes
    whose files name weights otherwise may make one of several of a layer.
    """
    layers = set(model._no_split_modules or ())
    inside = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in layers]
    units: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        unit = next((layer for layer in inside if name.startswith(layer)), name.split(".base_layer.")[0])
        units.setdefault(unit, []).append(number)
        sizes[unit] = sizes.get(unit, 0) + parameter.numel()
    found = [0] * sum(map(len, units.values()))
    members = list(units.values())
    for rank, mine in enumerate(balanced(list(sizes.values()), ranks)):
        for number in chain.from_iterable(members[unit] for unit in mine):
            found[number] = rank
    return found


def join_shares(parts: Sequence[Path], folder: Path, state: Path) -> None:
    """Make a model's folder and its training state of what each rank wrote; see `FsdpEngine.begin_saving`."""
    join_parts([part / folder.name for part in parts], folder)
    for number, part in enumerate(parts, 1):
        if (moments := part / "moments.safetensors").exists():
            moments.rename(moments_path(state, number, len(parts)))
    (parts[0] / "state.pt").rename(state)
    if (adapter := parts[0] / "adapter").exists():
        adapter.rename(folder.with_name("adapter"))


class Writing:
    """One job at a time, in a thread of its own; errors of files are answers, since the rank goes on after them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[None] | None = None

    def begin(self, job: Callable[[], None]) -> None:
        """Start a job."""
        self._job = self._thread.submit(job)

    def answer(self) -> tuple[bool, BaseException | None]:
        """Whether it is done, and how it failed."""
        if self._job is None or not self._job.done():
            return self._job is None, None
        return True, self._job.exception()
