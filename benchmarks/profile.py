"""A whole PPO step, and where each second of it goes: by phase and kind of operation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record

from benchmarks.speed.runs import (
    NEW_TOKENS,
    PPO,
    SAMPLES,
    median_seconds,
    one_step,
    prompts_of_step,
    running,
    share_of_limit,
)
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from tether.kernels.dispatch import REFERENCE, kernels_for

SHARE = 0.5
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("mm", "linear", "addmm", "bmm", "baddbmm", "mkldnn", "matmul", "product"),
    "attention": (
        "scaled_dot_product",
        "attend",
        "attention",
        "query_back",
        "key_value_back",
        "weights_back",
        "arrange",
    ),
    "optimizer": ("adam", "lerp", "foreach", "norm_", "linalg_vector_norm"),
    "copies and dtype changes": ("copy", "to", "cat", "contiguous", "clone", "stack", "repeat", "expand"),
    "gathers and scatters": ("index", "gather", "scatter", "embedding", "masked", "where", "tril"),
    "softmax, exp and sums": ("softmax", "exp", "sum", "amax", "log", "vecdot", "cumsum", "max", "add_log_sums"),
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
        "silu_mul",
        "rotate",
    ),
    "memory": ("empty", "zeros", "zero_", "fill_", "resize"),
}
"""Kind -> beginnings of the names of operators (after ``aten::``) and of our kernels, looked through in this order."""
OTHER = "everything else"


def kind_of(name: str) -> str:
    """The kind of an operator."""
    plain = name.split("::")[-1].lstrip("_").removeprefix("fused_")
    return next((kind for kind, beginnings in KINDS.items() if plain.startswith(beginnings)), OTHER)


@contextmanager
def kernels_recorded() -> Iterator[None]:
    """PyTorch's profiler sees compiled kernels too, under their names: all start from Python, none are replayed."""
    backend = kernels_for(torch.empty(0, dtype=torch.bfloat16))
    if backend is REFERENCE:
        yield
        return
    kind = import_module("tether.kernels.cpu.openmp_loop").Kernel
    plain, record = kind.__call__, backend.record

    def recorded(kernel: Any, **arguments: Any) -> None:
        with record_function(f"kernel::{kernel.name}"):
            plain(kernel, **arguments)

    kind.__call__, backend.record = recorded, REFERENCE.record
    try:
        yield
    finally:
        kind.__call__, backend.record = plain, record


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
    """With critic, reference and GAE: 4 prompts; 2 with ``--quick``."""
    phases = Recorder()
    with running(setting, PPO) as trainer:
        warm_up = setting.steps_to_warm_up
        steps = [one_step(trainer) for _ in range(warm_up + setting.runs)][warm_up:]
        loggers = trainer.loggers
        trainer.loggers = phases  # type: ignore[assignment]  # a step only announces its phases and warns
        with kernels_recorded():
            one_step(trainer)
        phases.end()
        trainer.loggers = loggers
    whole, rows = median_seconds(steps, "step"), []
    for phase, spent in phases.seconds.items():
        total = median_seconds(steps, phase) if f"timing_s/{phase}" in steps[0] else 0.0
        if phase == "step" or total < 0.02 * whole:
            continue
        recorded = sum(spent.values())
        largest = sorted(spent.items(), key=lambda item: -item[1])
        where = ", ".join(f"{kind} {seconds / recorded:.0%}" for kind, seconds in largest if seconds > 0.02 * recorded)
        rows.append([phase, f"{total:.2f}", f"{total / whole:.0%}", where, f"{phases.calls[phase]:,}"])
    rows.append(["step", f"{whole:.2f}", "100%", "", ""])
    throughput = statistics.median(step["perf/throughput"] for step in steps)
    return Section(
        "A PPO step, and where each second goes",
        [
            f"{prompts_of_step(setting)} GSM8K prompts x {SAMPLES} responses of {NEW_TOKENS} tokens, one optimizer",
            f"step a model, bfloat16, with a critic, a reference and GAE: {throughput:.0f} tokens/s, prompt and",
            "response of every row counted. The limit is counted as with GRPO. Shares are of the processor time that",
            "PyTorch's profiler attributes to operators, in one more step.",
        ],
        ("phase", "s", "share", "operators", "calls"),
        rows,
        [Goal("PPO step: share of the limit", share_of_limit(setting, steps), SHARE)],
    )
