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


LEAVING = """
import asyncio, os, sys, threading, time

async def pending():
    await asyncio.sleep(100)

async def wait_for_a_thread():
    await asyncio.to_thread(time.sleep, 0)

def play(row):
    mode = os.environ["MODE"]
    if mode in ("thread", "raises"):
        threading.Thread(target=time.sleep, args=[100], name="helper", daemon=mode == "thread").start()
    if mode == "raises":
        raise RuntimeError("no more")
    if mode == "short":
        threading.Thread(target=time.sleep, args=[0.01]).start()
    return wait_and_return(mode)

async def wait_and_return(mode):
    if mode == "task":
        sys.kept = asyncio.create_task(pending())
    await wait_for_a_thread()
    return os.getpid()
"""


def test_a_process_in_which_a_function_left_a_thread_or_a_task_is_replaced(tmp_path: Path) -> None:
    """Otherwise what is left would find the address and key of the next episode."""
    (tmp_path / "agent.py").write_text(LEAVING)
    with ProgramPool(f"{tmp_path / 'agent.py'}:play", num_workers=1, timeout=20.0) as pool:
        first, second = played(pool, "row"), played(pool, "short")
        assert first == second, "threads that end at once cost no process, nor do those of asyncio.to_thread"
        assert first.left_running == ""
        threaded = played(pool, "thread")
        assert (threaded.reward, threaded.left_running) == (first.reward, "helper"), "the episode itself counts"
        with_task = played(pool, "task")
        assert with_task.left_running == "pending"
        failed = played(pool, "raises")
        assert (failed.reward, failed.left_running) == (None, "helper")
        assert failed.error.startswith("the program failed: RuntimeError: no more")
        last = played(pool, "row")
        assert len({first.reward, with_task.reward, last.reward}) == 3


def test_all_rows_are_scored_although_each_costs_a_process(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(LEAVING)
    with ProgramPool(f"{tmp_path / 'agent.py'}:play", num_workers=2, timeout=20.0) as pool:
        for _ in range(6):
            pool.start(EpisodeTask({}, {"MODE": "thread"}))
        results = pool.take_all()
    assert [result.error for result in results] == [""] * 6
    assert len({result.reward for result in results}) == 6


class FromEnvironment:
    """Becomes the value of a variable where it is unpickled: in the process of a program, before an episode begins."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return os.getenv, (self.name,)


def test_the_address_of_the_policy_is_only_known_during_an_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that the import creates would otherwise send the rows to the user's own account."""
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")
    for name in names:
        monkeypatch.setenv(name, "the user's")
    (tmp_path / "agent.py").write_text(
        "import os\n"
        f"on_import = [os.environ.get(name) for name in {names}]\n"
        "def play(row):\n"
        f"    known = [os.environ[name] for name in {names}]\n"
        "    return on_import == row['before'] == [None] * 3 and known == [row['key']] * 3\n"
    )
    with ProgramPool(f"{tmp_path / 'agent.py'}:play", num_workers=1, timeout=20.0) as pool:
        for key in ("1", "2"):
            row = {"before": [FromEnvironment(name) for name in names], "key": key}
            assert pool.take(pool.start(EpisodeTask(row, dict.fromkeys(names, key)))) == EpisodeResult(1.0)
    (tmp_path / "early.py").write_text("import os\nkey = os.environ['OPENAI_API_KEY']\ndef play(row): return 1\n")
    with pytest.raises(ValueError, match=r"importing the file failed(.|\n)*Create the client inside the function"):
        ProgramPool(f"{tmp_path / 'early.py'}:play", num_workers=1, timeout=5.0)
