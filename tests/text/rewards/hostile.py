"""A reward function that does what the response tells it to, however bad."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from enum import IntEnum, StrEnum
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return (
        globals()[solution_str](ground_truth, extra_info) if solution_str in globals() else float(ground_truth) + bonus
    )


def raises(*_):
    raise KeyError("no such answer")


async def raises_a_group(*_):
    async def fails():
        raise KeyError("in a task")

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())


def raises_unprintable(*_):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError

    raise Unprintable


def exits_politely(*_):
    sys.exit(3)


def exits_hard(*_):
    os._exit(7)


def segfaults(*_):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(*_):
    while True:
        time.sleep(60)


def hangs_holding_the_interpreter(*_):
    sum(range(10**12))


def ignores_sigterm(*_):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hangs()


def stops_itself(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def _note(extra_info, pid):
    with Path(extra_info["pids"]).open("a") as file:
        file.write(f"{pid}\n")


def forks_and_hangs(_, extra_info):
    for _ in range(5):
        if os.fork() == 0:
            hangs()
    hangs()


def leaves_daemon(_, extra_info):
    """A child in a session of its own, whose parent is gone."""
    child = os.fork()
    if child == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            ignores_sigterm()
        _note(extra_info, daemon)
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def leaves_daemon_and_hangs(_, extra_info):
    leaves_daemon(_, extra_info)
    hangs()


def leaves_daemon_and_exits(_, extra_info):
    leaves_daemon(_, extra_info)
    os._exit(1)


def returns_twice(*_):
    """The forked copy comes back from the call as well, and must not answer."""
    return 1.0 if os.fork() else 2.0


def kills_its_group(*_):
    os.killpg(0, signal.SIGKILL)
    hangs()


def forks_what_sigterm_ends(*_):
    child = os.fork()
    if child == 0:
        hangs()
    os.kill(child, signal.SIGTERM)
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def kills_its_guard(*_):
    os.kill(os.getppid(), signal.SIGKILL)
    hangs()


def closes_its_files(*_):
    os.closerange(3, 1000)
    return 1.0


def prints_escapes(*_):
    print("\x1b[2Jseen", flush=True)
    return 1.0


def prints(*_):
    print("x" * 100_000)
    sys.stdout.flush()
    os.write(1, b"to the descriptor\n")
    subprocess.run(["echo", "from a child"], check=True)
    return 1.0


def reads_stdin(*_):
    return float(len(sys.stdin.read()))


def huge_output(*_):
    return {"score": 1.0, "log": "y" * 5_000_000}


def returns_none(*_):
    return None


def returns_nan(*_):
    return float("nan")


def returns_text(*_):
    return "0.5"


def returns_list(*_):
    return [0.0, 1.0]


def returns_object(*_):
    return compute_score


def returns_extra(*_):
    import numpy as np  # here, as a tenth of a second in each of many processes

    return {"score": np.float32(0.5), "acc": np.bool_(True), "pred": "12", "function": hangs}


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class RunsCode(str):
    """Unpickled, it would write the number of the process that reads it."""

    def __reduce__(self):
        return exec, (f"import os; open({str(self)!r}, 'w').write(str(os.getpid()))",)


class Wide(float):
    def __repr__(self):
        return "not a number"


def returns_enums(*_):
    return {"score": Level.HIGH, "colour": Colour.RED, "level": Level.HIGH, "wide": Wide(2.5), Colour.RED: [Level.HIGH]}


def returns_what_runs_code(_, extra_info):
    return {"score": 1.0, "path": RunsCode(extra_info["path"]), RunsCode("key"): 1}


def returns_what_is_slow_to_read(*_):
    class Slow:
        def __reduce_ex__(self, *_):
            time.sleep(60)

        __repr__ = __reduce_ex__

    return {"score": 1.0, "slow": Slow()}


def returns_itself(*_):
    result = {"score": 1.0}
    result["again"] = result
    return result


def returns_long_integer(*_):
    return {"score": 1.0, "count": 10**5000}


def returns_too_much(*_):
    return {"score": 1.0, "log": "y" * (1 << 25)}


def returns_surrogate(*_):
    return {"score": 1.0, "text": "\ud800"}


def returns_beyond_float32(*_):
    return 1e39


def returns_beyond_float64(*_):
    return 10**400


def returns_most(*_):
    return 3.4028234663852886e38


def _to_all_files(data):
    for number in range(3, 50):
        with contextlib.suppress(OSError):
            os.write(number, data)


def writes_zeros_everywhere(*_):
    _to_all_files(b"\0" * 4096)
    return 1.0


def writes_one_byte_everywhere(*_):
    _to_all_files(b"\xff")
    return 1.0


def writes_a_pickle_everywhere(_, extra_info):
    import pickle

    _to_all_files(pickle.dumps(RunsCode(extra_info["path"])))
    return 1.0


def leaves_a_thread_with_the_interpreter(*_):
    threading.Thread(target=sum, args=(range(10**12),), daemon=True).start()
    time.sleep(0.1)
    return 1.0


def leaves_children(_, extra_info):
    """One that runs, one that is never waited for, and a daemon."""
    running = subprocess.Popen(["sleep", "60"], start_new_session=True)
    subprocess.Popen(["true"])
    _note(extra_info, running.pid)
    return leaves_daemon(_, extra_info)


def counts_children(*_):
    import psutil

    return float(len(psutil.Process().children(recursive=True)))


async def is_a_coroutine(*_):
    await asyncio.sleep(0)
    return 0.25


def draws(*_):
    return random.random()


def orders_a_set(*_):
    return float(sum(i * ord(c) for i, c in enumerate({"p", "q", "r", "s", "t", "u"})))


def sleeps(seconds, _):
    time.sleep(float(seconds))
    return 1.0


def says_when(seconds, _):
    begun = time.monotonic()
    time.sleep(float(seconds))
    return {"score": 1.0, "begun": begun, "ended": time.monotonic()}


def touches(_, extra_info):
    Path(extra_info["path"]).touch()
    return 1.0
