"""The event loop for a user's coroutines, one for the lifetime of a process.

Clients, connections and locks are bound to the loop in which they are first used. With a new loop for each call,
objects that one call opened could not be used in the next.
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
"""Timeout for a cancelled coroutine to end."""
_one_thread = threading.Lock()


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop; it only runs during calls of `finished`."""
    return asyncio.new_event_loop()


def finished(result: Any) -> Any:
    """Return a result unchanged, or run an awaitable to its end and return its result.

    It runs in this thread, so that signals work, or in another thread if this one already runs a loop, as in a
    notebook.
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
        if begun.done():  # a deadline may have ended the wait while the task still runs
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
            if not task.done():  # a deadline ended the wait; the task must not continue during the next call
                task.cancel()
                with suppress(BaseException):
                    loop.run_until_complete(asyncio.wait({task}, timeout=CANCEL_SECONDS))
            elif not task.cancelled():
                task.exception()  # otherwise asyncio logs that the exception was never retrieved
            raise
