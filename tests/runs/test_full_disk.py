"""A disk that fills up during a run, and has room again later: text and control."""

import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs.golden import STEPS, Golden
from tests.runs.loops import Control, contents, results
from tests.runs.tiny_run import same
from tether.checkpoints import DiskFull
from tether.checkpoints.store import step_of, verify
from tether.commands.result import run_scores
from tether.metrics.loggers.jsonl import read_events, read_samples

LOG_SPACE = 150_000
"""Bytes for the logs of a few steps, and for no checkpoint."""
BEST_3 = "best/global_step_3"
"""Skipped as well, if the evaluation after step 3 is the best so far: it comes before there is room again."""


class FullDisk:
    """Fills a disk at the evaluation before the first step and again after step 2, each time for one step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.filler = folder, folder.parent / "filler"

    def fill(self, left: int = LOG_SPACE) -> None:
        self.filler.write_bytes(bytes(shutil.disk_usage(self.folder).free - left))

    def on_evaluation(self, step: int, _: object) -> None:
        if step == 0:
            self.fill()
        if step == 1:
            self.filler.unlink()

    def on_step_end(self, step: int, _: object) -> None:
        if step == 2:
            self.fill()
        if step == 3:
            # With trainer.async_save another thread writes the checkpoint of step 2 meanwhile.
            deadline = time.monotonic() + 60
            while (unfinished := list(self.folder.rglob(".writing_*"))) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not unfinished
            assert not (self.folder / "global_step_2").exists()
            self.filler.unlink()


def disk_warnings(folder: Path) -> list[str]:
    """Return the warnings of a run about its disk."""
    return [event["text"] for event in read_events(folder) if "disk full" in event.get("text", "")]


@pytest.mark.parametrize("loop", [pytest.param("text", marks=pytest.mark.slow), "control"], indirect=True)
@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_that_do_not_fit_are_skipped_and_nothing_else_changes(
    golden: Golden, small_disk: Path, *, background: bool
) -> None:
    folder = small_disk / "run"
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)  # three checkpoints of text
    golden.train(
        folder,
        "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1", "trainer.keep_best=True", "trainer.record_mb=0",
        f"trainer.async_save={background}",
        callbacks=[FullDisk(folder)],
    )  # fmt: skip
    skipped = {
        re.sub(rf"disk full while saving {folder}/(\S+): .*", r"\1", text): text for text in disk_warnings(folder)
    }
    assert {"best/global_step_0", "global_step_2"} <= skipped.keys() <= {"best/global_step_0", "global_step_2", BEST_3}
    assert all(text.endswith(" The run continues without this checkpoint.") for text in skipped.values())
    assert f"{folder}/global_step_1 is untouched" in skipped["global_step_2"]
    scores = {step: score for step, score in run_scores(results(folder))[1].items() if step not in (0, 3)}
    (kept,) = (folder / "best").glob("global_step_*")
    verify(kept)
    assert step_of(kept) == max(scores, key=lambda step: scores[step]), "the best while the disk had room"
    assert results(folder) == results(golden.folder)
    assert read_samples(folder) == read_samples(golden.folder)
    one, two = (contents(run / f"global_step_{STEPS}") for run in (golden.folder, folder))
    for states in (one, two):
        del states["trainer.pt"]["best"]
    assert same(one, two)


def test_a_run_that_stops_on_a_full_disk(small_disk: Path) -> None:
    """Without an earlier checkpoint the weights alone are saved; with one it is kept, and the command fails."""
    loop, folder = Control(), small_disk / "run"

    def stop_after_2(*more: str, left: int) -> None:
        def fill(run: Any) -> None:
            if run.trainer.step_number == 2:
                FullDisk(folder).fill(left)

        loop.train(
            loop.overrides(folder, "trainer.test_freq=-1", "trainer.record_mb=0", *more), until=2, each_step=fill
        )

    stop_after_2("trainer.save_freq=-1", left=90_000)
    weights_only = folder / "global_step_2"
    verify(weights_only)
    assert sorted(path.name for path in weights_only.iterdir() if path.is_dir()) == ["actor"]
    assert disk_warnings(folder)[0].endswith(f"they are saved in {weights_only}. No run can resume from them.")
    shutil.rmtree(folder)
    (small_disk / "filler").unlink()
    with pytest.raises(DiskFull, match=f"disk full while saving {weights_only}: .*{folder}/global_step_1 is untouched"):
        stop_after_2("trainer.save_freq=1", left=90_000)
    assert [path.name for path in folder.glob("*global_step_*")] == ["global_step_1"]
