"""The tasks, the model that learns them, and one training run of either through the trainer of tether."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether.config import load_config
from tether.loop.loop import Trainer
from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import read_metrics
from tether.text.build import build_run

PAD, EOS, GO = "_", ".", ">"
LETTERS = "abcdef"
TOKENS = (PAD, EOS, GO, *LETTERS)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}" + GO

REWARD_FILE = Path(__file__).with_name("reward.py")


@dataclass(frozen=True)
class Task:
    """Prompts with their truths, and how long an answer may be."""

    name: str
    prompts: tuple[tuple[str, str], ...]
    """(prompt, ground truth)."""
    max_response_length: int


def _followers(letter: int) -> str:
    """One to three letters that follow on `letter` in the circle of letters."""
    return "".join(LETTERS[(letter + 1 + i) % len(LETTERS)] for i in range(1 + letter % 3))


SPELL = Task("spell", tuple((letter, _followers(i)) for i, letter in enumerate(LETTERS)), max_response_length=4)
"""A letter: answer with the one, two or three that follow on it (the prompt says how many), and stop."""

LEDGER = Task(
    "ledger",
    tuple((first + second, f"{first}{2 * i}") for first, (i, second) in itertools.product(LETTERS, enumerate(LETTERS))),
    max_response_length=1,
)
"""Two letters: answer with the first. The second says what the prompt is worth anyway: from 0 to 10 times as much as
the right answer."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    base = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=PAD))
    base.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    base.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=base, pad_token=PAD, eos_token=EOS)
    fast.chat_template = TEMPLATE
    return fast


def tiny_llama(seed: int, heads: int = 4, head_dim: int = 8) -> LlamaForCausalLM:
    """Two layers, drawn at random; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=32,
        initializer_range=0.1,
        pad_token_id=TOKENS.index(PAD),
        bos_token_id=None,
        eos_token_id=TOKENS.index(EOS),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def write_inputs(task: Task, seed: int, folder: Path) -> None:
    """Write the model, the tokenizer and the prompts of a run."""
    tiny_llama(seed).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "data_source": task.name,
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for prompt, truth in task.prompts
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def validation_answers(task: Task) -> int:
    """Answers sampled per prompt, so that a score is of about as many of them in every task."""
    return 192 // len(task.prompts)


def overrides(task: Task, steps: int, seed: int, folder: Path) -> list[str]:
    """The settings that all runs of a task share; the algorithm is still to be named."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder / 'prompts.jsonl'}",
        f"data.val_files={folder / 'prompts.jsonl'}",
        f"data.train_batch_size={len(task.prompts)}",
        "data.max_prompt_length=8",
        f"data.max_response_length={task.max_response_length}",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"critic.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1024",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "critic.model.fsdp_config.dtype=float32",
        f"{rollout}.dtype=float32",
        f"{rollout}.val_kwargs.do_sample=True",
        f"{rollout}.val_kwargs.temperature=1",
        f"{rollout}.val_kwargs.n={validation_answers(task)}",
        f"custom_reward_function.path={REWARD_FILE}",
        "reward_model.num_workers=1",
        f"trainer.seed={seed}",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        "trainer.logger=file",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


@dataclass(frozen=True)
class Learned:
    """The outcome of one run."""

    start: float
    """Mean ``acc`` of sampled answers to all prompts, before training."""
    end: float
    """The same after the last step."""
    curve: Sequence[float]
    """Mean score of the training batch of each step."""
    seconds: float


def train(
    task: Task,
    settings: Sequence[str],
    *,
    steps: int,
    seed: int,
    folder: Path,
    sabotage: Callable[[Trainer], None] | None = None,
) -> Learned:
    """Train the random model of `seed` through `build_run` and `Trainer.fit`.

    Args:
        task: what to learn.
        settings: overrides of the algorithm.
        steps: training steps.
        seed: of the model and of the run.
        folder: an empty folder for the inputs and the run.
        sabotage: breaks the trainer before the first step (negative controls).
    """
    start = time.perf_counter()
    write_inputs(task, seed, folder)
    run = build_run(load_config(None, [*overrides(task, steps, seed, folder), *settings]))
    try:
        if sabotage:
            sabotage(run.trainer)
        run.trainer.fit()
    finally:
        run.close()
    metrics = read_metrics(run.directory)
    before, after = (next(iter(validation_means(metrics[step]).values())) for step in (0, steps))
    curve = [metrics[step]["critic/score/mean"] for step in range(1, steps + 1)]
    return Learned(before, after, curve, time.perf_counter() - start)
