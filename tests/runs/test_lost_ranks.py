"""A rank that is lost in the middle of a run: the run goes on by itself from its last checkpoint, to the same bits."""

import os
import re
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.distributed.processes import processes_of
from tests.runs.loops import Control, assert_same_run
from tests.runs.test_devices import overrides
from tests.runs.tiny_run import measured, same, weights, write_inputs
from tether.checkpoints import find_checkpoint
from tether.checkpoints.store import DiskFull
from tether.commands.status import show_status
from tether.commands.train import train
from tether.config import load_config
from tether.loop.parts import Callbacks
from tether.runtime.ranks import RankLost


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


class Killer:
    """Kills a rank after a step, once."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step, self.killed = folder, step, dict[str, int]()

    def on_step_end(self, step: int, _: object) -> None:
        if step == self.step and not self.killed:
            self.killed = processes_of(self.folder)
            os.kill(self.killed["rank_1.log"], signal.SIGKILL)


def run(inputs: Path, folder: Path, *more: str, steps: int = 4, killer: object = None) -> Path:
    given = load_config(None, [*overrides(inputs, folder, 2, steps), "trainer.preflight=False", *more])
    return train(given, Callbacks([killer] if killer else [])).folder


def learned(directory: Path) -> dict[int, dict[str, float]]:
    """Metrics without the bytes moved: those of a background checkpoint may count in another step."""
    steps = measured(directory).items()
    return {step: {key: value for key, value in found.items() if "transfer/" not in key} for step, found in steps}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_rank_is_killed_ends_with_the_same_bits(inputs: Path, tmp_path: Path, capsys) -> None:
    """Killed after step 3, while the checkpoint of step 2 may still be written."""
    whole = run(inputs, tmp_path / "whole")
    capsys.readouterr()
    killer = Killer(tmp_path / "killed", step=3)
    saving = ["trainer.save_freq=2", "trainer.async_save=True"]
    killed = run(inputs, tmp_path / "killed", *saving, "trainer.resume_mode=disable", killer=killer)
    said = capsys.readouterr()
    assert "rank 1 died" in said.out
    assert "That was in step 4. Restart 1 of 3 (trainer.max_restarts), from" in said.out
    assert "resuming from" in said.out
    assert (said.out + said.err).count("rank 1 died") == 1
    for role in ("actor", "critic"):
        assert same(weights(whole / "global_step_4", role), weights(killed / "global_step_4", role))
    assert learned(whole) == learned(killed)
    assert not any(Path(f"/proc/{pid}").exists() for pid in killer.killed.values())
    assert (killed / "ranks/rank_1.log").read_text().count("rank 1 begins") == 2  # what the first one wrote is kept
    show_status(killed)
    assert re.search(r"last error, \d+ s ago: rank 1 died", capsys.readouterr().out)


class FullDisk:
    """Lets rank 1 write no file of more than 4 KiB after the first step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, step: int, _: object) -> None:
        if step == 2:
            resource.prlimit(processes_of(self.folder)["rank_1.log"], resource.RLIMIT_FSIZE, (4096, 4096))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_disk_that_is_full_for_one_rank_is_said_and_leaves_the_checkpoints_before(
    inputs: Path, tmp_path: Path
) -> None:
    """The run continues without the checkpoints that do not fit, and ends with the error of the last."""
    with pytest.raises(
        DiskFull, match=r"a file of .*global_step_4 is larger than may be written there.*global_step_1 is untouched"
    ):
        run(inputs, tmp_path, killer=FullDisk(tmp_path))
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_1"
    assert not list(tmp_path.glob(".*"))


class Loser:
    """Raises one error after the other, at the end of steps or of the test before the first."""

    def __init__(self, *failures: tuple[int, Exception], before: Callable[[], None] = lambda: None) -> None:
        self.failures, self.before = list(failures), before

    def on_evaluation(self, step: int, _: object) -> None:
        self.on_step_end(step, _)

    def on_step_end(self, step: int, _: object) -> None:
        if self.failures and step == self.failures[0][0]:
            self.before()
            raise self.failures.pop(0)[1]


def in_one_process(folder: Path, *callbacks: object, more: Sequence[str] = ()) -> Path:
    """Control trains in no time; what restarts a run does not know the kind of it."""
    short = ["trainer.preflight=False", "trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.test_freq=-1"]
    return train(load_config(None, Control().overrides(folder, *short, *more)), Callbacks(callbacks)).folder


def test_only_a_lost_rank_restarts_the_run(tmp_path: Path) -> None:
    whole = in_one_process(tmp_path / "whole")
    lost = Loser((1, RankLost("rank 0 died")), (2, RankLost("rank 1 died")))
    restarted = in_one_process(tmp_path / "restarted", lost)
    assert lost.failures == []
    assert_same_run(whole, restarted, 3)
    mistake = Loser((1, ValueError("not a loss")), (2, RankLost("never")))
    with pytest.raises(ValueError, match="not a loss"):
        in_one_process(tmp_path / "mistake", mistake)
    assert len(mistake.failures) == 1


def test_a_rank_that_is_lost_in_the_same_step_again_ends_the_run(tmp_path: Path, capsys) -> None:
    losses = Loser((0, RankLost("rank 1 died")), (0, RankLost("rank 0 died")), (0, RankLost("never")))
    with pytest.raises(RankLost, match=r"(?s)^rank 0 died.*in step 1, for the second time .rank 1 died"):
        in_one_process(tmp_path, losses, more=["trainer.test_freq=3", "trainer.val_before_train=True"])
    assert len(losses.failures) == 1
    assert "from where the run began" in capsys.readouterr().out


def test_without_restarts_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    losses = Loser((1, RankLost("rank 1 died")), (1, RankLost("never")))
    with pytest.raises(RankLost, match=r"(?s)^rank 1 died.*in step 2; trainer.max_restarts=0 restarts are used up$"):
        in_one_process(tmp_path, losses, more=["trainer.max_restarts=0"])
    assert len(losses.failures) == 1


def test_a_run_that_is_asked_to_stop_is_not_restarted(tmp_path: Path) -> None:
    stopped = Loser((1, RankLost("rank 0 died")), before=lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(RankLost, match=r"^rank 0 died$"):
        in_one_process(tmp_path, stopped)


def test_models_that_cannot_be_built_twice_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RankLost("rank 0 died\nits last lines"), RankLost("rank 1 died")]
    monkeypatch.setattr("tether.commands.train.build", lambda *_: Loser((0, failures.pop(0))).on_step_end(0, None))
    with pytest.raises(RankLost, match=r"^rank 1 died\nThat was while .* for the second time \(rank 0 died\)"):
        in_one_process(tmp_path)
    assert failures == []
