"""The checkpoint of the best test is kept, and a run that is good enough ends: text and control."""

from pathlib import Path

import pytest

from tests.trainer.loops import Control, Loop, Text, assert_same_run, contents, results, train_killed
from tests.trainer.tiny_run import same
from tether.commands.evaluate import evaluate
from tether.commands.result import read_result, run_scores
from tether.config import load_config
from tether.metrics.loggers import score_of_test


@pytest.fixture(params=["text", "control"])
def loop(request: pytest.FixtureRequest, inputs: Path) -> Loop:
    """Both kinds of runs."""
    return Text(inputs) if request.param == "text" else Control()


KEEPS = ["trainer.keep_best=True", "trainer.test_freq=1", "trainer.val_before_train=True"]


def scores_of(folder: Path) -> dict[int, float]:
    """Score of each test."""
    return run_scores(results(folder))[1]


def test_the_checkpoint_of_the_best_test_is_kept(loop: Loop, tmp_path: Path) -> None:
    run = loop.train(loop.overrides(tmp_path / "run", *KEEPS, "trainer.save_freq=6"))
    scores = scores_of(run.directory)
    assert list(scores) == list(range(7))
    best = max(scores, key=lambda step: scores[step])  # the first of equals
    kept = run.directory / "best" / f"global_step_{best}"
    assert list((run.directory / "best").glob("global_step_*")) == [kept]
    result = read_result(run.directory, step=6, total_steps=6)
    assert (result.best_checkpoint, result.best_step) == (kept, best)

    # It is the state of that step: the run that goes on from it is the rest of this one.
    path = [f"trainer.resume_from_path={kept}", "trainer.resume_mode=resume_path", "trainer.save_freq=6"]
    again = loop.train(loop.overrides(tmp_path / "again", *KEEPS[1:], *path))
    after = {step: metrics for step, metrics in results(run.directory).items() if step > best}
    assert after
    assert all(same(metrics, results(again.directory)[step]) for step, metrics in after.items())


def test_without_being_asked_nothing_more_is_kept_and_no_step_differs(loop: Loop, tmp_path: Path) -> None:
    plain = loop.train(loop.overrides(tmp_path / "plain", *KEEPS[1:]))
    keeps = loop.train(loop.overrides(tmp_path / "keeps", *KEEPS))
    assert not (plain.directory / "best").exists()
    assert_same_run(plain.directory, keeps.directory, 6)


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_the_same(loop: Loop, tmp_path: Path) -> None:
    loop.train(loop.overrides(tmp_path / "whole", *KEEPS))
    train_killed(loop, loop.overrides(tmp_path / "killed", *KEEPS), tmp_path / "killed", kills=4)
    (whole,) = (tmp_path / "whole" / "best").glob("global_step_*")
    killed = tmp_path / "killed" / "best" / whole.name
    assert same(contents(whole), contents(killed))


def test_a_new_run_in_the_folder_sets_the_best_of_the_last_one_aside(loop: Loop, tmp_path: Path) -> None:
    overrides = loop.overrides(tmp_path, *KEEPS, "trainer.total_training_steps=1", "trainer.resume_mode=disable")
    loop.train(overrides)
    loop.train(overrides)
    assert len(list((tmp_path / "best" / "earlier_1").glob("global_step_*"))) == 1
    (kept,) = (tmp_path / "best").glob("global_step_*")

    # A run that resumes from this one keeps its best test; a new one that keeps none has none.
    path = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_1'}"]
    loop.train(loop.overrides(tmp_path, *path, "trainer.total_training_steps=1"))
    assert read_result(tmp_path, step=1, total_steps=1).best_checkpoint == kept
    loop.train(loop.overrides(tmp_path, "trainer.total_training_steps=1", "trainer.resume_mode=disable"))
    assert read_result(tmp_path, step=1, total_steps=1).best_checkpoint is None
    assert (tmp_path / "best" / "earlier_2" / kept.name).is_dir()


def test_a_score_that_is_enough_ends_the_run(loop: Loop, tmp_path: Path) -> None:
    whole = loop.train(loop.overrides(tmp_path / "whole", *KEEPS[1:]))
    scores = scores_of(whole.directory)
    enough = sorted(scores.values())[-1]
    first = min(step for step, score in scores.items() if score >= enough)
    asked = [*KEEPS[1:], f"trainer.stop_at_score={enough}"]
    stopped = loop.train(loop.overrides(tmp_path / "stops", *asked))
    assert (stopped.trainer.step_number, stopped.trainer.stopped_by) == (first, "trainer.stop_at_score")
    if first:
        assert (stopped.directory / f"global_step_{first}").is_dir()
    again = loop.train(loop.overrides(tmp_path / "stops", *asked))  # it is still enough
    assert (again.trainer.step_number, again.trainer.stopped_by) == (first, "trainer.stop_at_score")
    assert list(results(again.directory)) == list(range(first + 1))

    # One that is not reached, and one that is raised: the run ends where it does without.
    raised = loop.train(loop.overrides(tmp_path / "stops", *KEEPS[1:], f"trainer.stop_at_score={enough + 1}"))
    assert (raised.trainer.step_number, raised.trainer.stopped_by) == (6, None)
    assert_same_run(whole.directory, raised.directory, 6)


def test_the_score_of_a_test_is_the_mean_over_data_sources() -> None:
    tested = {"val-core/a/acc/mean@4": 0.5, "val-core/b/acc/mean@1": 0.25, "val-core/a/acc/best@4/mean": 1.0}
    assert score_of_test(tested) == 0.375
    assert score_of_test({"eval/return": 12.0, "eval/episode_len": 20.0}) == 12.0
    assert score_of_test({"timing_s/testing": 1.0}) == float("-inf")
    assert score_of_test({"val-core/a/acc/mean@4": float("nan")}) == float("-inf")


def test_without_tests_both_are_said_to_do_nothing() -> None:
    never = ["env.train.id=CartPole-v1", "trainer.test_freq=-1"]
    for key in ("trainer.keep_best=True", "trainer.stop_at_score=3.0"):
        loaded = load_config(None, [*never, "trainer.val_before_train=False", key])
        assert [note for note in loaded.notes if f"no effect: {key} (trainer.test_freq is -1" in note], loaded.notes
        assert not load_config(None, [*never, key]).notes  # the test before training counts
        assert not load_config(None, ["env.train.id=CartPole-v1", key]).notes


def test_a_test_of_a_checkpoint_is_the_same_again_where_wrappers_draw_from_global_generators(tmp_path: Path) -> None:
    loop = Control()
    noisy = ["env.train.wrappers=['tests.envs.stateful:DrawsNumpy']"]
    run = loop.train(loop.overrides(tmp_path, *noisy, "trainer.total_training_steps=1", "trainer.test_freq=-1"))
    scores = tmp_path / "eval_global_step_1.json"
    evaluate(str(run.directory), None, [])
    first = scores.read_text()
    evaluate(str(run.directory), None, [])
    assert scores.read_text() == first
