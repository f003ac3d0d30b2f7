import json
import math
from pathlib import Path

import pytest

from tether.metrics.loggers.jsonl import JsonlLogger, read_metrics
from tether.metrics.loggers.protocol import RunInfo, Sample


def open_run(folder: Path, resumed_step: int | None = None) -> JsonlLogger:
    return JsonlLogger(RunInfo(folder, "p", "e", {}, resumed_step=resumed_step))


def log_steps(logger: JsonlLogger, first: int, last: int, score: float = 0.0) -> None:
    for step in range(first, last + 1):
        logger.log(step, {"score": score})
        logger.log_samples(step, [Sample(step, "s", "p", "r", score)])


def test_a_line_is_written_before_log_returns_and_several_lines_of_a_step_are_joined(tmp_path: Path) -> None:
    logger = open_run(tmp_path / "new" / "run")
    logger.log(1, {"score": 0.5})
    logger.log(1, {"val": 1})
    logger.log(2, {"score": float("nan"), "kl": float("inf")})
    assert json.loads((tmp_path / "new/run/metrics.jsonl").read_text().splitlines()[2]) == {
        "step": 2,
        "score": None,
        "kl": None,
    }
    steps = read_metrics(tmp_path / "new" / "run")
    assert steps[1] == {"score": 0.5, "val": 1.0}
    assert math.isnan(steps[2]["score"])


def test_samples_keep_their_text(tmp_path: Path) -> None:
    logger = open_run(tmp_path)
    logger.log_samples(3, [Sample(17, "gsm8k", "Wie viel?\n", 'sieben „7“\n"', None, ground_truth={7}, note="late")])
    assert json.loads((tmp_path / "samples.jsonl").read_text()) == {
        "step": 3, "index": 17, "data_source": "gsm8k", "prompt": "Wie viel?\n", "response": 'sieben „7“\n"',
        "reward": None, "ground_truth": "{7}", "note": "late",
    }  # fmt: skip


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


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics\.jsonl here"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of JSON"):
        read_metrics(tmp_path)
