import json
import logging
import math
import shutil
from pathlib import Path

import pytest

from tether.metrics.loggers.jsonl import JsonlLogger, _records, read_events, read_metrics, read_samples
from tether.metrics.loggers.protocol import LogFailed, RunInfo, Sample


def open_run(folder: Path, resumed_step: int | None = None) -> JsonlLogger:
    return JsonlLogger(RunInfo(folder, "p", "e", {}, resumed_step=resumed_step))


def log_steps(logger: JsonlLogger, first: int, last: int, score: float = 0.0) -> None:
    for step in range(first, last + 1):
        logger.log(step, {"score": score})
        logger.log_samples(step, [Sample(step, "s", "p", "r", score)])


def test_a_line_is_written_before_log_returns_and_a_step_has_one_line(tmp_path: Path) -> None:
    logger = open_run(tmp_path / "new" / "run")
    logger.log(1, {"score": 0.5})
    logger.log(1, {"val": 1})
    logger.log(1, {})
    logger.log(2, {"score": float("nan"), "kl": float("inf")})
    assert json.loads((tmp_path / "new/run/metrics.jsonl").read_text().splitlines()[1]) == {
        "step": 2,
        "score": None,
        "kl": None,
    }
    steps = read_metrics(tmp_path / "new" / "run")
    assert steps[1] == {"score": 0.5, "val": 1.0}
    assert math.isnan(steps[2]["score"])


LATE = Sample(
    17, "gsm8k", "Wie viel?\n", 'sieben „7“\n"', None, ground_truth={7}, note="late", truncated=True,
    extra={"reason": "no number"},
)  # fmt: skip


def test_samples_keep_their_text(tmp_path: Path) -> None:
    logger = open_run(tmp_path)
    logger.log_samples(3, [LATE])
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {
        "step": 3, "index": 17, "data_source": "gsm8k", "prompt": "Wie viel?\n", "response": 'sieben „7“\n"',
        "reward": None, "ground_truth": "{7}", "note": "late", "truncated": True, "extra": {"reason": "no number"},
    }  # fmt: skip


def test_what_a_run_writes_while_its_log_is_read_is_no_line_of_it(tmp_path: Path) -> None:
    logger = open_run(tmp_path)
    log_steps(logger, 1, 2)
    lines = _records(tmp_path / "metrics.jsonl")
    assert [next(lines)[1]["step"] for _ in range(2)] == [1, 2]
    logger.log(2, {"timing_s/save_checkpoint": 0.5})  # extends the last line, which was read
    log_steps(logger, 3, 3)
    assert list(lines) == []
    assert list(read_metrics(tmp_path)) == [1, 2, 3]


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    log_steps(open_run(tmp_path), 0, 7, score=0.0)
    log_steps(open_run(tmp_path, resumed_step=4), 5, 8, score=1.0)
    for name in ("metrics.jsonl", "samples.jsonl"):
        steps = [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()]
        assert steps == list(range(9))
    assert [record["score"] for record in read_metrics(tmp_path).values()] == [0.0] * 5 + [1.0] * 4


def test_the_torn_last_line_of_a_killed_run_is_dropped(tmp_path: Path) -> None:
    log_steps(open_run(tmp_path), 1, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "sc')
    assert list(read_metrics(tmp_path)) == [1, 2]
    log_steps(open_run(tmp_path, resumed_step=2), 3, 3)
    assert list(read_metrics(tmp_path)) == [1, 2, 3]


def test_a_fresh_run_moves_older_files_aside(tmp_path: Path) -> None:
    for score in (0.1, 0.2, 0.3):
        log_steps(open_run(tmp_path), 1, 2, score)
    assert read_metrics(tmp_path)[1] == {"score": 0.3}
    assert '"score": 0.1' in (tmp_path / "metrics.jsonl.1").read_text()
    assert '"score": 0.2' in (tmp_path / "metrics.jsonl.2").read_text()


BROKEN = {
    "nonsense": "not a line of JSON",
    "[]": 'no whole number "step"',
    "7": 'no whole number "step"',
    '{"score": 1}': 'no whole number "step"',
    '{"step": "2"}': 'no whole number "step"',
    '{"step": true}': 'no whole number "step"',
    '{"step": 2, "score": "high"}': "score is 'high', which is no number",
    '{"step": 2, "score": [1]}': r"score is \[1\], which is no number",
    "\0\0\0": "not a line of JSON",
}


@pytest.mark.parametrize("line", BROKEN)
def test_bad_files_are_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics\.jsonl here"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:2: .*{BROKEN[line]}"):
        read_metrics(tmp_path)
    if "number;" not in BROKEN[line] and "which" not in BROKEN[line]:
        with pytest.raises(ValueError, match=rf"metrics\.jsonl:2: .*{BROKEN[line]}"):
            open_run(tmp_path, resumed_step=2)


def test_bytes_that_are_no_text_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1, "response": "\xff"}\n')
    log_steps(open_run(tmp_path, resumed_step=1), 2, 2)
    assert path.read_bytes().startswith(b'{"step": 1, "response": "\xff"}\n{"step": 2')
    logger = open_run(tmp_path, resumed_step=2)
    logger.log_samples(3, [Sample(0, "s", "half of a pair: \ud800", "r", 1.0)])
    assert len(path.read_text(errors="replace").splitlines()) == 3


def test_a_full_disk_is_one_clear_error_and_leaves_whole_lines(small_disk: Path) -> None:
    logger = open_run(small_disk)
    log_steps(logger, 1, 2)
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * shutil.disk_usage(small_disk).free)
    many = {f"key {n}": 0.5 for n in range(1000)}  # more than is left of the last block of the file
    with pytest.raises(LogFailed, match=rf"{small_disk}/metrics.jsonl: cannot be written \(No space left on device\)"):
        logger.log(3, many)
    with pytest.raises(LogFailed):
        logger.log(2, many)
    assert read_metrics(small_disk) == {1: {"score": 0.0}, 2: {"score": 0.0}}
    assert (small_disk / "metrics.jsonl").read_bytes().endswith(b"}\n")
    filler.unlink()
    logger.log(2, {"more": 1.0})  # nothing of the line that did not fit comes after all
    logger.log(3, {"score": 1.0})
    assert read_metrics(small_disk) == {1: {"score": 0.0}, 2: {"score": 0.0, "more": 1.0}, 3: {"score": 1.0}}
    logger.close()


def test_a_folder_that_cannot_be_written_to_is_one_clear_error(small_disk: Path) -> None:
    log_steps(open_run(small_disk), 1, 2)
    (small_disk / "samples.jsonl").unlink()
    (small_disk / "samples.jsonl").mkdir()
    with pytest.raises(LogFailed, match=r"samples.jsonl: cannot be written \(Is a directory\)"):
        open_run(small_disk, resumed_step=2)


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_what_is_deleted_while_the_run_goes_on_is_written_again(
    gone: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    logger = open_run(folder)
    log_steps(logger, 1, 3, score=0.5)
    if gone == "file":
        (folder / "metrics.jsonl").unlink()
    else:
        shutil.rmtree(folder)
    log_steps(logger, 4, 5, score=1.0)
    assert [record["score"] for record in read_metrics(folder).values()] == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert list(read_samples(folder)) == [1, 2, 3, 4, 5]
    assert f"{folder / 'metrics.jsonl'} was deleted during the run" in caplog.text
    assert len(caplog.records) == (1 if gone == "file" else 2)


def test_a_file_that_an_editor_replaced_is_gone_on_with(tmp_path: Path) -> None:
    logger = open_run(tmp_path)
    log_steps(logger, 1, 3)
    edited = tmp_path / "edited"
    edited.write_text('{"step": 1, "score": 9}\n')
    edited.replace(tmp_path / "metrics.jsonl")
    logger.log(3, {"timing": 2.0})  # what came there is not the line of step 3
    log_steps(logger, 4, 4)
    assert read_metrics(tmp_path) == {1: {"score": 9.0}, 3: {"timing": 2.0}, 4: {"score": 0.0}}


def test_what_is_logged_later_stands_in_the_line_of_its_step_also_after_a_resume(tmp_path: Path) -> None:
    for resumed, step in ((None, 1), (1, 2)):
        logger = open_run(tmp_path, resumed_step=resumed)
        logger.log(step, {"score": 0.5})
        logger.log(step, {"timing_s/save_checkpoint": 2.0})
        logger.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "score": 0.5, "timing_s/save_checkpoint": 2.0} for step in (1, 2)]


def test_a_validation_that_a_resumed_run_makes_up_for_joins_the_line_of_its_step(tmp_path: Path) -> None:
    log_steps(open_run(tmp_path), 1, 3)
    resumed = open_run(tmp_path, resumed_step=2)
    resumed.log(2, {"val": 1})
    resumed.log(3, {"score": 2})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "score": 0.0}, {"step": 2, "score": 0.0, "val": 1.0}, {"step": 3, "score": 2.0}]


def test_metrics_that_were_deleted_before_a_resume_are_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_steps(open_run(tmp_path), 1, 3)
    open_run(tmp_path, resumed_step=2)
    assert caplog.text == ""
    (tmp_path / "metrics.jsonl").unlink()
    open_run(tmp_path, resumed_step=2)
    assert f"{tmp_path}/metrics.jsonl has no line of the steps before the resume" in caplog.text


def test_a_lone_surrogate_is_written_as_json_escapes_it(tmp_path: Path) -> None:
    logger = open_run(tmp_path)
    logger.log_samples(1, [Sample(0, "s", "p", "half \ud83d", 1.0)])
    assert json.loads((tmp_path / "samples.jsonl").read_text())["response"] == "half \ud83d"


def test_what_tether_logs_as_a_warning_is_recorded_and_still_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (None, "tether"):  # those of pytest, and of runs that other tests did not close
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    logger = open_run(tmp_path)
    logging.getLogger("tether.text").warning("the server is %s", "silent")
    logger.close()
    assert read_events(tmp_path)[-1]["text"] == "the server is silent"
    assert capsys.readouterr().err == "the server is silent\n"
