"""Processes that are forked from one that has imported everything, and so start in no time."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Starts processes without the type checks of this one.

    All share a server, which imports what is named before the first of them: always the same, whoever is first. It
    never runs a backward pass, after which none may fork.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context
