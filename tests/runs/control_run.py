"""Embodied runs in this process, by the trainer and by the commands that a user types."""

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.runs.tiny_run import measured, same
from tether.checkpoints import load_state
from tether.commands.cli import app
from tether.config import load_config
from tether.control.build import build_control_run
from tether.control.learning.rollouts import POLICY

RUN = [
    "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16", "env.eval.total_num_envs=2",
    "env.eval.num_episodes=2", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "policy.hidden_dim=8",
    "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=False", "trainer.logger=file",
]  # fmt: skip
"""Two training steps of four small environments, and a test after them."""


def train(overrides, until=None):
    """Train in this process, at most up to a step at which a signal is said to come."""
    run = build_control_run(load_config(None, overrides))
    try:
        run.trainer.fit(lambda: until is not None and run.trainer.step_number >= until)
    finally:
        run.close()
    return run


def call(*arguments):
    """The output of a command, which has to succeed."""
    shown = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert shown.exit_code == 0, f"{shown.output} {shown.exception}"
    return shown.output


def contents(checkpoint):
    """Everything that a checkpoint holds of the training."""
    states = {path.name: load_state(path) for path in (checkpoint / "training").iterdir()}
    return states | {"weights": load_file(checkpoint / POLICY / "policy.safetensors")}


def without_clocks(directory):
    """The metrics of a run that depend on nothing but its inputs."""
    return {
        step: {key: value for key, value in metrics.items() if key != "perf/sps"}
        for step, metrics in measured(directory).items()
    }


def assert_resume_is_exact(folder, overrides, total, start=1):
    """Train straight, and again from the checkpoint of step `start`: weights, states and metrics are the same bits.

    Returns the straight run, which saved every step.
    """
    whole = train([*overrides, "trainer.save_freq=1", f"trainer.default_local_dir={folder / 'whole'}"])
    checkpoint = f"trainer.resume_from_path={whole.directory / f'global_step_{start}'}"
    resume = ["trainer.resume_mode=resume_path", checkpoint, f"trainer.save_freq={total}"]
    again = train([*overrides, *resume, f"trainer.default_local_dir={folder / 'again'}"])
    assert again.resumed_from == whole.directory / f"global_step_{start}"
    assert same(contents(whole.directory / f"global_step_{total}"), contents(again.directory / f"global_step_{total}"))
    expected = without_clocks(whole.directory)
    assert {step: metrics for step, metrics in expected.items() if step > start} == without_clocks(again.directory)
    return whole


def assert_ratios_are_one(directory, tolerance):
    """The sampler's probabilities are the trainer's, in a run whose steps make one update each."""
    for step, metrics in measured(directory).items():
        if step > 0:
            assert metrics["actor/ratio_min"] == pytest.approx(1.0, abs=tolerance), step
            assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=tolerance), step
