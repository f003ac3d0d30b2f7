"""From the command to its effect: the help, an import, and the first token of a reply."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from subprocess import DEVNULL, PIPE

from benchmarks.oracles.environment import ROOT
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from tether.runtime.huge_pages import SETTINGS, SWITCH

BY_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
print(tokenizer.decode(model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=1)[0, -1]))
"""
TETHER = "from tether.commands.cli import main; main()"


def measure(setting: Setting) -> Section:
    """Medians of whole processes, after one that fills the disk cache."""
    commands = {
        "tether --help": ["-c", TETHER, "--help"],
        "tether config check": ["-c", TETHER, "config", "check", str(ROOT / "recipes/quickstart/run.yaml")],
        "tether generate, one token": ["-c", TETHER, "generate", str(setting.model), "Hi", "--max-new-tokens", "1"],
        "import torch, transformers": ["-c", "import torch, transformers; print()"],
        "transformers alone, one token": ["-c", BY_TRANSFORMERS, str(setting.model)],
    }
    spent = {name: _medians(arguments, setting.runs) for name, arguments in commands.items()}
    return Section(
        "Start",
        ["Seconds from the command to the first line of its output and to its end, files in the disk cache."],
        ("", "first line", "end"),
        [[name, *(f"{time:.2f}" for time in times)] for name, times in spent.items()],
        [
            Goal("tether --help, seconds", spent["tether --help"][1], 0.5, at_most=True),
            Goal("command to first token, seconds", spent["tether generate, one token"][0], 5.0, at_most=True),
        ],
    )


def _medians(arguments: list[str], runs: int) -> list[float]:
    _run(arguments)
    return [statistics.median(times) for times in zip(*(_run(arguments) for _ in range(runs)), strict=True)]


def _run(arguments: list[str]) -> tuple[float, float]:
    """Seconds to the first line and to the end."""
    environment = {
        name: value for name, value in os.environ.items() if name not in {*SETTINGS, SWITCH}
    }  # of this process alone
    command = [sys.executable, "-u", *arguments]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=PIPE, stderr=DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = time.perf_counter() - start
        process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return first, time.perf_counter() - start
