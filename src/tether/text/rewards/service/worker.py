"""The process that calls reward functions. It does not import torch, so that it starts in a fraction of a second.

It is a `tether.runtime.supervised.SupervisedProcess` of the pool. Requests are pickles of the trainer's own data.
Answers are JSON, because objects returned by a user's function must not execute code in the trainer.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import time
import traceback
from collections.abc import Callable, Mapping, MappingView, Sequence, Set

from tether.runtime.channel import Channel
from tether.runtime.event_loop import event_loop, finished
from tether.runtime.guard import adopt_orphans, descendants, end_descendants, has_children
from tether.runtime.printable import install_safe_printing
from tether.runtime.user_files import describe_error, error_location
from tether.text.rewards.custom import CustomReward, load_reward_function
from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, dump_answer, outcome_of
from tether.text.rewards.router import RewardFunction, find_reward
from tether.text.rewards.sandbox.options import ProgramOptions
from tether.text.rewards.sandbox.reward import ProgramReward
from tether.text.rewards.service.pool import LOADING_SECONDS

_MESSAGE_HEAD, _TRACEBACK_TAIL = 500, 2000  # characters

_UNORDERED = (Mapping, MappingView, Set, str, bytes)
"""Iterables that cannot be a list of scores in the order of the responses."""
FindReward = Callable[[str], RewardFunction]
"""Data source -> the function that scores it."""


def serve(channel: Channel) -> None:
    """Answer requests until the trainer is gone.

    The first message is the pickled (`CustomReward` or None, `ProgramOptions`, timeout of a call in seconds); the
    answer is null once the function is loaded, or an error. Each later message is a pickled list of pickled
    `RewardRequest`s, and each request has one answer (`tether.text.rewards.outcome.load_answer`), which is sent as soon
    as it is available. An item that is itself a list of requests is scored by a single call, and has a list of answers.
    """
    first = channel.receive()
    if first is None:
        return
    custom, programs, timeout = pickle.loads(first)
    asyncio.set_event_loop(event_loop())  # for files that get the current loop when they are imported
    adopt_orphans()
    install_safe_printing()  # many reward functions print the response
    try:
        find = _reward_finder(custom, programs)
    except ValueError as error:
        channel.send(json.dumps(str(error)).encode())
        return
    channel.send(b"null")
    started_with = descendants(os.getpid()) if has_children() else {}
    loaded: set[str] = set()
    while (message := channel.receive()) is not None:
        channel.beat(timeout)
        for payload in pickle.loads(message):
            request: RewardRequest | list[RewardRequest] = pickle.loads(payload)
            source = request[0].data_source if isinstance(request, list) else request.data_source
            if source not in loaded:  # the import of a rule does not count towards the timeout of its call
                channel.beat(LOADING_SECONDS)
                loaded.add(source)
                _find(find, source)
                channel.beat(timeout)
            function = _find(find, source)
            if isinstance(function, ProgramReward):  # its programs have their own deadlines
                channel.beat(max(timeout, function.deadline))
            answer = _answer(function, request)
            if has_children():  # processes that the call started end with it
                end_descendants(os.getpid(), started_with)
            channel.send(answer)


def _reward_finder(custom: CustomReward | None, programs: ProgramOptions) -> FindReward:
    if custom is None:
        return lambda data_source: find_reward(data_source, programs)
    function = load_reward_function(custom.path, custom.name, custom.reward_kwargs, custom.key, custom.arguments)
    return lambda _: function


def _find(find: FindReward, data_source: str) -> RewardFunction | RewardError:
    try:
        return find(data_source)
    except (ValueError, ImportError) as error:
        return RewardError(str(error))


def _answer(function: RewardFunction | RewardError, request: RewardRequest | list[RewardRequest]) -> bytes:
    """Score a request, or all of a list in one call, and return the serialized answer."""
    if isinstance(function, RewardError):
        return dump_answer(function, 0.0)
    requests = request if isinstance(request, list) else [request]
    # So that a function that draws random numbers returns the same score in every worker.
    random.seed("\0".join(one.solution_str for one in requests))
    pid = os.getpid()
    start = time.monotonic()
    outcomes = call_for_all(function, requests) if isinstance(request, list) else [call(function, request)]
    if os.getpid() != pid:
        os._exit(0)  # the function forked the worker, and the copy returned from the call
    seconds = time.monotonic() - start
    if isinstance(request, list):
        return json.dumps([dump_answer(outcome, seconds).decode() for outcome in outcomes]).encode()
    return dump_answer(outcomes[0], seconds)


def call(function: RewardFunction, request: RewardRequest) -> RewardOutcome:
    """Call a reward function by keyword, as verl does, and convert the result; coroutines are run to their end."""
    try:
        result = function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
        return outcome_of(finished(result))
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, including SystemExit
        return _raised(error)


def call_for_all(function: RewardFunction, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
    """Call a function of lists, as verl's batch manager does; an invalid item is an error of its response only."""
    try:
        result = function(
            data_sources=[request.data_source for request in requests],
            solution_strs=[request.solution_str for request in requests],
            ground_truths=[request.ground_truth for request in requests],
            extra_infos=[request.extra_info for request in requests],
        )
        scores = finished(result)
        unordered = isinstance(scores, _UNORDERED) or getattr(scores, "ndim", 1) != 1
        items = [] if unordered else list(scores)
        if len(items) != len(requests):
            shown = f"{len(items)} items" if isinstance(scores, list | tuple) else type(scores).__name__
            problem = (
                f"the reward function returned {shown} for {len(requests)} responses; return a list with one for each"
            )
            return [RewardError(problem)] * len(requests)
        return [outcome_of(item) for item in items]
    except BaseException as error:  # noqa: BLE001 - as above
        return [_raised(error)] * len(requests)


def _raised(error: BaseException) -> RewardError:
    reason = f"{describe_error(error)[:_MESSAGE_HEAD]}{error_location(error)}"
    return RewardError(f"the reward function raised {reason}", traceback.format_exc()[-_TRACEBACK_TAIL:])
