"""From the command to its effect: the help, an import, and the first token of a reply."""

from __future__ import annotations

import statistics
import subprocess
import sys

from benchmarks.oracles.environment import ROOT
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds

BY_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="bfloat16")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=1)
"""
TETHER = "from tether.cli import main; main()"


def measure(setting: Setting) -> Section:
    """Medians of whole processes, after one that fills the disk cache."""
    first_token = [str(setting.model), "Hi", "--max-new-tokens", "1"]
    commands = {
        "tether --help": ["-c", TETHER, "--help"],
        "tether config check": ["-c", TETHER, "config", "check", str(ROOT / "recipes/quickstart/run.yaml")],
        "tether generate, first token": ["-c", TETHER, "generate", *first_token],
        "import torch, transformers": ["-c", "import torch, transformers"],
        "transformers alone, first token": ["-c", BY_TRANSFORMERS, str(setting.model)],
    }
    spent = {name: _median(arguments, setting.runs) for name, arguments in commands.items()}
    return Section(
        "Start",
        ["Seconds of a whole process, files in the disk cache."],
        ("", "s"),
        [[name, f"{time:.2f}"] for name, time in spent.items()],
        [
            Goal("tether --help, seconds", spent["tether --help"], 0.5, at_most=True),
            Goal("command to first token, seconds", spent["tether generate, first token"], 5.0, at_most=True),
        ],
    )


def _median(arguments: list[str], runs: int) -> float:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)

    run()
    return statistics.median(seconds(run) for _ in range(runs))
