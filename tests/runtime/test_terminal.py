"""Text of any origin reaches the terminal as text."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tether.runtime.printable import printable
from tether.runtime.terminal import Screen, Waiting, one_line, shortened

NASTY = "\x1b[2J\x1b]0;title\x07red\x9b31m \u202egnp.exe\u2028next \ud83d\r\n\tend"


def test_printable_by_hand() -> None:
    assert printable(NASTY) == " [2J ]0;title red 31m gnp.exe\nnext \ufffd \n\tend"
    assert one_line(NASTY) == " [2J ]0;title red 31m gnp.exe⏎next \ufffd ⏎ end"
    assert printable("1 + 1 = 2 \N{FAMILY} e\u0301 \u0645\u0631\u062d\u0628\u0627") == (
        "1 + 1 = 2 \N{FAMILY} e\u0301 \u0645\u0631\u062d\u0628\u0627"
    )


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = printable(text)
    assert not {c for c in shown if (ord(c) < 32 or 127 <= ord(c) < 160) and c not in "\n\t"}
    assert printable(shown) == shown
    shown.encode()
    assert "\n" not in one_line(text)


def test_long_work_is_shown_in_a_file_as_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("tether.runtime.terminal.monotonic", lambda: clock[0])
    screen = Screen(file=io.StringIO())
    with Waiting("training", 100, screen, done=10) as waiting:
        for done in range(11, 101):
            clock[0] += 1.0
            waiting.show(done, "accuracy 0.5" if done == 30 else "")
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 90 // Waiting.EVERY
    assert lines[0] == "training:20/100 - eta:1:20"
    assert lines[1] == "training:30/100 - accuracy 0.5 - eta:1:10"
    assert lines[-1] == "training:100/100"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_and_tables_are_fitted_to_a_terminal_alone(is_terminal: bool) -> None:
    long, table = "word " * 40 + "end", Table(box=None, show_header=False)
    table.add_row("a name", long)
    screen = Screen(file=io.StringIO(), width=80, force_terminal=is_terminal)
    screen.print(long)
    screen.print(table)
    lines = [line.rstrip() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    found = [sum(line == long for line in lines), sum("a name" in line and line.endswith("end") for line in lines)]
    assert found == ([0, 0] if is_terminal else [1, 1])


def test_short_work_leaves_no_line() -> None:
    screen = Screen(file=io.StringIO())
    with Waiting("scoring", None, screen) as waiting:
        waiting.show(3)
    assert screen.file.getvalue() == ""  # type: ignore[attr-defined]


@given(st.text(), st.integers(10, 50))
def test_shortened_keeps_both_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    assert len(short) <= width
    if len(text) > width:
        assert short[-4:] == text[-4:]
        assert short[0] == text[0]


def test_nothing_that_a_screen_prints_drives_the_terminal() -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=120, _environ={"TERM": "xterm"})
    plain = Screen(file=io.StringIO(), force_terminal=True, width=120, _environ={"TERM": "xterm"})
    table = Table("a", title=NASTY)
    table.add_row(NASTY)
    for shown in (NASTY, Text(NASTY, style="red"), table, Panel(NASTY, title=NASTY)):
        screen.print(shown)
    plain.print(Text("x", style="red"))
    written = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[2J" not in written
    assert "\x1b]" not in written
    assert "\x07" not in written
    assert "\u202e" not in written
    assert "\x1b[31m" in plain.file.getvalue(), "colours of our own stay"  # type: ignore[attr-defined]


COMMANDS = {
    "an error": "import sys; sys.argv[1:] = ['config', 'check', 'trainer.seed=\\x1b[2J\u2026']",
    "a table": "import sys; sys.argv[1:] = ['doctor']",
}


@pytest.mark.parametrize(
    "command",
    [COMMANDS["an error"], pytest.param(COMMANDS["a table"], marks=pytest.mark.slow)],
    ids=COMMANDS,
)
def test_the_command_on_a_terminal_that_knows_only_ascii(command: str, tmp_path: Path) -> None:
    code = f"{command}; from tether.commands.cli import main; main()"
    root = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": root, "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, check=False)
    assert b"Traceback" not in done.stderr
    assert b"\x1b[2J" not in done.stderr + done.stdout
    assert done.stderr.strip() or done.stdout.strip()
