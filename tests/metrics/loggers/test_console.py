"""The console on a terminal, in a pipe, and where writing fails."""

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.metrics.loggers.console import ConsoleLogger
from tether.metrics.loggers.headline import LABELS, headline_keys, headline_values
from tether.metrics.loggers.protocol import RunInfo, Sample
from tether.runtime.terminal import Screen

METRICS = {
    "critic/score/mean": 0.41234,
    "actor/ppo_kl": 0.00123,
    "actor/kl_loss": 0.5,
    "response_length/mean": 21.44,
    "timing_s/step": 6.12,
    "val-core/openai/gsm8k/reward/mean@1": 0.3,
    "val-core/math/acc/mean@1": 0.5,
    "val-core/math/acc/best@4/mean": 0.9,
    "perf/throughput": 1000.0,
}
NASTY = Sample(3, "gsm8k", "p" * 200 + "Was ist 3+4? [/red]", "\x1b[2J7\nzwei\x07", 1.0)
FAILED = Sample(4, "gsm8k", "q", "r", None, note="TimeoutError: 5 s")


def run_info(total_steps: int | None = 4, resumed_step: int | None = None) -> RunInfo:
    return RunInfo(Path(), "p", "e", {}, total_steps=total_steps, resumed_step=resumed_step)


def terminal(width: int = 120) -> Screen:
    return Screen(file=io.StringIO(), force_terminal=True, width=width, highlight=False, _environ={"TERM": "xterm"})


def written(console: Screen) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_headlines() -> None:
    assert headline_values(METRICS) == {
        "score": "0.412", "kl loss": "0.5000", "ppo kl": "0.0012", "length": "21.4", "s/step": "6.1", "val": "0.400",
    }  # fmt: skip
    assert headline_keys(METRICS)["val-core/math/acc/mean@1"] == "0.500"
    assert "val-core/math/acc/best@4/mean" not in headline_keys(METRICS)
    assert headline_values({}) == {}
    control = {"env/return": 20.0, "eval/return": 22.5, "perf/env_steps": 2048.0, "perf/sps": 1234.6}
    assert headline_keys(control) == {
        "env/return": "20.000", "eval/return": "22.500", "perf/env_steps": "2048", "perf/sps": "1235",
    }  # fmt: skip
    assert headline_values(control) == {"score": "20.000", "val": "22.500", "env steps": "2048", "steps/s": "1235"}


def test_failures_are_among_the_headlines_where_there_are_any() -> None:
    fine = {"critic/score/mean": 0.5, "reward/error_rate": 0.0, "actor/skipped_updates": 0.0}
    assert headline_values(fine) == {"score": "0.500"}
    failed = {"reward/error_rate": 0.25, "actor/skipped_updates": 0.0, "critic/skipped_updates": 2.0}
    assert headline_values(failed) == {"failed rewards": "25.0%", "skipped": "2"}
    assert headline_keys(failed) == {"reward/error_rate": "25.0%", "critic/skipped_updates": "2"}


def test_in_a_pipe_a_step_is_a_line(capsys: pytest.CaptureFixture) -> None:
    logger = ConsoleLogger(run_info())
    logger.phase("gen", 1, 4)
    logger.log(0, {"val-core/math/acc/mean@1": 0.1})
    logger.log(1, METRICS)
    time.sleep(0.01)
    logger.log(2, {"critic/score/mean": float("nan")})
    logger.close()
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == "step:0 - val-core/math/acc/mean@1:0.100"
    assert second.startswith("step:1 - critic/score/mean:0.412 - actor/kl_loss:0.5000 - actor/ppo_kl:0.0012 - ")
    assert " - val-core/openai/gsm8k/reward/mean@1:0.300 - val-core/math/acc/mean@1:0.500" in second
    assert second.endswith(" - eta:at most 0:00")
    assert third == "step:2 - critic/score/mean:nan - eta:0:00"


def test_samples_in_a_pipe_are_safe_to_print(capsys: pytest.CaptureFixture) -> None:
    ConsoleLogger(run_info()).log_samples(5, [NASTY, FAILED, FAILED, FAILED])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3, "compact: three of four"
    assert lines[0].startswith("sample:5 - row:3 - reward:1 - prompt:…ppp")
    assert lines[0].endswith("Was ist 3+4? [/red] - response: [2J7⏎zwei ")
    assert "reward:TimeoutError: 5 s" in lines[1]


def test_a_stream_that_knows_only_ascii() -> None:
    raw = io.BytesIO()
    console = Screen(file=io.TextIOWrapper(raw, encoding="ascii"))
    logger = ConsoleLogger(run_info(), console)
    logger.log_samples(5, [NASTY])
    logger.log(1, METRICS)
    assert b"response: [2J7?zwei" in raw.getvalue()
    assert b"step:1 - " in raw.getvalue()


@pytest.mark.parametrize("total_steps", [None, 2])
@pytest.mark.parametrize("width", [10, 120])
def test_on_a_terminal(width: int, total_steps: int | None) -> None:
    console = terminal(width)
    logger = ConsoleLogger(run_info(total_steps), console)
    for step in (0, 1, 2):
        logger.phase("gen", 12, 32)
        time.sleep(0.3)
        logger.phase("update_actor")
        logger.log(step, METRICS)
        logger.log_samples(step, [NASTY, FAILED])
    logger.close()
    logger.close()
    text = written(console)
    if width == 120:
        assert "gen 12/32" in text
        assert ("step 1/2" in text) == (total_steps == 2)
        assert "0.412" in text
        assert text.count("s/step") == 1, "one header for the first rows"
        assert "[/red]" in text, "markup in a response is text"
        assert "TimeoutError" in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is given back"


def test_time_left_is_the_mean_step_times_the_steps_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Screen(file=io.StringIO(), width=200)
    logger = ConsoleLogger(run_info(total_steps=100), console)
    now[0] += 1000  # validation before training takes long and says nothing about a step
    logger.log(0, {})
    for step in (1, 2, 3):
        now[0] += 50
        logger.log(step, {})
    assert written(console).splitlines() == [
        "step:0",
        "step:1 - eta:at most 1:22:30",
        "step:2 - eta:1:21:40",
        "step:3 - eta:1:20:50",
    ]


def test_the_first_step_counts_for_the_time_left_only_until_there_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Screen(file=io.StringIO(), width=200)
    logger = ConsoleLogger(run_info(total_steps=12), console)
    for step, seconds in ((1, 60), (2, 10)):
        now[0] += seconds
        logger.log(step, {})
    assert written(console).splitlines() == ["step:1 - eta:at most 11:00", "step:2 - eta:1:40"]


FULL = METRICS | {
    "actor/reward_kl_penalty": 0.02, "actor/entropy": 1.2, "actor/grad_norm": 1.3, "critic/grad_norm": 8.9,
    "critic/vf_explained_var": 0.44, "perf/env_steps": 1e6, "perf/sps": 2e4,
    "train/loss": 1.1, "distillation/kl": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_narrow_terminal_leaves_out_what_matters_least(width: int) -> None:
    console = terminal(width)
    logger = ConsoleLogger(run_info(), console)
    logger.log(1, FULL)
    logger.close()
    header, row = (line for line in written(console).splitlines() if "score" in line or "0.412" in line)
    shown = {label for label in LABELS if label in header}
    usual = set(LABELS) - {"failed rewards", "skipped"}
    assert shown >= {"score", "val", "expl var", "s/step"}, "the numbers that tell whether it learns, and how fast"
    assert (shown == usual) == (width == 200)
    assert "6.1" in row
    assert max(map(len, (re.sub(r"\r|\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in (header, row)))) < width


def test_a_resumed_run_counts_from_where_it_goes_on() -> None:
    screen = terminal()
    logger = ConsoleLogger(run_info(total_steps=60, resumed_step=20), screen)
    logger.phase("gen")
    logger.close()
    assert "step 21/60" in written(screen)


class _Broken(io.StringIO):
    """A stream that cannot be written to."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize("force_terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
def test_a_screen_that_fails_is_switched_off_and_said_once(
    error: OSError, force_terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logger = ConsoleLogger(run_info(), Screen(file=_Broken(error), force_terminal=force_terminal))
    logger.phase("gen")
    for step in (1, 2):
        logger.log(step, METRICS)
        logger.log_samples(step, [NASTY])
    logger.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("console output is switched off (")


@pytest.mark.parametrize("terminal", ["xterm", "dumb", "no-such-terminal", ""])
def test_odd_terminals(terminal: str, tmp_path: Path) -> None:
    code = (
        "import pathlib\n"
        "from tether.metrics.loggers.console import ConsoleLogger\n"
        "from tether.metrics.loggers.protocol import RunInfo\n"
        "from tether.runtime.terminal import Screen\n"
        "logger = ConsoleLogger(RunInfo(pathlib.Path(), 'p', 'e', {}, total_steps=2), Screen(force_terminal=True))\n"
        "logger.phase('gen', 1); logger.log(1, {'critic/score/mean': 0.5}); logger.close()\n"
        "print('alive')"
    )
    environment = {"TERM": terminal, "COLUMNS": "7", "LINES": "2", "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "alive" in done.stdout
    assert not done.stderr


def test_what_is_logged_of_a_step_later_takes_no_line() -> None:
    console = Screen(file=io.StringIO(), width=200)
    logger = ConsoleLogger(run_info(total_steps=None), console)
    for step in (1, 2):
        logger.log(step, {"critic/score/mean": 0.5})
        logger.log(step, {"timing_s/save_checkpoint": 2.0})
    assert written(console).splitlines() == [f"step:{step} - critic/score/mean:0.500" for step in (1, 2)]


def test_a_run_goes_on_when_its_reader_is_gone(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from tether.metrics.loggers.console import ConsoleLogger\n"
        "from tether.metrics.loggers.protocol import RunInfo\n"
        "logger = ConsoleLogger(RunInfo(pathlib.Path(), 'p', 'e', {}))\n"
        "logger.log(1, {}); time.sleep(0.3)\n"
        "[logger.log(step, {}) for step in range(2, 9)]\n"
        "pathlib.Path(sys.argv[1]).write_text('trained to the end')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "result")]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "step:1\n"
        process.stdout.close()
        assert process.stderr is not None
        assert "switched off" in process.stderr.read()
    assert (tmp_path / "result").read_text() == "trained to the end"
