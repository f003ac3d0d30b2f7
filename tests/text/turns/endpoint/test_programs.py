"""Programs in processes of their own: how they end, and that nothing of them is left."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tether.runtime.guard import descendants
from tether.text.turns.endpoint.programs import EpisodeResult, EpisodeTask, ProgramPool

SCRIPT = """
case $MODE in
score) cat; echo; printf 'done\\n 0.5 \\n\\n' ;;
talks) cat; echo no number ;;
long) yes 1 | head -c 10000000; echo; echo 7 ;;
fails) echo first >&2; echo 'what went wrong' >&2; exit 3 ;;
leaves) sleep 100 & sh -c 'sleep 100 & echo 1' ;;
hangs) sleep 100 & sleep 100 ;;
esac
"""


def played(pool: ProgramPool, mode: str, environment: Mapping[str, str] | None = None) -> EpisodeResult:
    return pool.take(pool.start(EpisodeTask({"ground_truth": "7"}, {"MODE": mode, **(environment or {})})))


def sleeping() -> int:
    running = [pid for pid, exited in descendants(os.getpid()).items() if not exited]
    return sum(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running)


def test_a_command_is_scored_by_its_last_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text(SCRIPT)
    with ProgramPool(f"sh '{script}'", num_workers=1, timeout=2.0) as pool:
        assert played(pool, "score") == EpisodeResult(0.5)
        assert played(pool, "talks") == EpisodeResult()
        assert played(pool, "long") == EpisodeResult(7.0)
        assert played(pool, "fails") == EpisodeResult(error="the program ended with exit code 3: what went wrong")
        assert played(pool, "leaves") == EpisodeResult(1.0)
        assert sleeping() == 0
        start = time.monotonic()
        hung = played(pool, "hangs")
        assert time.monotonic() - start < 20
        assert (hung.reward, "within the deadline of 2 s, so it was killed" in hung.error) == (None, True)
        assert sleeping() == 0
        assert played(pool, "score") == EpisodeResult(0.5), "the next episode has another process"
    with ProgramPool("/nowhere/agent", num_workers=1, timeout=2.0) as pool:
        assert "cannot be started" in played(pool, "score").error


def test_a_function_is_scored_by_what_it_returns(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import asyncio, os\n"
        "async def play(row):\n"
        "    await asyncio.sleep(0)\n"
        "    mode = os.environ['MODE']\n"
        "    if mode == 'exits': raise SystemExit(2)\n"
        "    if mode == 'dies': os._exit(2)\n"
        "    if mode == 'forks' and not os.fork(): return 9\n"
        "    return {'none': None, 'text': 'much', 'forks': 1}.get(mode, row['ground_truth'])\n"
    )
    with ProgramPool(f"{file}:play", num_workers=1, timeout=5.0) as pool:
        assert [played(pool, mode) for mode in ("row", "none", "forks")] == [*map(EpisodeResult, (7.0, None, 1.0))]
        assert "ValueError" in played(pool, "text").error
        assert played(pool, "exits").error.startswith("the program failed: SystemExit: 2")
        assert "ended with exit code 2" in played(pool, "dies").error
        assert played(pool, "row") == EpisodeResult(7.0)
    (tmp_path / "number.py").write_text("play = 1\n")
    with pytest.raises(ValueError, match="is of type int, not a function"):
        ProgramPool(f"{tmp_path / 'number.py'}:play", num_workers=1, timeout=5.0)
