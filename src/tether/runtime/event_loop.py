"""The event loop of a process for coroutines of the user's: one for its life.

A client, a connection or a lock is bound to the loop in which it was first used. With a loop of its own for each call,
what the first call opened would be of no use in the second.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any

CANCEL_SECONDS = 1.0
"""That a coroutine has to end in after it was cancelled."""
_one_thread = threading.Lock()


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which no thread runs between two calls."""
    return asyncio.new_event_loop()


def finished(result: Any) -> Any:
    """Return a result as it is, or run what can be awaited to its end and return what that gives.

    It runs in this thread, so that its signals work; where this thread runs a loop already, as in a notebook, in
    another one.
    """
    if not inspect.isawaitable(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(result, Future())
    begun: Future[asyncio.Task[Any]] = Future()
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(_run(result, begun))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            done.set_exception(error)

    threading.Thread(target=work, name="coroutine", daemon=True).start()
    try:
        return done.result()
    except BaseException:
        if begun.done():  # it may run still, if a deadline ended the wait
            event_loop().call_soon_threadsafe(begun.result().cancel)
        raise


def _run(awaitable: Awaitable[Any], begun: Future[asyncio.Task[Any]]) -> Any:
    async def wait() -> Any:
        return await awaitable

    with _one_thread:
        loop = event_loop()
        task = loop.create_task(wait())
        begun.set_result(task)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # a deadline ended the wait: the task must not go on during the next call
                task.cancel()
                with suppress(BaseException):
                    loop.run_until_complete(asyncio.wait({task}, timeout=CANCEL_SECONDS))
            elif not task.cancelled():
                task.exception()  # else asyncio logs that nobody asked for it
            raise
