"""Tiny runs: PPO and GRPO for language models and control, resuming, and several devices compared with one."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from tether.checkpoints import load_state
from tether.commands.python import train
from tether.commands.result import TrainingResult
from tether.commands.selftest.results import (
    CheckContext,
    CheckOutcome,
    failed,
    not_applicable,
    passed,
    relative_distance,
)
from tether.metrics.loggers import read_metrics
from tether.runtime.install import pip_install

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
STEPS = 2
RUN_TIMEOUT_S = 240
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    f"{ROLLOUT}.n=2",
    "critic.optim.lr=1e-2",
    "critic.model.use_remove_padding=True",
]
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.use_kl_loss=True"]
CONTROL = [
    "env.train.id=CartPole-v1",
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=16",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "trainer.log_freq=1",
]
CONTROL_GRPO = ["algorithm.adv_estimator=grpo", "env.train.auto_reset=False", "env.train.group_size=2"]
FLOAT32 = [f"{ACTOR}.fsdp_config.dtype=float32", f"{ROLLOUT}.dtype=float32", "critic.model.fsdp_config.dtype=float32"]
_CLOCKS = ("timing_", "perf/", "reward/call_s/")


def text_ppo(context: CheckContext) -> CheckOutcome:
    """Train with actor, critic and reference; resume from step 1 and compare."""
    return _trains_and_resumes(context, "text-ppo", [*text_overrides(context), *PPO])


def text_grpo(context: CheckContext) -> CheckOutcome:
    """Train with groups of responses."""
    return _trains(run_tiny(context, "text-grpo", [*text_overrides(context), *GRPO]))


def control_ppo(context: CheckContext) -> CheckOutcome:
    """Train on CartPole; resume from step 1 and compare."""
    if missing := _without_gymnasium():
        return missing
    return _trains_and_resumes(context, "control-ppo", CONTROL)


def control_grpo(context: CheckContext) -> CheckOutcome:
    """Train on CartPole with groups of episodes."""
    if missing := _without_gymnasium():
        return missing
    return _trains(run_tiny(context, "control-grpo", [*CONTROL, *CONTROL_GRPO]))


def two_ranks(context: CheckContext) -> CheckOutcome:
    """Train on two processes and on all GPUs, compare weights with those of one process, and report the transfer."""
    return _as_one_device(context, "ranks", [])


def ulysses(context: CheckContext) -> CheckOutcome:
    """Split each row of tokens between two processes, and compare weights with a run on one process."""
    roles = (ACTOR, "critic")
    return _as_one_device(context, "ulysses", [f"{role}.ulysses_sequence_parallel_size=2" for role in roles])


def offloaded(context: CheckContext) -> CheckOutcome:
    """Offload the weights of two ranks to host memory while they do not run, and compare weights."""
    sections = (f"{ACTOR}.fsdp_config", "critic.model.fsdp_config")
    return _as_one_device(context, "offload", [f"{section}.param_offload=True" for section in sections])


def megatron_tensor(context: CheckContext) -> CheckOutcome:
    """Split each layer over two ranks of Megatron-core, and compare weights."""
    return _megatron(context, "tensor_model_parallel_size")


def megatron_pipeline(context: CheckContext) -> CheckOutcome:
    """Split the layers between two ranks of Megatron-core, and compare weights."""
    return _megatron(context, "pipeline_model_parallel_size")


def _megatron(context: CheckContext, size: str) -> CheckOutcome:
    if importlib.util.find_spec("megatron") is None:
        return not_applicable(f"megatron-core: {pip_install('megatron')}")
    overrides = [f"{role}.strategy=megatron" for role in (ACTOR, "critic")]
    overrides += [f"{role}.megatron.{size}=2" for role in (ACTOR, "critic")]
    return _as_one_device(context, f"megatron-{size}", overrides)


def _without_gymnasium() -> CheckOutcome | None:
    if importlib.util.find_spec("gymnasium") is None:
        return not_applicable(f"gymnasium: {pip_install('gymnasium')}")
    return None


def text_overrides(context: CheckContext) -> list[str]:
    """Return the overrides of a tiny run of a language model, without those of the algorithm."""
    model = context.inputs / "model"
    return [
        f"data.train_files={context.inputs / 'train.jsonl'}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.optim.lr=1e-3",
        "reward_model.num_workers=1",
        f"custom_reward_function.path={context.inputs / 'reward.py'}",
    ]


def _common(context: CheckContext, name: str) -> list[str]:
    return [
        "trainer.logger=file",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=0",
        "trainer.preflight=False",
        f"trainer.default_local_dir={context.folder / name}",
    ]


def run_tiny(
    context: CheckContext, name: str, overrides: Sequence[str], callbacks: Sequence[object] = ()
) -> TrainingResult:
    """Train in this process, with its output hidden."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        return train(None, [*_common(context, name), *overrides], callbacks=callbacks)


def _trains(result: TrainingResult) -> CheckOutcome:
    """Check that a run completed its steps, with finite losses and gradients."""
    broken = {
        key for row in result.metrics for key in ("actor/pg_loss", "actor/grad_norm") if not math.isfinite(row[key])
    }
    if result.step != STEPS or broken:
        return failed(f"{result.step} of {STEPS} steps; not finite: {', '.join(sorted(broken)) or 'nothing'}")
    return passed(f"{STEPS} steps, gradient norm {result.metrics[-1]['actor/grad_norm']:.3g}")


def _trains_and_resumes(context: CheckContext, name: str, overrides: Sequence[str]) -> CheckOutcome:
    result = run_tiny(context, name, overrides)
    trained = _trains(result)
    if trained.status != "pass":
        return trained
    start = f"trainer.resume_from_path={result.folder / 'global_step_1'}"
    again = run_tiny(context, f"{name}-resumed", [*overrides, "trainer.resume_mode=resume_path", start])
    different = [
        f"step {STEPS}: {key}"
        for key, value in result.metrics[-1].items()
        if not key.startswith(_CLOCKS) and not same(value, again.metrics[-1].get(key))
    ]
    checkpoints = [folder / f"global_step_{STEPS}" for folder in (result.folder, again.folder)]
    different += [name for name in contents(checkpoints[0]) if not _same_file(name, checkpoints)]
    if different:
        return failed(f"the resumed run differs from the uninterrupted one in {', '.join(different[:5])}")
    return passed(f"{trained.detail}; resumed from step 1, the same bits")


def contents(checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint with weights and training state."""
    files = [*checkpoint.rglob("*.safetensors"), *(checkpoint / "training").glob("*")]
    return sorted(str(file.relative_to(checkpoint)) for file in files if file.is_file())


def _same_file(name: str, checkpoints: Sequence[Path]) -> bool:
    read = load_file if name.endswith(".safetensors") else load_state
    files = [checkpoint / name for checkpoint in checkpoints]
    return files[1].is_file() and same(read(files[0]), read(files[1]))


def same(one: object, other: object) -> bool:
    """Whether two trees of tensors and numbers are bitwise equal; NaN equals NaN."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and one.equal(other)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


def _as_one_device(context: CheckContext, name: str, overrides: Sequence[str]) -> CheckOutcome:
    """Compare the weights after two steps on several ranks with those after two steps in one process."""
    if importlib.util.find_spec("ray") is None:
        return not_applicable(f"ray: {pip_install('ray')}")
    gpus = torch.cuda.device_count() if context.device.type == "cuda" else 0
    device, ranks = ("cuda", gpus) if gpus > 1 else ("cpu", 2)
    if overrides:
        ranks = 2  # sizes that two ranks can divide evenly
    base = [*text_overrides(context), *PPO, *FLOAT32, f"trainer.device={device}", "trainer.num_threads=1"]
    single = context.folder / f"one-{device}"
    if not (single / f"global_step_{STEPS}").is_dir():
        run_tiny(context, single.name, base)
    several = context.folder / name
    _run_apart(context, name, [*base, *overrides, f"trainer.n_gpus_per_node={ranks}"])
    expected, weights = (_weights(folder / f"global_step_{STEPS}") for folder in (single, several))
    distance = max(relative_distance(weights[name], value) for name, value in expected.items())
    last = read_metrics(several)[STEPS]
    sent, seconds = last.get("transfer/weights_bytes", math.nan), last.get("timing_s/update_weights", math.nan)
    detail = f"{ranks} ranks on {device}: weights differ from one device's by {distance:.1g} of their size"
    if distance > 1e-3:
        return failed(detail)
    return passed(f"{detail}; weights to the sampler: {sent / 1e6:.2f} MB in {seconds:.3f} s")


def _run_apart(context: CheckContext, name: str, overrides: Sequence[str]) -> None:
    """Train in a separate process, whose descendants end with it."""
    command = [sys.executable, "-m", "tether", "train", *_common(context, name), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-60:]
        last = lines[-1] if lines else "no output"
        # The first line is shown for the check; the report has all lines.
        raise RuntimeError("\n".join([f"tether train ended with code {done.returncode}: {last}", *lines]))


def _weights(checkpoint: Path) -> dict[str, Tensor]:
    files = [file for role in ("actor", "critic") for file in (checkpoint / role).glob("model*.safetensors")]
    return {f"{file.parent.name}.{name}": value for file in files for name, value in load_file(file).items()}
