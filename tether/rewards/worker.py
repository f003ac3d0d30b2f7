"""The process that calls reward functions. Loads no torch; starts in a fraction of a second.

::

    trainer                        guard (main, here)                worker (serve, here; own session)
    pool thread ──── requests ─────────────────────────────────────► calls the function, one after the other
                ◄─── outcomes ──────────────────────────────────────
    control ───────── closed ────► ends the worker                   writes when each call began into shared
            ◄──────── verdict ──── or it passed its deadline,  ◄──── memory, which the guard reads
                                   or it exited by itself

Messages are length-prefixed pickles on a socket of their own. The worker's stdout is stderr, so prints harm nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import mmap
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from tether.rewards.custom import CustomReward, load_reward_function
from tether.rewards.guard import Clock, adopt_orphans, die_with_parent, guard, wake_on_child_exit
from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, outcome_of
from tether.rewards.router import RewardFunction, find_reward

_MESSAGE_HEAD, _TRACEBACK_TAIL = 500, 2000  # characters

FindReward = Callable[[str], RewardFunction]
"""From a data source to the function that scores it."""


def main() -> None:
    """Run a guard with a worker below it. Arguments: the two socket descriptors and the deadline in seconds."""
    channel_fd, control_fd, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    os.dup2(2, 1)
    clock = memoryview(mmap.mmap(-1, 8)).cast("d")
    adopt_orphans()
    child_exit = wake_on_child_exit()
    guard_pid = os.getpid()
    worker = os.fork()
    if worker:
        os.close(channel_fd)
        guard(worker, socket.socket(fileno=control_fd), child_exit, clock, timeout)
        return
    os.setsid()
    die_with_parent()
    if os.getppid() != guard_pid:
        return  # the guard was gone before the kernel knew whom to watch
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(control_fd)
    serve(Connection(channel_fd), clock)


def serve(channel: Connection, clock: Clock) -> None:
    """Answer requests until the trainer closes the channel.

    The first message is the `CustomReward` or None; the answer is None when it is ready, else what is wrong. Every
    later message is a list of pickled requests; each of them is answered by (outcome, seconds) as soon as it is done.
    """
    try:
        custom: CustomReward | None = channel.recv()
    except EOFError:
        return  # the trainer was killed meanwhile
    try:
        find = _reward_finder(custom)
    except ValueError as error:
        channel.send(str(error))
        return
    channel.send(None)
    while True:
        try:
            batch: list[bytes] = channel.recv()
        except EOFError:
            return
        for payload in batch:
            channel.send(_timed(find, pickle.loads(payload), clock))


def _reward_finder(custom: CustomReward | None) -> FindReward:
    if custom is None:
        return find_reward
    function = load_reward_function(custom.path, custom.name, custom.reward_kwargs)
    return lambda _: function


def _timed(find: FindReward, request: RewardRequest, clock: Clock) -> tuple[RewardOutcome, float]:
    """Score one request under the deadline. Importing a rule for the first time does not count as calling it."""
    try:
        function = find(request.data_source)
    except (ValueError, ImportError) as error:
        return RewardError(str(error)), 0.0
    random.seed(request.solution_str)  # a function that draws numbers gives the same result in every worker
    own = os.getpid()
    clock[0] = begun = time.monotonic()
    outcome = call(function, request)
    if os.getpid() != own:
        os._exit(0)  # a copy of the worker, forked by the function, that came back from the call
    clock[0] = 0.0
    return outcome, time.monotonic() - begun


def call(function: RewardFunction, request: RewardRequest) -> RewardOutcome:
    """Call a reward function the way verl does, by keyword, and read the result; coroutines are run to their end."""
    try:
        result = function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
        return outcome_of(asyncio.run(result) if inspect.iscoroutine(result) else result)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too: each is an error outcome
        what = traceback.format_exception_only(error)[-1].strip()[:_MESSAGE_HEAD]  # works if str(error) itself raises
        return RewardError(f"the reward function raised {what}", traceback.format_exc()[-_TRACEBACK_TAIL:])
