"""Promise 2: a run that was stopped and goes on is bitwise the run that was never stopped.

`tests/invariants/test_resume_is_exact.py` has other options, and what happens when a state is lost.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import forking
from tests.runs.loops import wait_for_change
from tests.runs.resume import assert_same_end
from tests.runs.tiny_run import GAE, GRPO, LIGHT, base_overrides, measured, same, train, weights
from tether.checkpoints.store import TRACKER
from tether.config import load_config
from tether.metrics.loggers.jsonl import read_samples
from tether.text.build import build_run

TOTAL = 4
ALGORITHMS = {
    "gae": [*GAE, "trainer.critic_warmup=3"],
    "grpo": GRPO,
    "shaped": [
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.normalize_rewards=running",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=4",
    ],
    "one_step_off": [*GRPO, "trainer.async_mode=one_step_off"],
    "lora": [*GAE, "actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4"],
}
Straight = Callable[[str], Path]


@pytest.fixture(scope="module")
def straight(inputs: Path, tmp_path_factory) -> Straight:
    """Name of an algorithm -> folder of its uninterrupted run, with a checkpoint of every step."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            done[name] = train([*arguments(name, inputs, tmp_path_factory.mktemp(name)), "trainer.save_freq=1"])
        return done[name]

    return run


def arguments(name: str, inputs: Path, directory: Path) -> list[str]:
    total = f"trainer.total_training_steps={TOTAL}"
    return [*base_overrides(inputs, directory), *ALGORITHMS[name], *LIGHT, total, "trainer.test_freq=2"]


def going_on(name: str, inputs: Path, checkpoint: Path, directory: Path) -> list[str]:
    return [
        *arguments(name, inputs, directory),
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
        f"trainer.save_freq={TOTAL}",
    ]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param("gae", 1, id="gae-during-critic-warmup", marks=pytest.mark.slow),
        pytest.param("gae", 2, id="gae-mid-epoch", marks=pytest.mark.slow),
        pytest.param("gae", 3, id="gae-epoch-boundary", marks=pytest.mark.slow),
        pytest.param("grpo", 2, id="grpo-mid-epoch", marks=pytest.mark.slow),
        pytest.param("grpo", 3, id="grpo-epoch-boundary", marks=pytest.mark.slow),
        pytest.param("shaped", 2, id="running-reward-statistics", marks=pytest.mark.slow),
        pytest.param("lora", 2, id="lora", marks=pytest.mark.slow),
        pytest.param("one_step_off", 1, id="one-step-off", marks=pytest.mark.slow),
        pytest.param("one_step_off", 3, id="one-step-off-before-the-last-step", marks=pytest.mark.slow),
    ],
)
def test_going_on_is_exact(name: str, step: int, straight: Straight, inputs: Path, tmp_path: Path):
    whole = straight(name)
    rest = train(going_on(name, inputs, whole / f"global_step_{step}", tmp_path))
    assert_same_end(whole / f"global_step_{TOTAL}", rest / f"global_step_{TOTAL}")
    expected = {n: metrics for n, metrics in measured(whole).items() if n > step}
    assert list(expected) == list(range(step + 1, TOTAL + 1))
    assert same(expected, measured(rest))
    assert {n: s for n, s in read_samples(whole).items() if n > step} == read_samples(rest)


@pytest.mark.slow  # as those of these tests that have this run
def test_what_must_be_restored_does_change(straight: Straight):
    """Otherwise the tests above would pass with half of the state missing."""
    metrics = measured(straight("gae"))
    assert len({metrics[n]["actor/reward_kl_penalty_coeff"] for n in metrics}) == TOTAL
    assert len({metrics[n]["actor/lr"] for n in metrics if n > 2}) == TOTAL - 2
    assert "actor/pg_loss" not in metrics[2]
    assert not same(weights(straight("gae") / "global_step_3"), weights(straight("gae") / "global_step_4"))


@pytest.mark.slow  # signals come before a validation in tests/invariants/test_both_loops.py, too
def test_stopped_before_a_validation_makes_up_for_it(straight: Straight, inputs: Path, tmp_path: Path):
    whole = straight("grpo")
    command = going_on("grpo", inputs, whole / "global_step_1", tmp_path)
    run = build_run(load_config(None, command))
    try:
        run.trainer.fit(interrupted=lambda: run.trainer.step_number == 2)
    finally:
        run.close()
    assert list(measured(tmp_path)) == [2]
    assert not read_samples(tmp_path)
    train([*arguments("grpo", inputs, tmp_path), f"trainer.save_freq={TOTAL}"])
    assert same({n: metrics for n, metrics in measured(whole).items() if n > 1}, measured(tmp_path))
    assert {n: samples for n, samples in read_samples(whole).items() if n > 1} == read_samples(tmp_path)
    assert_same_end(whole / f"global_step_{TOTAL}", tmp_path / f"global_step_{TOTAL}")


MOMENTS = ("metrics.jsonl", ".writing_global_step_*", TRACKER, "global_step_*")
"""The process is killed shortly after one of these changes: while training, saving, pruning, or starting."""


@pytest.mark.parametrize(("name", "kills"), [("gae", 4), pytest.param("one_step_off", 10, marks=pytest.mark.slow)])
def test_killed_again_and_again(name: str, kills: int, inputs: Path, tmp_path: Path):
    """Once at each of the moments, or more often."""
    steps = kills + 4
    saving = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    settings = [*ALGORITHMS[name], f"trainer.total_training_steps={steps}", *saving]
    whole, directory = tmp_path / "whole", tmp_path / "killed"
    overrides = [*base_overrides(inputs, directory), *settings]
    context = forking()
    straight = context.Process(target=train, args=([*base_overrides(inputs, whole), *settings],))
    straight.start()
    straight.join()
    assert straight.exitcode == 0
    noise = random.Random(0)
    for kill in range(kills):
        process = context.Process(target=train, args=(overrides,))
        begun = time.time_ns()
        process.start()
        wait_for_change(process, directory, MOMENTS[kill % len(MOMENTS)], begun)
        time.sleep(noise.uniform(0, 0.03))
        assert process.is_alive(), f"ended before kill {kill}"
        process.kill()
        process.join()
    for command in (overrides, [*base_overrides(inputs, whole), *settings]):
        process = context.Process(target=train, args=(command,))
        process.start()
        process.join()
        assert process.exitcode == 0
    assert same(measured(whole), measured(directory))
    assert_same_end(whole / f"global_step_{steps}", directory / f"global_step_{steps}")
    assert sorted(p.name for p in directory.glob("*global_step*")) == [f"global_step_{n}" for n in (steps - 1, steps)]
