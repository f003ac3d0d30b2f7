"""A whole run in miniature: a random model of bytes, ten prompts, a reward file, and the overrides that name them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.device import DEVICE
from tests.tiny import EOS_ID, save_tiny
from tether.config import load_config
from tether.metrics.loggers.jsonl import read_metrics
from tether.text.build import build_run

NUM_PROMPTS = 10
BATCH = 4  # three steps an epoch, the last of them short
FAST = [
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "critic.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
]
"""Nothing is computed to save memory."""
LIGHT = [*FAST, "custom_reward_function.path=object:letters"]
"""Half of the processor time: the reward is called in this process, too."""

REWARD = '''
"""Likes letters. Says how many digits it saw, too."""

def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    letters = sum(c.isalpha() for c in solution_str)
    return {"score": weight * letters / 8, "digits": sum(c.isdigit() for c in solution_str)}
'''

GAE = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.target_kl=0.01",
    "algorithm.kl_ctrl.horizon=20",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "critic.optim.lr=1e-2",
    "critic.optim.lr_warmup_steps=2",
]
GRPO = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
]


def rows(source: str = "tiny/sums", count: int = NUM_PROMPTS) -> list[dict[str, Any]]:
    """Rows in verl's layout."""
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{i}+{i}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def held_out(folder: Path) -> str:
    """The override that names seven validation rows of two sources, none of which is in the training data."""
    unseen = [
        *rows("tiny/sums", NUM_PROMPTS + 5)[NUM_PROMPTS:],
        *rows("tiny/other", NUM_PROMPTS + 7)[NUM_PROMPTS + 5 :],
    ]
    return f"data.val_files={write_jsonl(folder / 'held_out.jsonl', unseen)}"


def set_eos(model: Path, ids: int | list[int] | None) -> None:
    """Let the generation config of a model directory name these end-of-sequence tokens."""
    file = model / "generation_config.json"
    config = json.loads(file.read_text())
    config.pop("eos_token_id", None)
    file.write_text(json.dumps(config if ids is None else config | {"eos_token_id": ids}))


def write_inputs(folder: Path) -> Path:
    """Write model/, train.jsonl, val.jsonl and reward.py; returns `folder`.

    A third of the vocabulary ends a response, so that lengths vary and few responses are cut.
    """
    set_eos(save_tiny(folder / "model"), [EOS_ID, *range(4, 90)])
    write_jsonl(folder / "train.jsonl", rows())
    write_jsonl(folder / "val.jsonl", [*rows("tiny/sums", 5), *rows("tiny/other", 2)])
    (folder / "reward.py").write_text(REWARD)
    return folder


def base_overrides(inputs: Path, run: Path) -> list[str]:
    """A run on `inputs` in the folder `run`; the algorithm is still to be named (`GAE`, `GRPO`)."""
    return [
        f"data.train_files={inputs / 'train.jsonl'}",
        f"data.val_files={inputs / 'val.jsonl'}",
        f"data.train_batch_size={BATCH}",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={inputs / 'model'}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
        f"critic.model.path={inputs / 'model'}",
        "critic.model.fsdp_config.dtype=float32",
        f"custom_reward_function.path={inputs / 'reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.device={DEVICE}",
        "trainer.num_threads=1",
        "trainer.logger=file",
        "trainer.total_training_steps=3",
        "trainer.save_freq=0",
        "trainer.val_before_train=False",
        f"trainer.default_local_dir={run}",
    ]


def reward_function(source: str) -> Callable[..., Any]:
    """Return the ``compute_score`` that the text of a reward file defines."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["compute_score"]  # type: ignore[no-any-return]


def train(overrides: list[str], file: Path | None = None) -> Path:
    """Train in this process; returns the folder of the run."""
    run = build_run(load_config(file, overrides))
    try:
        run.trainer.fit()
    finally:
        run.close()
    return run.directory


def weights(checkpoint: Path, role: str = "actor") -> dict[str, torch.Tensor]:
    """Every parameter that a checkpoint holds of a role."""
    files = (checkpoint / role).glob("model*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def without_clocks(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step that depend on nothing but its inputs: all but durations and memory."""
    clocks = ("timing_", "perf/", "reward/call_s/")
    return {key: value for key, value in metrics.items() if not key.startswith(clocks)}


def measured(directory: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a run by step, without clocks."""
    return {step: without_clocks(metrics) for step, metrics in read_metrics(directory).items()}


def same(left: Any, right: Any) -> bool:
    """Bitwise equality of trees of tensors and numbers; NaN equals NaN."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return bool(left == right)
