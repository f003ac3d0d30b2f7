"""Ranks in processes: each gets its own, answers come in order, and what went wrong on which rank is said."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.distributed.parts import NEEDS_RAY, make, ray_group
from tests.distributed.processes import marked
from tests.processes import runs
from tether.commands.status import show_status
from tether.distributed import Group
from tether.runtime.ranks import Deadlines, Pool, RankLost

pytestmark = NEEDS_RAY
ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import os, signal, sys
from pathlib import Path
from tests.distributed.parts import make
from tether.distributed.ray_group import RayGroup
from tether.runtime.ranks import Pool
if __name__ == "__main__":
    group = RayGroup([Pool(1, 1)], "cpu", 1, Path(sys.argv[1]))
    group.build(make)
    group.call("part", "have", [([1] * 6,)])
    weights = group.share_weights("part")
    found = group.call("part", "found", [(next(weights),)])
    print(*group.call("part", "pid", [()]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
PATIENCE = 300.0  # Ray's agents look for their raylet now and then
MARK = "TETHER_TEST_DRIVER"
BACKTRACES = """
*** SIGTERM received at time=1796072220 on cpu 1 ***
PC: @     0x7f0340926f36  (unknown)  epoll_wait
[2026-11-30 20:57:00,927 E 15068 15068] logging.cc:474:     @     0x7f033faab5cd        128  boost::asio::run()
    @ ... and at least 3 more frames
*** StackTrace Information ***
/lib/python3.11/site-packages/ray/_raylet.so(+0xb1e3c4) [0x7f42a0c12b9a] ray::operator<<()
/lib/x86_64-linux-gnu/libc.so.6(__libc_start_main+0x85) [0x7f42a1ff1305] __libc_start_main

"""
"""Lines that Ray writes to the log of a rank that is ended by a signal or by a failed check."""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    before, debugger = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONBREAKPOINT")
    group = ray_group([Pool(1, 2)], "cpu", 4, tmp_path)
    group.build(make)
    yield group
    group.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert os.environ.get("PYTHONBREAKPOINT") == debugger


def test_ranks_work_together_until_one_of_them_dies(group: Group) -> None:
    found = group.call("part", "summed", [(torch.tensor([1.0, 2.0]),), (torch.tensor([10.0, 20.0]),)])
    assert [value.tolist() for value in found] == [[11.0, 22.0]] * 2
    assert group.call("part", "threads", [(), ()]) == [(2, "2")] * 2
    mine = group.call("part", "pid", [(), ()])
    assert len({*mine, os.getpid()}) == 3
    assert group.call("part", "pid", [None, ()]) == [None, mine[1]]
    assert group.call("part", "summed", [(group.share(torch.ones(1)),)] * 2)[0].tolist() == [2.0]
    group.call("part", "speak", [None, (f"the last words{BACKTRACES}",)])
    os.kill(mine[1], signal.SIGKILL)
    # Rank 0, which waits for it, fails at once, too.
    with pytest.raises(ValueError, match=r"(?s)^rank 1 died .*rank_1\.log:\n  the last words$"):
        group.call("part", "hang", [(), ()])
    with pytest.raises(ValueError, match="rank 1 died"):
        group.call("part", "pid", [(), None])


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[Group, Group]]:
    """Two groups, of one rank and of two."""
    group = ray_group([Pool(1, 1), Pool(1, 2, "rollout")], "cpu", 3, tmp_path, together=[range(1), range(1, 3)])
    try:
        one, two = group.some(range(1)), group.some(range(1, 3))
        one.build(make)
        two.build(make)
        yield one, two
    finally:
        group.close()


@pytest.mark.slow
def test_ranks_of_two_groups_know_their_own_and_weights_go_between_them(apart: tuple[Group, Group]) -> None:
    """Also weights of other shapes than before arrive with their bits, and leave no file."""
    one, two = apart
    assert [found.tolist() for found in one.call("part", "summed", [(torch.ones(1),)])] == [[1.0]]
    assert [found.tolist() for found in two.call("part", "summed", [(torch.ones(1),)] * 2)] == [[2.0]] * 2
    (weights,) = one.share_weights("part")
    assert two.call("part", "total", [(weights,)] * 2) == [7.0, 7.0]
    waiting = threading.Thread(target=two.call, args=("part", "rest", [(3.0,), (3.0,)]))
    waiting.start()
    one.call("part", "pid", [()])
    assert waiting.is_alive()
    waiting.join()
    for rows in ([1, 2, 3, 4, 6], [8], [2, 12, 1]):
        one.call("part", "have", [(rows,)])
        (expected,) = one.call("part", "described", [()])
        parts = [two.call("part", "found", [(weights,)] * 2) for weights in one.share_weights("part")]
        assert len(parts) == -(-len(rows) // 2)
        for rank in range(2):
            assert [tensor for part in parts for tensor in part[rank]] == expected
    assert [*one.call("part", "named_memory", [()]), *two.call("part", "named_memory", [()] * 2)] == [[]] * 3
    with pytest.raises(ValueError, match=r"^rank 2: data"):
        two.call("part", "refuse", [None, ("data",)])


@pytest.mark.slow
def test_the_next_weights_are_stored_while_some_are_read_and_a_rank_that_dies_meanwhile_is_named(
    apart: tuple[Group, Group],
) -> None:
    one, two = apart
    one.call("part", "have", [([1] * 12,)])
    (pid,) = one.call("part", "pid", [()])
    parts = one.share_weights("part")
    weights, until = next(parts), time.monotonic() + PATIENCE
    while one.call("part", "given", [()]) < [5] and time.monotonic() < until:  # 2, and the first of the next part
        time.sleep(0.01)
    assert one.call("part", "given", [()]) == [5]
    two.call("part", "found", [(weights,)] * 2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ValueError, match=r"^rank 0 died"):
        list(parts)


@pytest.mark.slow
def test_a_rank_that_is_killed_by_the_memory_monitor_is_lost(tmp_path: Path) -> None:
    """The monitor's threshold is below what the machine uses already, so it kills the rank when it starts."""
    options = {"_system_config": {"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 100}}

    def hang() -> None:
        with closing(ray_group([Pool(1, 1)], "cpu", 1, tmp_path, options=options)) as group:
            group.build(make)
            group.call("part", "rest", [(PATIENCE,)])

    with pytest.raises(RankLost, match=r"^rank 0 died \(Ray's memory monitor killed it, .*or lower, .*\)") as lost:
        hang()
    assert "lease ID" not in str(lost.value)


@pytest.mark.slow
def test_an_error_of_a_rank_names_it(group: Group) -> None:
    with pytest.raises(ValueError, match=r"^rank 1: data\.train_files: not this one$"):
        group.call("part", "refuse", [None, ("data.train_files: not this one",)])


@pytest.mark.slow
def test_a_bug_in_a_rank_comes_with_its_traceback(group: Group) -> None:
    says = r"(?s)^rank 1: ZeroDivisionError: .*parts\.py\", line \d+, in divide.*value / 0"
    with pytest.raises(ValueError, match=says):
        group.call("part", "divide", [None, (1.0,)])


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    group = ray_group([Pool(1, 2)], "cpu", 2, tmp_path / "ranks", deadlines=Deadlines(silence=20))
    try:
        group.build(make)
        _, stopped = group.call("part", "pid", [(), ()])
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(ValueError, match=r"^rank 1 is stopped: no sign of life for 20 s"):
            group.call("part", "hang", [(), ()])
        assert "in hang" in (tmp_path / "ranks/rank_0.log").read_text()  # its stack
        (tmp_path / "metrics.jsonl").touch()
        show_status(tmp_path)
        shown = capsys.readouterr().out
        assert "not running" in shown
        assert shown.count("part.hang") == 1  # rank 1 was stopped before
        assert re.search(r"last error, \d+ s ago: rank 1 is stopped", shown)
    finally:
        group.close()
    assert not runs(stopped)


@pytest.mark.slow
def test_ranks_end_with_their_driver(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([f"{ROOT}/src", str(ROOT), os.environ.get("PYTHONPATH", "")]),
        MARK: "1",
    }
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pid, until = int(ended.stdout), time.monotonic() + PATIENCE
    while (left := list(marked(MARK))) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []
    assert not runs(pid)
