"""Asynchronous training: batches are sampled while the policy learns, by weights that are only so old."""

import io
import json
import math
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.runs.tiny_run import GRPO, LIGHT, base_overrides, measured, same, train, weights
from tether.batch import WeightUpdate
from tether.config import load_config
from tether.loop.ahead import FILE, SamplingAhead, SourceAhead
from tether.loop.protocol import CheckpointExtras, EvaluationResult, Experience
from tether.metrics.timing import Timer
from tether.text.build import build_run
from tether.view.queries import sample, samples
from tether.view.run import RunFolder

MODES = {
    "one_step_off": ["trainer.async_mode=one_step_off"],
    "fully_async": ["trainer.async_mode=fully_async", "actor_rollout_ref.rollout.max_staleness=2"],
}


class Numbers:
    """A source that counts."""

    def __init__(self) -> None:
        self.dealt = 0

    def next(self, step: int) -> int:
        self.dealt += 1
        return self.dealt

    def metrics(self) -> dict[str, float]:
        return {"training/epoch": float(self.dealt)}

    def state_dict(self) -> dict[str, Any]:
        return {"dealt": self.dealt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dealt = state["dealt"]


class Echo:
    """Rollouts whose batch is (task, version of the weights); each waits until it `may` be drawn."""

    can_evaluate = True
    takes_newer = False

    def __init__(self) -> None:
        self.version, self.used = -1, 0
        self.may = threading.Semaphore(0)
        self.fails_at: int | None = None
        self.busy = threading.Lock()

    def begin(self, step: int) -> None:
        pass

    def collect(self, tasks: int, step: int, time: Timer, progress: Any) -> Experience[Any, None]:
        assert self.busy.acquire(blocking=False), "two use the engine at once"
        try:
            while not self.may.acquire(timeout=0.01):
                progress(0, 1)
            if step == self.fails_at:
                raise ValueError(f"no reward in step {step}")
            return Experience((tasks, self.version), None, {"own": 1.0})
        finally:
            self.busy.release()

    def load_weights(self, weights: WeightUpdate) -> None:
        assert not self.busy.locked() or self.takes_newer
        self.version = weights.version

    def evaluate(self, step: int, progress: Any) -> EvaluationResult:
        assert self.busy.acquire(blocking=False), "two use the engine at once"
        self.busy.release()
        return EvaluationResult({"version": float(self.version)})

    def checkpoint_extras(self, *, in_step: bool) -> CheckpointExtras:
        return CheckpointExtras({"inner": 1}, {"inner.bin": b"1"})

    def load_checkpoint(self, checkpoint: Path) -> None:
        pass


def update(version: int) -> WeightUpdate:
    return WeightUpdate(version, [("w", torch.tensor([float(version)]))])


def made(
    *, fixed: bool, staleness: int = 1, total: int = 9, partial: bool = False
) -> tuple[SamplingAhead[Any, Any], Echo]:
    echo = Echo()
    ahead = SamplingAhead(
        Numbers(), echo, lambda: update(0), total_steps=total, max_staleness=staleness, fixed=fixed, partial=partial
    )  # type: ignore[arg-type]
    ahead.begin(0)
    return ahead, echo


def take(ahead: SamplingAhead[Any, Any], step: int) -> Experience[Any, Any]:
    return ahead.collect(None, step, Timer(), lambda done, total: None)


def test_one_step_off_is_exactly_one_update_behind():
    ahead, echo = made(fixed=True, total=4)
    found = []
    for step in range(1, 5):
        echo.may.release()
        drawn = take(ahead, step)
        found.append((*drawn.batch, drawn.metrics["training/staleness"]))
        ahead.load_weights(update(step))
    ahead.close()
    # Step 1 learns from the first weights, step 2 too, as they were the newest when its batch was asked for.
    assert found == [(1, 0, 0), (2, 0, 1), (3, 1, 1), (4, 2, 1)]
    assert drawn.metrics["own"] == 1
    assert drawn.metrics["timing_s/sampling"] > 0


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded_however_fast_the_sampler_is(staleness: int):
    ahead, echo = made(fixed=False, staleness=staleness, total=9)
    echo.may.release(99)
    ages = []
    for step in range(1, 10):
        drawn = take(ahead, step)
        for batch in list(ahead._pending.values()):  # the sampler does all that it may
            batch.result()
        ages.append(drawn.metrics["training/staleness"])
        ahead.load_weights(update(step))
    ahead.close()
    assert ages == [min(step, staleness) for step in range(9)]


def test_fully_asynchronous_sampling_takes_the_newest_weights():
    ahead, echo = made(fixed=False, staleness=3)
    echo.may.release()
    take(ahead, 1)
    with ahead._engine_lock:  # batch 2 has not begun, or has begun with the first weights
        ahead.load_weights(update(1))
    echo.may.release(2)
    assert take(ahead, 2).batch[1] in (0, 1)
    assert take(ahead, 3).batch == (3, 1)
    ahead.close()


@pytest.mark.parametrize("partial", [True, False])
def test_partial_sampling_takes_newer_weights_within_a_batch(partial: bool):
    """The batch counts as old as the weights that it was begun with."""
    ahead, echo = made(fixed=False, staleness=2, partial=partial)
    echo.takes_newer = partial
    echo.may.release()
    take(ahead, 1)
    while not echo.busy.locked():  # batch 2 is begun, with the first weights
        pass
    ahead.load_weights(update(1))
    until = time.monotonic() + (30 if partial else 0.1)
    while echo.version < 1 and time.monotonic() < until:
        time.sleep(0.01)
    echo.may.release()
    drawn = take(ahead, 2)
    assert drawn.batch == (2, int(partial))
    assert drawn.metrics["training/staleness"] == 1
    ahead.close()


def test_nothing_is_sampled_past_the_last_step():
    ahead, echo = made(fixed=False, staleness=5, total=2)
    echo.may.release(9)
    take(ahead, 1), take(ahead, 2)
    ahead.close()
    assert ahead._source.state_dict() == {"dealt": 2}


def test_an_evaluation_waits_for_the_batch_and_has_the_newest_weights():
    ahead, echo = made(fixed=True)
    echo.may.release()
    take(ahead, 1)
    ahead.load_weights(update(1))
    threading.Timer(0.05, echo.may.release).start()
    assert ahead.evaluate(1, lambda done, total: None).metrics == {"version": 1}
    assert take(ahead, 2).batch == (2, 0), "drawn before, or with the weights that it was asked for with"
    ahead.close()


def test_weights_are_those_of_the_update_and_not_those_that_training_makes_of_them():
    model = nn.Linear(2, 1)
    model.again = nn.Linear(2, 1)
    model.again.weight = model.weight
    taken = WeightUpdate(3, model.state_dict(keep_vars=True).items()).copied()
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    held = dict(taken.tensors)
    assert taken.version == 3
    assert torch.equal(held["weight"], before)
    assert held["weight"].data_ptr() == held["again.weight"].data_ptr()
    assert held["bias"].data_ptr() != model.bias.data_ptr()


def waiting_in(content: bytes) -> list[SimpleNamespace]:
    """Return the batches in a file of a checkpoint, with the fields that are plain values."""
    trees = torch.load(io.BytesIO(content), weights_only=True)["batches"]
    return [SimpleNamespace(**dict(fields)) for _, _, _, fields in trees]


def test_a_checkpoint_holds_the_batches_that_wait(tmp_path: Path):
    ahead, echo = made(fixed=True)
    echo.may.release(2)
    take(ahead, 1)
    frozen = ahead.checkpoint_extras(in_step=False)
    assert dict(frozen.state) == {"inner": 1}
    (tmp_path / FILE).write_bytes(frozen.files[FILE])
    position = SourceAhead(ahead).state_dict()
    assert position == {"dealt": 1}, "of a run that does not sample ahead: after the step"
    ahead.close()

    again, echo = made(fixed=True)
    again.load_checkpoint(tmp_path)
    SourceAhead(again).load_state_dict(position)
    again.load_weights(update(1))
    echo.may.release(1)
    assert take(again, 2).batch == (2, 0)
    assert take(again, 3).batch == (3, 1)
    again.close()


def test_a_failure_is_that_of_its_step_and_loses_nothing(tmp_path: Path):
    ahead, echo = made(fixed=False, staleness=3)
    echo.fails_at = 2
    echo.may.release(9)
    assert take(ahead, 1).batch == (1, 0)
    with pytest.raises(ValueError, match="no reward in step 2"):
        take(ahead, 2)
    frozen = ahead.checkpoint_extras(in_step=True)
    assert waiting_in(frozen.files[FILE]) == [], "batch 3 would be taken for batch 2"
    assert ahead.position == {"dealt": 1}
    ahead.close()


def test_a_step_that_failed_has_its_batch_again():
    ahead, echo = made(fixed=True)
    echo.may.release(3)
    take(ahead, 1)
    take(ahead, 2)
    kept = waiting_in(ahead.checkpoint_extras(in_step=True).files[FILE])
    ahead.close()
    assert [drawn.step for drawn in kept] == [2, 3]


def test_the_end_does_not_wait_for_a_batch_that_nobody_needs():
    ahead, echo = made(fixed=False)
    echo.may.release()
    take(ahead, 1)  # batch 2 is in progress, and may never end
    ahead.close()


def test_a_run_learns_from_partial_responses(inputs: Path, tmp_path: Path):
    """Sampling of one row at a time outlasts the step before, so that weights change within a batch."""
    options = [*GRPO, *LIGHT, *MODES["fully_async"], "actor_rollout_ref.rollout.partial_rollout=True",
               "actor_rollout_ref.rollout.max_num_seqs=2", "trainer.total_training_steps=3",
               "algorithm.rollout_correction.rollout_is=token",
               f"trainer.rollout_data_dir={tmp_path / 'rows'}"]  # fmt: skip
    metrics = measured(train([*base_overrides(inputs, tmp_path / "run"), *options]))
    for step in (1, 2, 3):
        rows = [json.loads(line) for line in (tmp_path / "rows" / f"{step}.jsonl").read_text().splitlines()]
        mixed = [row for row in rows if len(set(row.get("token_versions", []))) > 1]
        assert len(mixed) / len(rows) == metrics[step].get("training/partial_rows", 0.0)
        assert all(row["policy_version"] == min(row.get("token_versions", [row["policy_version"]])) for row in rows)
        check_recorded_versions(RunFolder(tmp_path / "run"), step, rows)
    assert all(metrics[step]["training/staleness"] <= 2 for step in (1, 2, 3))
    assert all(0 <= metrics[step].get("training/partial_rows", 0.0) <= 1 for step in (1, 2, 3))
    assert all(map(math.isfinite, metrics[3].values()))
    assert metrics[3]["actor/grad_norm"] > 0


def check_recorded_versions(run: RunFolder, step: int, rows: list[dict[str, Any]]) -> None:
    """`tether view` shows of each response, and of each token, the weights that sampled it."""
    shown = samples(run, step=step, limit=len(rows))["rows"]
    assert [row["policy_version"] for row in shown] == [row["policy_version"] for row in rows]
    recorded = [row["row"] for row in shown if row["recorded"]]
    assert recorded
    for row in recorded:
        values = sample(run, step, row)["tokens"]["values"]
        assert values.get("policy_version") == rows[row].get("token_versions")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_learns_from_stale_batches(mode: str, inputs: Path, tmp_path: Path):
    options = [*GRPO, *LIGHT, *MODES[mode], "trainer.test_freq=2", "algorithm.rollout_correction.rollout_is=token"]
    metrics = measured(train([*base_overrides(inputs, tmp_path), *options]))
    assert [step for step in metrics if step] == [1, 2, 3]
    assert metrics[1]["training/staleness"] == 0
    assert metrics[3]["training/staleness"] in ((1,) if mode == "one_step_off" else (0, 1, 2))
    assert metrics[3]["training/rollout_mismatch_alarm"] == 0
    assert "val-core/tiny/sums/reward/mean@1" in metrics[2]
    assert all(map(math.isfinite, metrics[3].values()))
    if mode == "one_step_off":  # step 3 learns from responses of the policy after step 1, and not by rounding
        assert metrics[1]["rollout_corr/k3_kl"] < 1e-6 < metrics[3]["rollout_corr/k3_kl"]


def test_the_batches_of_a_finished_checkpoint_are_learned_in_turns_again(inputs: Path, tmp_path: Path):
    """A run that resumes without sampling ahead loses no prompt: step 3 is still of the first epoch."""
    options = [*base_overrides(inputs, tmp_path), *GRPO, *LIGHT, "trainer.save_freq=1"]
    run = build_run(load_config(None, [*options, *MODES["one_step_off"]]))
    asked = iter([False, True])
    run.trainer.fit(lambda: next(asked))
    run.close()
    rest = train(options)
    assert measured(rest)[3]["training/epoch"] == 0
    assert not same(weights(rest / "global_step_3"), weights(rest / "global_step_2"))


def ahead_overrides(inputs: Path, reward: Path, folder: Path) -> list[str]:
    options = [*LIGHT, *MODES["fully_async"], "trainer.save_freq=1", f"custom_reward_function.path={reward}"]
    return [*base_overrides(inputs, folder), *GRPO, *options]


@pytest.fixture(scope="module")
def stopped(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that stopped after step 1, when two more batches were drawn with the first weights."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copy(inputs / "reward.py", folder)
    run = build_run(load_config(None, ahead_overrides(inputs, folder / "reward.py", folder)))
    ahead = run.trainer.rollouts

    def stop() -> bool:
        for batch in list(ahead._pending.values()):  # the sampler does all that it may
            batch.result()
        return run.trainer.step_number == 1

    run.trainer.fit(stop)
    run.close()
    assert [drawn.version for drawn in waiting_in((folder / "global_step_1" / FILE).read_bytes())] == [0, 0]
    return folder


REPAIRED = "custom_reward_function.name=compute_score"
"""The same function of the same file, whose text is another."""


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        (["actor_rollout_ref.rollout.max_staleness=1"], True),
        (["actor_rollout_ref.rollout.temperature=0.5"], True),
        (["trainer.async_mode=one_step_off", "actor_rollout_ref.rollout.max_staleness=1"], True),
        (
            [
                "actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.rollout.max_num_seqs=3",
                "data.val_batch_size=1", "reward_model.num_workers=2",
            ],
            False,
        ),
        ([REPAIRED], True),
    ],
)  # fmt: skip
def test_batches_that_other_settings_drew_are_sampled_again(
    changes: list[str], again: bool, stopped: Path, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """With a staleness of 1 instead of 2, step 2 would learn from a batch that is two updates old."""
    shutil.copytree(stopped / "global_step_1", tmp_path / "global_step_1")
    reward = stopped / "reward.py"
    text = reward.read_text()
    reward.write_text(text + "\n# repaired\n" * (changes == [REPAIRED]))
    resumed = build_run(load_config(None, [*ahead_overrides(inputs, reward, tmp_path), *changes]))
    try:
        assert [*resumed.trainer.rollouts._pending] == ([] if again else [2, 3])
        assert ("are sampled again, as they were drawn with other settings" in caplog.text) == again
        assert not again or changes[0].partition("=")[0].rpartition(".")[0] in caplog.text
        if "max_staleness" in changes[0] or not again:
            resumed.trainer.fit()
            assert measured(tmp_path)[3]["training/staleness"] <= (1 if again else 2)
    finally:
        reward.write_text(text)
        resumed.close()


def test_a_bound_beyond_the_steps_is_refused(inputs: Path, tmp_path: Path):
    """Ten prompts in batches of four, twice, are six steps."""
    options = [*base_overrides(inputs, tmp_path), *GRPO, *MODES["fully_async"], "trainer.total_epochs=2"]
    steps = ["trainer.total_training_steps=null", "actor_rollout_ref.rollout.max_staleness=6"]
    with pytest.raises(ValueError, match="6 updates lie between no two of the 6 steps of this run"):
        build_run(load_config(None, [*options, *steps]))


def test_several_devices_are_refused(inputs: Path, tmp_path: Path):
    options = [*base_overrides(inputs, tmp_path), *GRPO, *MODES["one_step_off"], "trainer.n_gpus_per_node=2"]
    with pytest.raises(ValueError, match=r"native samples on the 2 devices.*one_step_off.*set it to vllm"):
        load_config(None, options)
