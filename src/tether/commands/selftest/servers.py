"""vLLM and SGLang, if they are installed: start, parity probe, weight update, kill and restart."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tether.commands.selftest.results import CheckContext, CheckOutcome, failed, not_applicable, passed
from tether.commands.selftest.runs import PPO, ROLLOUT, run_tiny, text_overrides
from tether.runtime.program import environment_of


def vllm(context: CheckContext) -> CheckOutcome:
    """Train with a vLLM server, and kill it between two steps."""
    return _served(context, "vllm")


def sglang(context: CheckContext) -> CheckOutcome:
    """Train with an SGLang server, and kill it between two steps."""
    return _served(context, "sglang")


class _Killer:
    """Kills the processes of a server after the first step."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.killed = 0

    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            for process in _descendants(os.getpid()):
                if self._name in _command(process):
                    os.kill(process, signal.SIGKILL)
                    self.killed += 1


def _served(context: CheckContext, name: str) -> CheckOutcome:
    try:
        environment_of(name, f"TETHER_{name.upper()}")
    except ValueError as error:
        return not_applicable(f"an environment with {name} (tether setup {name}): {error}")
    killer = _Killer(name)
    overrides = [*text_overrides(context), *PPO, f"{ROLLOUT}.name={name}", f"{ROLLOUT}.gpu_memory_utilization=0.2"]
    result = run_tiny(context, name, overrides, callbacks=[killer])
    gaps = [row.get("rollout_corr/k3_kl") for row in result.metrics]
    if not killer.killed:
        return failed(f"no process of {name} was found to kill after step 1")
    return passed(
        f"{result.step} steps, killed after the first and restarted; difference to the trainer {json.dumps(gaps)}"
    )


def _descendants(process: int) -> list[int]:
    """Return the descendants of a process."""
    children = [
        int(child) for file in Path(f"/proc/{process}/task").glob("*/children") for child in file.read_text().split()
    ]
    return [*children, *(below for child in children for below in _descendants(child))]


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:  # the process has ended
        return ""
