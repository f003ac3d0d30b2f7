"""The checkpoint of the best test is kept, and a run that is good enough ends: text and control."""

from pathlib import Path

import pytest

from tests.runs.golden import STEPS, Golden
from tests.runs.loops import Control, Text, assert_same_run, contents, results, train_killed
from tests.runs.tiny_run import same
from tether.commands.evaluate import evaluate
from tether.commands.result import read_result, run_scores
from tether.config import load_config
from tether.metrics.loggers import evaluation_score

KEEPS = "trainer.keep_best=True"
IN_A_ROW = ["trainer.total_training_steps=6", "trainer.test_freq=1", "trainer.val_before_train=True"]


def scores_of(folder: Path) -> dict[int, float]:
    """Return the score of each evaluation."""
    return run_scores(results(folder))[1]


LOOPS = [pytest.param("text", marks=pytest.mark.slow), "control"]
slow_for_text = pytest.mark.parametrize("loop", LOOPS, indirect=True)


@slow_for_text
def test_the_checkpoint_of_the_best_test_is_kept(golden: Golden, tmp_path: Path) -> None:
    """Keeping it changes nothing else of the run."""
    assert not (golden.folder / "best").exists()
    run = golden.train(tmp_path / "run", KEEPS)
    assert_same_run(golden.folder, run.directory, STEPS)
    scores = scores_of(run.directory)
    assert list(scores) == list(range(STEPS + 1))
    best = max(scores, key=lambda step: scores[step])  # the first of equals
    kept = run.directory / "best" / f"global_step_{best}"
    assert list((run.directory / "best").glob("global_step_*")) == [kept]
    result = read_result(run.directory, step=STEPS, total_steps=STEPS)
    assert (result.best_checkpoint, result.best_step) == (kept, best)

    # It is the state of that step: the run that resumes from it is the rest of this one.
    path = [f"trainer.resume_from_path={kept}", "trainer.resume_mode=resume_path", f"trainer.save_freq={STEPS}"]
    again = golden.train(tmp_path / "again", *path)
    after = {step: metrics for step, metrics in results(run.directory).items() if step > best}
    assert after
    assert all(same(metrics, results(again.directory)[step]) for step, metrics in after.items())


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_the_same(inputs: Path, tmp_path: Path) -> None:
    for loop in (Text(inputs), Control()):
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        loop.train(loop.overrides(whole, KEEPS, *IN_A_ROW))
        train_killed(loop, loop.overrides(killed, KEEPS, *IN_A_ROW), killed, kills=4)
        (kept,) = (whole / "best").glob("global_step_*")
        assert same(contents(kept), contents(killed / "best" / kept.name)), type(loop)
        tmp_path /= "control"


def test_a_new_run_in_the_folder_sets_the_best_of_the_last_one_aside(tmp_path: Path) -> None:
    loop = Control()
    new = ["trainer.total_training_steps=1", "trainer.resume_mode=disable"]
    for _ in range(2):
        loop.train(loop.overrides(tmp_path, KEEPS, "trainer.test_freq=1", *new))
    assert len(list((tmp_path / "best" / "earlier_1").glob("global_step_*"))) == 1
    (kept,) = (tmp_path / "best").glob("global_step_*")

    # A run that resumes from this one keeps its best test; a new one that keeps none has none.
    path = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_1'}"]
    loop.train(loop.overrides(tmp_path, *path, "trainer.total_training_steps=1"))
    assert read_result(tmp_path, step=1, total_steps=1).best_checkpoint == kept
    loop.train(loop.overrides(tmp_path, *new))
    assert read_result(tmp_path, step=1, total_steps=1).best_checkpoint is None
    assert (tmp_path / "best" / "earlier_2" / kept.name).is_dir()


@slow_for_text
def test_a_score_that_is_enough_ends_the_run(golden: Golden, tmp_path: Path) -> None:
    scores = scores_of(golden.folder)
    enough = max(scores.values())
    first = min(step for step, score in scores.items() if score >= enough)
    stopped = golden.train(tmp_path, f"trainer.stop_at_score={enough}")
    assert (stopped.trainer.step_number, stopped.trainer.stopped_by) == (first, "trainer.stop_at_score")
    if first:
        assert (stopped.directory / f"global_step_{first}").is_dir()
    again = golden.train(tmp_path, f"trainer.stop_at_score={enough}")  # it is still enough
    assert (again.trainer.step_number, again.trainer.stopped_by) == (first, "trainer.stop_at_score")
    assert list(results(again.directory)) == list(range(first + 1))

    # One that is not reached, and one that is raised: the run ends where it does without.
    raised = golden.train(tmp_path, f"trainer.stop_at_score={enough + 1}")
    assert (raised.trainer.step_number, raised.trainer.stopped_by) == (STEPS, None)
    assert_same_run(golden.folder, raised.directory, STEPS)


def test_the_score_of_a_test_is_the_mean_over_data_sources() -> None:
    tested = {"val-core/a/acc/mean@4": 0.5, "val-core/b/acc/mean@1": 0.25, "val-core/a/acc/best@4/mean": 1.0}
    assert evaluation_score(tested) == 0.375
    assert evaluation_score({"eval/return": 12.0, "eval/episode_len": 20.0}) == 12.0
    assert evaluation_score({"timing_s/testing": 1.0}) == float("-inf")
    assert evaluation_score({"val-core/a/acc/mean@4": float("nan")}) == float("-inf")


def test_without_tests_both_are_said_to_do_nothing() -> None:
    never = ["env.train.id=CartPole-v1", "trainer.test_freq=-1"]
    for key in ("trainer.keep_best=True", "trainer.stop_at_score=3.0"):
        loaded = load_config(None, [*never, "trainer.val_before_train=False", key])
        assert [note for note in loaded.notes if f"no effect: {key} (trainer.test_freq is -1" in note], loaded.notes
        assert not load_config(None, [*never, key]).notes  # the test before training counts
        assert not load_config(None, ["env.train.id=CartPole-v1", key]).notes


def test_a_test_of_a_checkpoint_is_the_same_again_where_wrappers_draw_from_global_generators(tmp_path: Path) -> None:
    loop = Control()
    noisy = ["env.train.wrappers=['tests.control.envs.stateful:DrawsNumpy']"]
    run = loop.train(loop.overrides(tmp_path, *noisy, "trainer.total_training_steps=1", "trainer.test_freq=-1"))
    scores = tmp_path / "eval_global_step_1.json"
    evaluate(str(run.directory), None, [])
    first = scores.read_text()
    evaluate(str(run.directory), None, [])
    assert scores.read_text() == first
    other = tmp_path / "eval_global_step_1-2.json"
    assert not other.exists()  # it would hold what is not the same
    evaluate(str(run.directory), None, ["env.eval.num_episodes=2"])
    assert scores.read_text() == first
    assert other.read_text() != first
