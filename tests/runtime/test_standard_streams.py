"""A standard stream that is closed, full or gone ends no training, and leaves other commands with one sentence."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tether.runtime import printable
from tether.runtime.printable import LONGEST_PRINT, PRINTED_A_MINUTE

ROOT = Path(__file__).parents[2]
GOES_ON = """
import os, sys
from tether.runtime.standard_streams import continue_without_output, prepare_standard_streams
prepare_standard_streams()
continue_without_output()
with open("log", "w") as log:
    assert log.fileno() > 2, log.fileno()
    for _ in range(3):
        print("é" * 100_000, flush=True)
        print("x" * 10_000, file=sys.stderr)
        os.write(1, b"more") and os.write(2, b"more")
    from tether.runtime.terminal import Screen
    Screen().print("a line")
    log.write("done")
"""
TETHER = "from tether.commands.cli import main; main()"


def run(code: str, redirections: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LC_ALL": "C.UTF-8"}
    words = ["sh", "-c", f'exec "$0" "$@" {redirections}', sys.executable, "-c", code, *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_what_writes_files_goes_on_to_its_end(tmp_path: Path) -> None:
    said = {}
    for redirections in (">/dev/full", ">&-", "2>&-", "2>/dev/full", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"):
        done = run(GOES_ON, redirections, tmp_path)
        assert (done.returncode, (tmp_path / "log").read_text()) == (0, "done"), (redirections, done.stderr)
        (tmp_path / "log").unlink()
        said[redirections] = done.stderr.replace("x", "").replace("more", "").split("\n")
    (line,) = filter(None, said[">/dev/full"])
    assert line == "console output is switched off (No space left on device); the run continues"


def test_a_terminal_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    """Writes to it fail with EIO."""
    master, slave = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    wait = f"import sys; sys.stdin.readline()\n{GOES_ON}"
    with subprocess.Popen(
        [sys.executable, "-c", wait], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        os.close(master)
        process.communicate(b"go\n")
    assert process.returncode == 0
    assert (tmp_path / "log").read_text() == "done"


def test_a_command_that_only_prints_says_why_it_cannot(tmp_path: Path) -> None:
    for arguments in (["--version"], ["config", "show", "env.train.id=CartPole-v1"]):
        done = run(TETHER, ">/dev/full", tmp_path, *arguments)
        expected = "standard output cannot be written (No space left on device)\n"
        assert (done.returncode, done.stderr) == (2, expected), arguments
    assert run(TETHER, ">&-", tmp_path, "--version").returncode == 0
    assert run(TETHER, "2>/dev/full", tmp_path, "config", "check", "algorithm.lam=5").returncode == 2


class Full(io.StringIO):
    """A disk that is full after some characters."""

    def write(self, text: str) -> int:
        if self.tell() + len(text) > 3 * PRINTED_A_MINUTE:
            raise OSError(28, "No space left on device")
        return super().write(text)

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_what_a_users_code_prints_is_bounded_and_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = Full(), [0.0]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(printable.time, "monotonic", lambda: clock[0])
    printable.install_safe_printing()
    print("x" * 10**8, flush=True)
    assert out.getvalue() == "x" * LONGEST_PRINT + f"... ({10**8 - LONGEST_PRINT} more characters)\n\n"
    for _ in range(100):
        print("y" * LONGEST_PRINT)
    assert len(out.getvalue()) < PRINTED_A_MINUTE + 500
    assert out.getvalue().endswith("(more than 1048576 characters in a minute: the others are not shown)\n")
    clock[0] = 61.0
    print("shown again", end="")
    assert out.getvalue().endswith("shown again")
    for clock[0] in range(130, 1000, 61):  # to a disk that is full by then
        for _ in range(100):
            print("z" * LONGEST_PRINT)


@pytest.mark.slow
def test_a_training_outlives_its_streams(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    small = ["env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16", "env.eval.num_episodes=2"]
    small += [
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "env.train.id=CartPole-v1",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
    ]
    for number, redirections in enumerate((">/dev/full", ">&-", "2>&-", "<&- >&- 2>&-")):
        folder = tmp_path / str(number)
        done = run(TETHER, redirections, tmp_path, "train", *small, f"trainer.default_local_dir={folder}")
        assert done.returncode == 0, (redirections, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert (folder / "global_step_2").is_dir()
