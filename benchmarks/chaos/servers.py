"""A run that samples by vLLM, whose server and trainer fail at random moments, beside one that is undisturbed.

The server is vLLM where its environment exists (tether setup vllm), else a stand-in that speaks its language.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.chaos.soak import MARK, Fault, Result, Soak, disturb, kill_driver, left_running, names_of, steps_of
from tests.runs.tiny_run import GRPO, base_overrides, set_eos, write_inputs
from tests.text.servers.bench import REAL
from tests.text.servers.stand_in import environment
from tests.tiny import EOS_ID, save_tiny

ROLLOUT = "actor_rollout_ref.rollout"


def _kill(soak: Soak) -> None:
    with suppress(ProcessLookupError):  # it ended by itself meanwhile: the run does so at its last step
        os.kill(soak.one(), signal.SIGKILL)


def _stop(soak: Soak) -> None:
    with suppress(ProcessLookupError):
        os.kill(soak.one(), signal.SIGSTOP)


FAULTS: Mapping[str, Fault] = {
    "`kill -9` of a process of the server": _kill,
    "a process of the server is stopped (SIGSTOP)": _stop,
    "`kill -9` of the trainer": kill_driver,
}


def processes_of(folder: Path) -> dict[str, int]:
    """The server's processes, which write to its log."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, psutil.NoSuchProcess):
            if (process / "fd/1").readlink().is_relative_to(folder / "vllm"):
                one = psutil.Process(int(process.name))
                if one.status() != psutil.STATUS_ZOMBIE:
                    found[process.name] = one.pid
    return found


def measure(folder: Path, faults: int, seconds: float, *, stand_in: bool, seed: int = 0) -> Result:
    """Disturb a run so many times, each kind of fault about as often.

    Args:
        folder: for both runs.
        faults: their number.
        seconds: in which the server must have started, and must answer; it is given up for hanging after them.
        stand_in: in the place of vLLM.
        seed: of the moments and victims.
    """
    os.environ[MARK] = "1"
    if stand_in or REAL is None:
        os.environ["TETHER_VLLM"] = str(environment(folder / "vllm", is_fork=False))
        os.environ["STAND_IN_SECONDS"] = "0.2"
    inputs, noise = write_inputs(folder / "inputs"), random.Random(seed)
    set_eos(save_tiny(inputs / "model", "qwen2", hidden_size=128), [EOS_ID, *range(4, 90)])
    names = names_of(FAULTS, faults, noise)
    disturbed, whole = (
        (folder / name, _overrides(inputs, folder / name, steps_of(names), seconds)) for name in ("disturbed", "whole")
    )
    result = disturb(Soak(*disturbed, noise, processes_of, 1), FAULTS, names, whole)
    return replace(result, left=left_running())


def _overrides(inputs: Path, folder: Path, steps: int, seconds: float) -> list[str]:
    return [
        *base_overrides(inputs, folder), *GRPO, f"trainer.total_training_steps={steps}", "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2", "trainer.preflight=False", "trainer.logger=file", f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.gpu_memory_utilization=0.1", f"{ROLLOUT}.enforce_eager=True",
        f"{ROLLOUT}.server_timeout={seconds:g}", f"{ROLLOUT}.parity_freq=4",
    ]  # fmt: skip
