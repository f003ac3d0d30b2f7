"""`trainer.on_collapse=rollback`: a run whose policy collapses goes back, learns more slowly, and resumes exactly."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.runs.tiny_run import GRPO, LIGHT, base_overrides, measured, same, weights
from tether.checkpoints import CheckpointStore, Rollback, roll_back, rollbacks_of
from tether.checkpoints.rollbacks import NOTE
from tether.commands.result import TrainingResult
from tether.commands.train import train
from tether.config import load_config
from tether.loop.alarms import SAME_REPLY_STEPS, Alarms
from tether.loop.parts import Rollbacks
from tether.runtime.objects import register_objects


@pytest.fixture(scope="module", autouse=True)
def _variety() -> Iterator[None]:
    with register_objects({"variety": lambda solution_str, **row: len(set(solution_str)) / max(len(solution_str), 1)}):
        yield


def run(inputs: Path, folder: Path, *more: str):
    """A learning rate that is 0 in the first step, and destroys the policy in the second."""
    settings = [
        "data.val_files=[]", "trainer.total_training_steps=8", "trainer.save_freq=1", "trainer.preflight=False",
        "actor_rollout_ref.actor.optim.lr=5", "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.actor.use_kl_loss=False", "trainer.rollback_lr_factor=1e-4",
        "custom_reward_function.path=object:variety",
    ]  # fmt: skip
    return train(load_config(None, [*base_overrides(inputs, folder), *GRPO, *LIGHT, *settings, *more]))


def note(folder: Path) -> list[dict[str, int]]:
    return json.loads((folder / NOTE).read_text()) if (folder / NOTE).exists() else []


ROLLBACK = "trainer.on_collapse=rollback"


@pytest.fixture(scope="module")
def went_back(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingResult, str]:
    """A run that collapsed and went back, and what it printed."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = run(inputs, tmp_path_factory.mktemp("rollback") / "run", ROLLBACK)
    return result, " ".join(printed.getvalue().split())


def test_a_collapsed_run_goes_back_and_learns_more_slowly(went_back: tuple[TrainingResult, str]) -> None:
    result, printed = went_back
    assert (result.step, result.stopped_by) == (8, None)
    assert note(result.folder) == [{"collapsed": 3, "to": 1}]
    last = max(int(path.name.removeprefix("global_step_")) for path in (result.folder / "earlier_1").iterdir())
    assert 3 <= last <= 2 + SAME_REPLY_STEPS
    steps = measured(result.folder)
    assert [steps[step]["actor/lr"] for step in (1, 2, 3)] == pytest.approx([0.0, 2.5e-4, 5e-4])
    assert all(metrics["actor/entropy"] > 1 for metrics in steps.values())
    assert f"after step {last} the run goes back to" in printed


def test_a_run_that_went_back_resumes_exactly(
    went_back: tuple[TrainingResult, str], inputs: Path, tmp_path: Path
) -> None:
    """By the note in its folder; without that it would learn as fast as before."""
    before = went_back[0].folder
    for name in ("resumed", "unnoted"):
        shutil.copytree(before / "global_step_7", tmp_path / name / "global_step_7")
    shutil.copy(before / NOTE, tmp_path / "resumed" / NOTE)
    resumed = run(inputs, tmp_path / "resumed", ROLLBACK)
    assert same(weights(resumed.checkpoint), weights(before / "global_step_8"))
    assert note(tmp_path / "resumed") == note(before)
    unnoted = run(inputs, tmp_path / "unnoted")
    assert not same(weights(unnoted.checkpoint), weights(before / "global_step_8"))


@pytest.mark.slow
def test_the_number_of_rollbacks_ends(inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the same learning rate it collapses again, at the same step; then it stops, and a new run forgets that."""
    more = [ROLLBACK, "trainer.rollback_lr_factor=1", "trainer.max_rollbacks=1"]
    result = run(inputs, tmp_path / "run", *more)
    assert note(tmp_path / "run") == [{"collapsed": 3, "to": 1}]
    assert (3 <= result.step < 8, result.stopped_by) == (True, "trainer.on_collapse")
    assert "trainer.max_rollbacks=1 are used up, so the run is saved and stops" in caplog.text
    again = run(inputs, tmp_path / "run", "trainer.total_training_steps=1", "trainer.resume_mode=disable")
    assert again.step == 1
    assert note(tmp_path / "run") == []


@pytest.mark.slow
def test_rollbacks_to_ever_older_checkpoints_end_too(
    inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each counts, and lowers the rate of what the one before it left."""
    more = ["trainer.rollback_lr_factor=0.999", "trainer.max_rollbacks=2", "actor_rollout_ref.actor.optim.lr=2",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=200", "trainer.total_training_steps=30"]  # fmt: skip
    result = run(inputs, tmp_path / "run", ROLLBACK, *more)
    assert result.stopped_by == "trainer.on_collapse"
    first, second = (entry["to"] for entry in note(tmp_path / "run"))
    assert first == second
    assert "trainer.max_rollbacks=2 are used up" in caplog.text
    rates = {step: metrics["actor/lr"] for step, metrics in measured(tmp_path / "run").items() if step}
    assert rates[result.step] == pytest.approx(0.999**2 * 2 * (result.step - 1) / 200)


@pytest.mark.slow
def test_a_batch_that_was_drawn_earlier_dates_the_collapse(inputs: Path, tmp_path: Path) -> None:
    """The weights that drew it have collapsed already."""
    settings = ["trainer.async_mode=fully_async", "trainer.max_rollbacks=1", "trainer.total_training_steps=9"]
    result = run(inputs, tmp_path / "run", ROLLBACK, *settings)
    assert (result.step, result.stopped_by) == (9, None)
    (entry,) = note(tmp_path / "run")
    assert entry == {"collapsed": 3, "to": 1}


def store(root: Path, *steps: int) -> CheckpointStore:
    found = CheckpointStore(root)
    for step in steps:
        found.save(step, lambda folder: (folder / "x").write_text("x") and None)
    return found


def test_where_a_run_goes_back_to(tmp_path: Path) -> None:
    """Signs in step 9 are of the policy of step 8; a collapse that comes as early asks for an older checkpoint."""
    saved = store(tmp_path, 2, 4, 6, 8)

    def to(since: int, *done: Rollback, most: int = 3) -> str | None:
        target = Rollbacks(saved, most, done, 0.5).choose_target(since)
        return target.name.removeprefix("global_step_") if target else None

    assert [to(9), to(8), to(7), to(4), to(3), to(1)] == ["6", "6", "4", "2", None, None]
    assert [to(9, Rollback(9, 6)), to(5, Rollback(9, 6)), to(3, Rollback(3, 2))] == ["4", "2", None]
    assert [to(10, Rollback(9, 6)), to(14, Rollback(9, 6))] == ["8", "8"]  # with a first sign that is later
    assert to(14, Rollback(9, 6), most=1) is None


def test_the_checkpoint_to_go_back_to_outlives_that_of_the_collapse(tmp_path: Path) -> None:
    """The collapsed run is saved before it goes back, which may leave one checkpoint too many."""
    saved = CheckpointStore(tmp_path, keep=2)
    for step in (2, 4):
        saved.save(step, lambda folder: (folder / "x").write_text("x") and None)
    target = Rollbacks(saved, 1, (), 0.5).choose_target(4)
    saved.save(5, lambda folder: (folder / "x").write_text("x") and None)
    assert target == tmp_path / "global_step_2"
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
        "global_step_5",
    ]
    assert saved.newest_before(4) == target  # also for the run that was killed before it went back
    roll_back(saved, target, 5)
    assert saved.latest() == target


@pytest.mark.parametrize("after", [False, True])
def test_a_run_goes_back_also_where_it_is_killed_at_that(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each change on the disk: it stands at the newest checkpoint, or goes back, and again if asked."""

    def killed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(function)
            if len(calls) == at and not after:
                raise KeyboardInterrupt
            result = function(*arguments, **options)
            if len(calls) == at:
                raise KeyboardInterrupt
            return result

        return call

    ends = list[str]()
    for at in range(1, 99):
        saved, calls = store(tmp_path / str(at), 2, 4, 6, 8), list[object]()
        with monkeypatch.context() as during, suppress(KeyboardInterrupt):
            for owner, name in ((Path, "mkdir"), (Path, "rename"), (Path, "open"), (os, "replace"), (os, "fsync")):
                during.setattr(owner, name, killed(getattr(owner, name)))
            roll_back(saved, saved.root / "global_step_4", 9)
        found = saved.resolve("auto")
        assert found is not None
        ends.append(found.name)
        roll_back(saved, saved.root / "global_step_4", 9)
        assert saved.resolve("auto") == saved.root / "global_step_4"
        assert sorted(path.name for path in saved.root.glob("global_*")) == ["global_step_2", "global_step_4"]
        assert len(list(saved.root.glob("earlier_*/global_*"))) == 2
        if len(calls) < at:
            break
    assert at > 6
    assert sorted(ends, reverse=True) == ends  # and once it has gone back, it has
    assert {*ends} == {"global_step_8", "global_step_4"}


def test_the_note_is_of_one_course(tmp_path: Path) -> None:
    saved = store(tmp_path, 2, 4, 6, 8)
    aside = roll_back(saved, tmp_path / "global_step_4", 9)
    assert sorted(path.name for path in aside.iterdir()) == ["global_step_6", "global_step_8"]
    assert saved.latest() == tmp_path / "global_step_4"
    assert rollbacks_of(tmp_path, tmp_path / "global_step_4") == [Rollback(9, 4)]
    assert rollbacks_of(tmp_path, tmp_path / "global_step_2") == []  # it was never rolled back to here
    assert rollbacks_of(tmp_path, None) == []
    roll_back(saved, tmp_path / "global_step_2", 9)
    assert note(tmp_path) == [{"collapsed": 9, "to": 2}, {"collapsed": 9, "to": 2}]  # the first one counts all the same
    assert len(rollbacks_of(tmp_path, tmp_path / "global_step_2")) == 2
    (tmp_path / NOTE).write_text("[{}]")
    with pytest.raises(ValueError, match=r"rollbacks\.json: damaged, or of another kind \(KeyError"):
        rollbacks_of(tmp_path, tmp_path / "global_step_2")


def test_a_collapse_is_dated_by_its_first_sign_and_kept_until_it_is_acted_on() -> None:
    alarms, said = Alarms(), list[str]()
    for step, gradient in enumerate([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], start=11):
        metrics = {"training/global_step": step, "critic/score/mean": 0.0, "actor/entropy": 0.0}
        alarms.check_step(metrics | {"actor/grad_norm": gradient}, warming_up=False, warn=said.append)
    assert alarms.collapsed_since == 12
    resumed = Alarms()
    resumed.load_state_dict(alarms.state_dict())
    assert resumed.collapsed_since == 12


def test_a_collapse_is_dated_by_the_policy_that_drew_the_batch() -> None:
    """The first sign is in step 14, and its batch was the newest policy's in step 12."""
    alarms = Alarms()
    for step in range(11, 18):
        metrics = {"training/global_step": step, "training/staleness": 2, "critic/score/mean": 0.0}
        metrics |= {"actor/entropy": 0.0, "actor/grad_norm": 1.0 if step < 14 else 0.0}
        alarms.check_step(metrics, warming_up=False, warn=lambda _: None)
    assert alarms.collapsed_since == 12


def test_a_collapse_that_was_waved_through_dates_the_next_alarm() -> None:
    """A run that stopped for it goes on as it is; what comes later began with the signs that have not gone since."""
    alarms, said = Alarms(), list[str]()

    def go_on(steps: range, *, dead: bool, same: bool = False) -> None:
        for step in steps:
            metrics = {"training/global_step": step, "critic/score/mean": 0.0, "actor/entropy": 0.0}
            metrics |= {"actor/grad_norm": 0.0 if dead else 1.0, "response/identical_fraction": float(same)}
            alarms.check_step(metrics, warming_up=False, warn=said.append)

    go_on(range(11, 16), dead=True)
    assert alarms.collapsed_since == 11
    alarms.collapsed_since = None  # the run stops and is resumed
    go_on(range(16, 17), dead=False)
    go_on(range(17, 24), dead=True, same=True)
    assert alarms.collapsed_since == 11
    alarms.collapsed_since = None
    go_on(range(24, 30), dead=False)
    go_on(range(30, 33), dead=True)
    assert alarms.collapsed_since == 30
