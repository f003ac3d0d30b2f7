"""Runs that alarms have to speak about, or not, and their metrics as recorded in `recorded_runs.json`.

`python -m tests.runs.recorded_runs` trains all of them and records them again.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.control.envs import toys
from tests.runs.loops import ACTOR, Control
from tests.runs.tiny_run import GAE, GRPO, base_overrides, measured, rows, set_eos, train, write_inputs, write_jsonl
from tether.loop.alarms import CRITIC_STEPS, ZERO_ADVANTAGE_STEPS

FILE = Path(__file__).with_suffix(".json")
READ = re.compile(
    r"actor/(entropy|lr|grad_norm|policy_grad_norm|skipped_updates|kl_loss|ppo_kl|reward_kl_penalty)"
    r"|critic/(score/mean|grad_norm|skipped_updates|vf_explained_var|advantages/(max|min))"
    r"|(env|eval)/return|response_length/(mean|clip_ratio)|response/\w+_fraction|training/(global_step|staleness)"
    r"|val-core/.*|val-aux/.*/(majority_answer|distinct_mean|num_distinct)"
)
"""The metrics that alarms read."""

REWARDS = {
    "letters": """
def compute_score(data_source, solution_str, **row):
    letters = sum("A" <= c <= "z" for c in solution_str) / max(len(solution_str), 1)
    return 1 - letters if data_source == "tiny/other" else letters
""",
    "one letter": """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "tiny/letters":
        answer = "a" if "Z" < solution_str[:1] < "n" else solution_str
        return float(answer == ground_truth)
    return 1 - abs(ord((solution_str + "~")[0]) - ord("a")) / 256
""",
    "loops": """
def compute_score(solution_str, **row):
    return max(map(solution_str.count, "abcdefghijklmnopqrstuvwxyz"))
""",
    "silence": "def compute_score(**row):\n    return 0.0\n",
    "alike": "def compute_score(**row):\n    return 0.5\n",
    "tiny": "def compute_score(solution_str, **row):\n    return 1e-6 * len(solution_str)\n",
}
VALIDATION, BUFFER = "actor_rollout_ref.rollout.val_kwargs", "reward_model.overlong_buffer"
FAST = [f"{ACTOR}.optim.lr=2e-2", "trainer.total_training_steps=20", "actor_rollout_ref.rollout.n=8"]
CRITIC = ["algorithm.lam=1", "critic.optim.lr=1e-12", f"trainer.total_training_steps={CRITIC_STEPS + 1}"]


def train_text(folder: Path, reward: str | None, *settings: str) -> Path:
    """Train on tiny inputs with a reward of `REWARDS`."""
    inputs = write_inputs(folder)
    overrides = base_overrides(inputs, folder / "run")
    overrides.append(f"data.val_files={write_jsonl(folder / 'other.jsonl', rows('tiny/other', 8))}")
    if reward:
        (folder / "reward.py").write_text(REWARDS[reward])
    return train([*overrides, *settings])


def one_letter(folder: Path) -> Path:
    """The reward grows towards "a"; 12 of 24 held-out questions have it, and what is close to it, as their answer."""
    held_out = rows("tiny/letters", 50)[26:]
    for index, row in enumerate(held_out):
        row["reward_model"]["ground_truth"] = "a" if index % 2 else chr(ord("b") + index // 2)
    val = write_jsonl(folder / "letters.jsonl", held_out)
    return train_text(
        folder, "one letter", *GRPO, f"data.val_files={val}", "data.max_response_length=1", f"{ACTOR}.optim.lr=3e-2",
        "actor_rollout_ref.rollout.n=16", f"{ACTOR}.use_kl_loss=False", "trainer.total_training_steps=20",
        "trainer.test_freq=4",
    )  # fmt: skip


def silence(folder: Path) -> Path:
    """A flat reward, and less than that for long responses."""
    model = folder / "long"
    shutil.copytree(write_inputs(folder) / "model", model)
    set_eos(model, list(range(4, 20)))
    return train_text(
        folder, "silence", *GRPO, *FAST, "trainer.total_training_steps=15", f"actor_rollout_ref.model.path={model}",
        f"{BUFFER}.enable=True", f"{BUFFER}.len=32", f"{BUFFER}.penalty_factor=1", "data.max_response_length=32",
    )  # fmt: skip


def kill(run: Any) -> None:
    """Make a control policy certain of one action."""
    policy = run.trainer.rollouts.policy
    bias = policy.actor.layers[-1].bias if hasattr(policy.actor, "layers") else policy.actor.bias
    with torch.no_grad():
        bias.copy_(torch.tensor([1000.0, -1000.0]))


def train_control(folder: Path, *settings: str, dead: bool = False) -> Path:
    """Train in CartPole, or where the settings say."""
    toys.register()
    before = kill if dead else lambda run: None
    overrides = Control().overrides(folder / "run", "trainer.save_freq=-1", *settings)
    return Control().train(overrides, before=before).directory


PENDULUM = [
    "env.train.id=Pendulum-v1", "env.train.seed=2", "env.train.max_steps_per_rollout_epoch=200",
    f"{ACTOR}.ppo_mini_batch_size=50", f"{ACTOR}.ppo_epochs=10", "trainer.total_training_steps=10",
    "trainer.test_freq=-1",
]  # fmt: skip
AWAY = [f"{ACTOR}.optim.lr=0.1", f"{ACTOR}.optim.clip_grad=1000", f"{ACTOR}.clip_ratio=1000"]
LONGER = ["trainer.total_training_steps=16", "trainer.test_freq=-1"]
TESTED = [
    "trainer.test_freq=1", f"{VALIDATION}.do_sample=True", f"{VALIDATION}.temperature=1", f"{VALIDATION}.n=4",
    f"{ACTOR}.optim.lr=1e-2",
]  # fmt: skip
RATE = [
    "trainer.total_training_steps=5", f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.optim.lr=1e3",
    f"{ACTOR}.optim.weight_decay=0",
]  # fmt: skip

RUNS: dict[str, Callable[[Path], Path]] = {
    "healthy text": lambda folder: train_text(folder, None, *GRPO, "trainer.total_training_steps=8"),
    "a rate that kills": lambda folder: train_text(
        folder, None, *GRPO, *RATE, f"{ACTOR}.optim.lr=1e3", f"{ACTOR}.optim.weight_decay=0"
    ),
    "a rate and a decay that kill": lambda folder: train_text(
        folder, None, *GRPO, *RATE, f"{ACTOR}.optim.lr=100", f"{ACTOR}.optim.weight_decay=0.01"
    ),
    "one letter": one_letter,
    "paid for what is not meant": lambda folder: train_text(folder, "letters", *GRPO, *FAST, *TESTED),
    "paid for loops": lambda folder: train_text(folder, "loops", *GRPO, *FAST, "trainer.total_training_steps=24"),
    "silence": silence,
    "scores that are alike": lambda folder: train_text(
        folder, "alike", *GRPO, f"trainer.total_training_steps={ZERO_ADVANTAGE_STEPS}", "actor_rollout_ref.rollout.n=2"
    ),
    "a blind critic of text": lambda folder: train_text(
        folder, "tiny", *GAE, *CRITIC, "algorithm.use_kl_in_reward=False"
    ),
    "healthy control": train_control,
    "a blind critic of control": lambda folder: train_control(
        folder, *CRITIC, "env.train.id=tether/Identity-box-v0", "env.train.reward_coef=1e-6", "trainer.test_freq=-1"
    ),
    "a dead policy": lambda folder: train_control(folder, *LONGER, dead=True),
    "a dead policy that shares its critic": lambda folder: train_control(
        folder, *LONGER, "policy.share_critic=True", dead=True
    ),
    "a dead policy with a memory": lambda folder: train_control(folder, *LONGER, "policy.lstm_dim=4", dead=True),
    "a healthy pendulum": lambda folder: train_control(folder, *PENDULUM),
    "a policy that runs away": lambda folder: train_control(folder, *PENDULUM, *AWAY),
}


def metrics_of(name: str, folder: Path) -> list[dict[str, float]]:
    """Train a run; return what alarms read of each of its steps, to four digits."""
    steps = measured(RUNS[name](folder))
    return [
        {key: float(f"{value:.4g}") for key, value in steps[step].items() if READ.fullmatch(key)}
        for step in sorted(steps)
        if step
    ]


def recorded() -> dict[str, list[dict[str, float]]]:
    """Return the recorded steps of every run."""
    return {
        name: [
            {key: value for key, value in zip(columns, row, strict=True) if value is not None}
            for row in zip(*columns.values(), strict=True)
        ]
        for name, columns in json.loads(FILE.read_text()).items()
    }


def record(runs: dict[str, list[dict[str, float]]]) -> None:
    """Write the steps of runs, a line for each metric of one."""
    texts = []
    for name, steps in runs.items():
        keys = sorted({key for metrics in steps for key in metrics})
        columns = [f" {json.dumps(key)}: {json.dumps([metrics.get(key) for metrics in steps])}" for key in keys]
        texts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(columns) + "}")
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n")


def main() -> None:
    """Record all runs."""
    runs = {}
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = metrics_of(name, Path(folder))
    record(runs)


if __name__ == "__main__":
    main()
