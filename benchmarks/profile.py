"""Where each second of a PPO step goes: by operation, in its two largest phases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record

from benchmarks.speed.runs import PPO, one_step, running
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Section
from tether.models.cpu import loops_for
from tether.rollout import replayed

KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("mm", "linear", "addmm", "bmm", "baddbmm", "mkldnn", "matmul", "product"),
    "attention": ("scaled_dot_product", "attend", "attention", "queries_backward", "keys_backward", "arrange"),
    "optimizer": ("adam", "lerp", "foreach", "norm_", "linalg_vector_norm"),
    "copies and dtype changes": ("copy", "to", "cat", "contiguous", "clone", "stack", "repeat", "expand"),
    "gathers and scatters": ("index", "gather", "scatter", "embedding", "masked", "where", "tril"),
    "softmax, exp and sums": ("softmax", "exp", "sum", "amax", "log", "vecdot", "cumsum", "max", "masses"),
    "layers' elementwise work": (
        "mul",
        "add",
        "silu",
        "rsqrt",
        "pow",
        "mean",
        "neg",
        "rms_norm",
        "sub",
        "div",
        "sigmoid",
        "gated",
        "rotate",
    ),
    "memory": ("empty", "zeros", "zero_", "fill_", "resize"),
}
"""Kind -> beginnings of the names of operators (after ``aten::``) and of our loops, looked through in this order."""
OTHER = "everything else"


def kind_of(name: str) -> str:
    """The kind of an operator."""
    plain = name.split("::")[-1].lstrip("_").removeprefix("fused_")
    return next((kind for kind, beginnings in KINDS.items() if plain.startswith(beginnings)), OTHER)


@contextmanager
def loops_recorded() -> Iterator[None]:
    """PyTorch's profiler sees the compiled loops too, under their names: all start from Python, none are replayed."""
    if loops_for(torch.empty(0, dtype=torch.bfloat16)) is None:
        yield
        return
    kind = import_module("tether.models.compiled").Loop
    plain, replay_for = kind.__call__, replayed.replay_for

    def recorded(loop: Any, *arguments: Any) -> None:
        with record_function(f"loop::{loop.name}"):
            plain(loop, *arguments)

    kind.__call__, replayed.replay_for = recorded, lambda *_: None
    try:
        yield
    finally:
        kind.__call__, replayed.replay_for = plain, replay_for


class Recorder:
    """Profiles each phase of a step on its own: it stands in for the run's loggers, which hear where a phase begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}
        self.calls: dict[str, int] = {}
        self._now: tuple[str, record] | None = None

    def phase(self, name: str, done: int | None = None, _: int | None = None) -> None:
        """See `tether.metrics.loggers.Loggers.phase`."""
        if done is None:
            self.end()
            recorder = record(activities=[ProfilerActivity.CPU])
            recorder.start()
            self._now = (name, recorder)

    def warn(self, message: str) -> None:
        """See `tether.metrics.loggers.Loggers.warn`."""
        print(message)

    def end(self) -> None:
        """Add up what was recorded since the phase began."""
        if self._now is None:
            return
        phase, recorder = self._now
        recorder.stop()
        spent = self.seconds.setdefault(phase, {})
        for event in recorder.key_averages():
            kind = kind_of(event.key)
            spent[kind] = spent.get(kind, 0.0) + event.self_cpu_time_total / 1e6
            self.calls[phase] = self.calls.get(phase, 0) + event.count
        self._now = None


def measure(setting: Setting) -> Section:
    """A step of a PPO run: the first ones pay for memory that is touched for the first time."""
    phases = Recorder()
    with running(setting, PPO) as trainer:
        for _ in range(setting.steps_to_warm_up):
            one_step(trainer)
        plain = one_step(trainer)
        loggers = trainer.loggers
        trainer.loggers = phases  # type: ignore[assignment]  # a step only announces its phases and warns
        with loops_recorded():
            one_step(trainer)
        phases.end()
        trainer.loggers = loggers
    rows = []
    for phase, spent in phases.seconds.items():
        total = plain.get(f"timing_s/{phase}")
        if phase == "step" or total is None or total < 0.02 * plain["timing_s/step"]:
            continue
        recorded = sum(spent.values())
        largest = sorted(spent.items(), key=lambda item: -item[1])
        where = ", ".join(f"{kind} {seconds / recorded:.0%}" for kind, seconds in largest if seconds > 0.02 * recorded)
        rows.append([phase, f"{total:.2f}", f"{total / plain['timing_s/step']:.0%}", where, f"{phases.calls[phase]:,}"])
    rows.append(["step", f"{plain['timing_s/step']:.2f}", "100%", "", ""])
    return Section(
        "Where each second of a PPO step goes",
        [
            "4 prompts x 8 responses of 64 tokens. Seconds are those of a step without a profiler; shares are of the",
            "processor time that PyTorch's profiler attributes to operators in the step after it.",
        ],
        ("phase", "s", "share", "operators", "calls"),
        rows,
    )
