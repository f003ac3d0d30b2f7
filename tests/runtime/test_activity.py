"""A screen is never still for long: the first line comes before anything is loaded, and long work is shown again."""

import io
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tether.metrics.loggers.console import ConsoleLogger
from tether.metrics.loggers.protocol import RunInfo
from tether.runtime.terminal import Activity, Heartbeat, Screen

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def lines_of(screen: Screen) -> list[str]:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue().splitlines()


def wait_for_lines(screen: Screen, count: int) -> list[str]:
    """The lines of a screen, once there are so many."""
    deadline = time.monotonic() + 60
    while len(lines_of(screen)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return lines_of(screen)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_training_says_something_before_it_loads_torch(tmp_path: Path) -> None:
    """Processor time rather than time: a machine that is busy shows the line later."""
    code = "from tether.commands.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "env.train.id=CartPole-v1", f"trainer.default_local_dir={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout
        first = process.stdout.readline()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    assert first == b"loading torch ...\n"
    assert (int(fields[11]) + int(fields[12])) / TICKS < 3


def test_an_activity_has_a_line_and_another_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "EVERY", 0.05)
    screen = Screen(file=io.StringIO(), width=20)
    with Activity(screen) as activity:
        activity.begin("loading a model with a long name")
        lines = wait_for_lines(screen, 3)
    assert lines[0] == "loading a model with a long name ..."
    assert lines[1] == "loading a model with a long name ... 0:00"
    shown = len(lines_of(screen))
    time.sleep(0.2)
    assert len(lines_of(screen)) == shown


def test_quick_activities_have_a_line_each() -> None:
    screen = Screen(file=io.StringIO())
    with Activity(screen) as activity:
        activity.begin("reading the data")
        activity.begin("loading the models")
    assert lines_of(screen) == ["reading the data ...", "loading the models ..."]


def test_a_file_says_what_a_long_step_is_doing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Heartbeat, "EVERY", 0.05)
    screen = Screen(file=io.StringIO())
    run = RunInfo(directory=tmp_path, project="p", experiment="e", config={}, total_steps=60)
    logger = ConsoleLogger(run, screen)
    logger.log(12, {"critic/score/mean": 0.5})
    logger.phase("update_actor", 12, 32)
    lines = wait_for_lines(screen, 2)
    logger.close()
    assert lines[1] == "step 13/60: update_actor 12/32, 0 s"
    shown = len(lines_of(screen))
    time.sleep(0.2)
    assert len(lines_of(screen)) == shown


def test_quick_steps_leave_their_own_lines_alone(tmp_path: Path) -> None:
    screen = Screen(file=io.StringIO())
    logger = ConsoleLogger(RunInfo(directory=tmp_path, project="p", experiment="e", config={}, total_steps=2), screen)
    for step in (1, 2):
        logger.phase("gen")
        logger.log(step, {"critic/score/mean": 0.5})
    logger.close()
    assert [line.partition(" ")[0] for line in lines_of(screen)] == ["step:1", "step:2"]


@pytest.mark.parametrize(("options", "shows_packages"), [([], False), (["-W", "default"], True)])
def test_what_packages_warn_about_is_not_shown(options: list[str], shows_packages: bool) -> None:
    file = Path(sysconfig.get_path("purelib")) / "somebody" / "module.py"
    code = (
        "import warnings; from tether.runtime.package_warnings import hide_warnings_of_packages as hide; hide()\n"
        f"warnings.warn_explicit('of a package', SyntaxWarning, {str(file)!r}, 1)\n"
        "warnings.warn_explicit('of a reward', SyntaxWarning, '/home/me/reward.py', 1)\n"
    )
    done = subprocess.run([sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "reward.py:1: SyntaxWarning: of a reward" in done.stderr
    assert ("of a package" in done.stderr) == shows_packages
