"""Peak memory of one update: every row in one micro-batch, each side in a process of its own.

The peak is that of the resident memory during the second update, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.oracles.environment import ROOT, last_line
from benchmarks.speed.peers.processes import Peers, Skipped
from benchmarks.speed.plain_loop import PlainLoop
from benchmarks.speed.rollouts import Updater, as_rows
from benchmarks.speed.setting import Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import peak_memory
from benchmarks.training import start_trl
from tether.batch import RolloutBatch, TrainBatch

PROMPT, RESPONSE = 96, 160
HALF = 0.5


def made_up_batch(tokens: int, vocabulary: int) -> TrainBatch:
    """Rows of random tokens, each with a prompt of its own."""
    rows = tokens // (PROMPT + RESPONSE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, vocabulary, (rows, PROMPT + RESPONSE), generator=generator)
    rollout = RolloutBatch(
        uid=torch.arange(rows),
        prompt_ids=ids[:, :PROMPT],
        prompt_length=torch.full((rows,), PROMPT),
        response_ids=ids[:, PROMPT:],
        response_length=torch.full((rows,), RESPONSE),
        response_mask=torch.ones(rows, RESPONSE, dtype=torch.bool),
        rollout_log_probs=torch.full((rows, RESPONSE), -10.0),
        truncated=torch.ones(rows, dtype=torch.bool),
        kept=None,
        batch_size=[rows],
    )
    batch = TrainBatch.assemble(rollout, torch.zeros(rows))
    batch.old_log_probs = batch.rollout_log_probs
    batch.advantages = torch.randn(rows, 1, generator=generator).expand(rows, RESPONSE).contiguous()
    return batch


def run_here(side: str, setting: Setting, tokens: int, *, checkpointing: bool) -> tuple[float, float]:
    """Update twice in this process; GiB before the second update, and at its peak."""
    if side == "tether":
        update: Updater | PlainLoop = Updater(setting, max_tokens=tokens, checkpointing=checkpointing)
    else:
        update = PlainLoop(setting.plain_model(), micro_rows=tokens, checkpointing=checkpointing)
    batch = made_up_batch(tokens, len(setting.tokenizer))
    update(batch)
    return peak_memory(lambda: update(batch))


def run_apart(side: str, setting: Setting, tokens: int, *, checkpointing: bool) -> float:
    """The peak of `run_here` in a process of its own."""
    request = json.dumps({"side": side, "model": str(setting.model), "tokens": tokens, "checkpointing": checkpointing})
    command = [sys.executable, "-m", "benchmarks.memory", request]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side}: {last_line(done.stderr)}")
    return float(json.loads(done.stdout.splitlines()[-1])["peak"])


def run_trl(setting: Setting, tokens: int, *, checkpointing: bool) -> float:
    """TRL's peak, with its own defaults of mixed precision: float32 weights under autocast."""
    batch = made_up_batch(tokens, len(setting.tokenizer))
    name = f"trl memory {checkpointing}"
    trl = start_trl(
        setting,
        name,
        rows=as_rows(batch),
        samples=len(batch),
        checkpointing=checkpointing,
        autocast=True,
        threads=setting.threads,
    )
    trl.ask()
    peak = float(trl.ask()["peak"])
    setting.peers.stop()
    return peak


def measure(setting: Setting) -> Section:
    """With gradient checkpointing, which tether and TRL have on by default; in full also without."""
    tokens = 2048 if setting.quick else 8192
    table, goals, notes = [], [], []
    for checkpointing in (True,) if setting.quick else (True, False):
        mode = "on" if checkpointing else "off"
        peaks = {
            side: run_apart(side, setting, tokens, checkpointing=checkpointing) for side in ("tether", "plain loop")
        }
        try:
            peaks["TRL"] = run_trl(setting, tokens, checkpointing=checkpointing)
        except Skipped as why:
            notes.append(f"TRL left out: {why}.")
        for side, peak in peaks.items():
            table.append([mode, side, f"{peak:.2f}", f"{peak / peaks['tether']:.2f}"])
            if side != "tether":
                goals.append(Goal(f"checkpointing {mode}: tether / {side}", peaks["tether"] / peak, HALF, at_most=True))
    return Section(
        "Memory of the update",
        [
            f"{tokens} tokens in one micro-batch ({PROMPT} of prompt and {RESPONSE} of response per row, no prompt",
            "shared); peak of the process's resident memory, weights and optimizer included. tether holds float32",
            "weights and a bfloat16 copy, TRL float32 weights under autocast, the plain loop everything in bfloat16.",
            *dict.fromkeys(notes),
        ],
        ("gradient checkpointing", "", "GiB", "/ tether's"),
        table,
        goals,
    )


def main() -> None:
    """One side; the last line is its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request")
    asked = json.loads(parser.parse_args().request)
    setting = Setting(Path(asked["model"]), "", quick=False, runs=1, peers=Peers({}))
    before, peak = run_here(asked["side"], setting, asked["tokens"], checkpointing=asked["checkpointing"])
    print(json.dumps({"before": before, "peak": peak}))


if __name__ == "__main__":
    main()
