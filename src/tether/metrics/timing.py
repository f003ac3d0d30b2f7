"""Time, speed and memory of a training step."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

PER_RESPONSE_TOKEN = ("gen",)
PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


class Timer:
    """Sums the seconds spent in named phases, which may be nested: ``with timer("gen"): ...``.

    A phase that is entered several times has the sum of its times. GPU kernels are counted in the phase in which the
    host waits for them.

    Args:
        on_phase: called with the name of a phase when it starts, and with the enclosing phase's when it ends.
        around: returns a context manager for a phase name, in which the phase runs; used by profilers.
    """

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        around: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._around = around
        self._open: list[str] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time in the ``with`` block as `phase`, also if it raises."""
        self._enter(phase)
        start = time.perf_counter()
        try:
            with self._around(phase):
                yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            self._open.pop()
            if self._open:
                self._announce(self._open[-1])

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move counted seconds from one phase to another."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds

    def _enter(self, phase: str) -> None:
        self._open.append(phase)
        self._announce(phase)

    def _announce(self, phase: str) -> None:
        if self._on_phase is not None:
            self._on_phase(phase)

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase as ``timing_s/<phase>``."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}


def timing_per_token_ms(seconds: Mapping[str, float], *, num_response_tokens: int, num_tokens: int) -> dict[str, float]:
    """Return the milliseconds per token of phases whose time scales with tokens.

    Args:
        seconds: duration of each phase, like `Timer.seconds`.
        num_response_tokens: divisor of generation.
        num_tokens: prompt and response tokens, the divisor of the other phases.
    """
    divisors = dict.fromkeys(PER_RESPONSE_TOKEN, num_response_tokens) | dict.fromkeys(PER_TOKEN, num_tokens)
    return {
        f"timing_per_token_ms/{phase}": 1000 * seconds[phase] / divisor
        for phase, divisor in divisors.items()
        if phase in seconds and divisor
    }


GIB = 2**30


def throughput_metrics(num_tokens: int, seconds: float, *, num_devices: int = 1) -> dict[str, float]:
    """Return the tokens and seconds of a step, and its tokens per second and device."""
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * num_devices),
    }


def memory_metrics() -> dict[str, float]:
    """Return the peak memory of this process so far, in GiB: host memory, and GPU memory if there is a GPU."""
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    metrics = {"perf/cpu_memory_peak_gb": peak / GIB}
    import torch  # imported here, because viewers of metrics do not need torch

    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GIB
    return metrics
