"""TRL's GRPOTrainer: python -m benchmarks.speed.peers.trl_worker JOB.json, one training step for each request.

The job names the model, the prompts, the samples a prompt, the responses a step, the tokens of a response and the
number of threads. With `rows`, it is the update alone: the batch is made of these prompts, responses and advantages
instead of being sampled.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.speed.peers.protocol import Line
from benchmarks.speed.timing import resident


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


class Paced(TrainerCallback):
    """Starts a step when a request comes, and answers when it is done."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.trainer: Timed | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.line.wait()
        Path("/proc/self/clear_refs").write_text("5")
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer
        spent = time.perf_counter() - self.start
        self.line.answer(seconds=spent, sampling=self.trainer.sampling, peak=resident("VmHWM"))


class Timed(GRPOTrainer):
    """Measures how long sampling takes, and can be handed a batch instead."""

    given: dict[str, torch.Tensor] | None = None
    sampling = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        start = time.perf_counter()
        made = dict(self.given) if self.given else super()._generate_and_score_completions(inputs)
        self.sampling = time.perf_counter() - start
        return made


def batch_of(rows: list[dict[str, Any]], pad: int) -> dict[str, torch.Tensor]:
    prompts, responses = [row["prompt"] for row in rows], [row["response"] for row in rows]
    left, right = max(map(len, prompts)), max(map(len, responses))
    mask = [[1] * len(r) + [0] * (right - len(r)) for r in responses]
    return {
        "prompt_ids": torch.tensor([[pad] * (left - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([r + [pad] * (right - len(r)) for r in responses]),
        "completion_mask": torch.tensor(mask),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "num_items_in_batch": torch.tensor(mask).sum(),
    }


def main() -> None:
    line, job = Line(), json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    rows, samples = job.get("rows"), job["samples"]
    count = len(rows) if rows else job["responses"]
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=job["autocast"],
            model_init_kwargs={"dtype": "float32" if job["autocast"] else "bfloat16"},
            per_device_train_batch_size=job["micro"] or count,
            gradient_accumulation_steps=count // (job["micro"] or count),
            num_generations=samples,
            max_completion_length=job["new_tokens"],
            generation_kwargs={"min_new_tokens": job["new_tokens"]},
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta=0.0,
            gradient_checkpointing=job["checkpointing"],
            max_steps=10**6,
            save_strategy="no",
            logging_steps=10**6,
            report_to=[],
            disable_tqdm=True,
        )
        paced = Paced(line)
        trainer = Timed(
            model=job["model"],
            reward_funcs=share_of_digits,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": text} for text in job["prompts"]]),
            processing_class=tokenizer,
            callbacks=[paced],
        )
        paced.trainer = trainer
        if rows:
            trainer.given = batch_of(rows, tokenizer.pad_token_id)
        line.answer(version=version("trl"))
        trainer.train()


if __name__ == "__main__":
    main()
