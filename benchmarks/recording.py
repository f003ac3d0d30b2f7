"""Cost of recording samples for `tether view`: python -m benchmarks.recording --write docs/guides/view.md

A step of many long responses is recorded alone, and steps of runs are timed with what they record: PPO with a small
policy and critic, and CartPole with the defaults of its kind of task.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.table import grid
from tests.runs.tiny_run import base_overrides, rows, write_inputs, write_jsonl
from tests.tiny import save_tiny
from tether.batch import Prompt, RolloutBatch, TrainBatch
from tether.commands.build import build
from tether.config import load_config
from tether.loop.protocol import Experience
from tether.metrics.loggers.jsonl import read_metrics
from tether.metrics.records import RECORDS_FILE, RecordFile, heads
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.losses import PolicyOutputs
from tether.text.learning.recording import SampleRecorder
from tether.text.rewards.outcome import RewardRequest, Score, summarize

BEGIN, END = "<!-- recording:begin -->", "<!-- recording:end -->"
HEAD = ("", "step", "recording", "share", "MB a step")
STEPS = 8
SIZES = {"256 responses of 1,024 tokens": (64, 4, 1024), "64 responses of 8,192 tokens": (16, 4, 8192)}
MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}


def scored_rows(groups: int, answers: int, tokens: int) -> tuple[TrainBatch, ScoredResponses, PolicyOutputs]:
    """Random responses, with everything that a step of PPO adds to them."""
    count, draws = groups * answers, torch.Generator().manual_seed(0)
    noise = [torch.randn(count, tokens, generator=draws) for _ in range(9)]
    rollout = RolloutBatch(
        uid=torch.arange(groups).repeat_interleave(answers),
        prompt_ids=torch.full((count, 64), 70),
        prompt_length=torch.full((count,), 64),
        response_ids=torch.randint(60, 120, (count, tokens), generator=draws),
        response_length=torch.full((count,), tokens),
        response_mask=torch.ones(count, tokens, dtype=torch.bool),
        rollout_log_probs=noise[0],
        truncated=torch.zeros(count, dtype=torch.bool),
        batch_size=count,
    )
    scores = torch.randint(0, 2, (count,), generator=draws).float()
    batch = TrainBatch.assemble(rollout, scores)
    names = ("old_log_probs", "ref_log_probs", "values", "token_level_rewards", "advantages", "returns")
    for name, values in zip(names, noise[1:], strict=False):
        setattr(batch, name, values)
    ids = np.full(64, 70, dtype=np.int32)
    prompts = [
        Prompt(ids, "math", "1", ({"role": "user", "content": "a" * 200},), index=index) for index in range(groups)
    ]
    outcomes = [Score(score, {"acc": score}) for score in scores.tolist()]
    texts = ["word " * (tokens * 4 // 5)] * count
    report = summarize([RewardRequest("math", text, "1") for text in texts], outcomes, [0.0])
    trained = PolicyOutputs(noise[7], noise[8], batch_size=count)
    return batch, ScoredResponses(prompts, rollout, texts, outcomes, report, 0.0), trained


def alone(folder: Path, size: tuple[int, int, int]) -> tuple[float, float]:
    """Median seconds of recording a step, and its megabytes."""
    batch, responses, trained = scored_rows(*size)
    file = RecordFile(folder, 2_000_000, None)
    recorder = SampleRecorder(file, AutoTokenizer.from_pretrained(save_tiny(folder / "model")))
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        recorder.record(step, Experience(batch, responses), trained, trained)
        seconds.append(time.perf_counter() - began)
    size_of_step = sum(head.size for head in heads(folder / RECORDS_FILE)) / STEPS
    return median(seconds), size_of_step / 1e6


def of_run(folder: Path, overrides: list[str]) -> tuple[float, float, float]:
    """Seconds of a step, seconds of recording it, both medians, and megabytes of a step."""
    run = build(load_config(None, overrides), lambda activity: None)
    try:
        run.trainer.fit()
    finally:
        run.close()
    metrics = read_metrics(folder)
    steps = [step for step in sorted(metrics) if "timing_s/step" in metrics[step]][2:]
    size = sum(head.size for head in heads(folder / RECORDS_FILE)) / max(len(steps), 1)
    step, record = (sum(metrics[at].get(f"timing_s/{name}", 0.0) for at in steps) for name in ("step", "record"))
    return step / len(steps), record / len(steps), size / 1e6


def measure() -> list[str]:
    """Lines of the table."""
    table = []
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        for index, (name, size) in enumerate(SIZES.items()):
            seconds, megabytes = alone(root / f"alone_{index}", size)
            table.append((f"{name}, recorded alone", "-", f"{1e3 * seconds:.0f} ms", "-", f"{megabytes:.2f}"))
        inputs = write_inputs(root / "inputs")
        save_tiny(inputs / "model", **MODEL)
        write_jsonl(inputs / "train.jsonl", rows(count=200))
        text = [
            *base_overrides(inputs, root / "text"),
            "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.max_response_length=128",
            "actor_rollout_ref.rollout.ignore_eos=True", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "trainer.total_training_steps=6", "trainer.preflight=False", "trainer.save_freq=0",
        ]  # fmt: skip
        control = [
            "env.train.id=CartPole-v1", f"trainer.default_local_dir={root / 'control'}", "trainer.save_freq=0",
            "trainer.total_training_steps=200", "trainer.test_freq=-1", "trainer.val_before_train=False",
            "trainer.logger=file", "trainer.preflight=False", "trainer.log_freq=1",
        ]  # fmt: skip
        for name, folder, overrides in (
            ("PPO of a policy of 3 million weights, 32 responses of 128 tokens", root / "text", text),
            ("CartPole, 200 steps", root / "control", control),
        ):
            step, record, megabytes = of_run(folder, overrides)
            share = f"{record / step:.1%}"
            table.append((name, f"{1e3 * step:.0f} ms", f"{1e3 * record:.1f} ms", share, f"{megabytes:.2f}"))
            print(table[-1], flush=True)
    return grid(HEAD, table)


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    given = parser.parse_args()
    lines = [*measure(), "", f"{machine_line()}."]
    print("\n".join(lines))
    if given.write:
        write_between(given.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
