"""Companions of ranks as Ray actors: objects on a rank's node that many threads call while the rank works."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tether.distributed.worker import CompanionLost, NodeLost, Process
from tether.runtime.interrupt import raise_if_interrupted
from tether.runtime.ranks import RankLost

logger = logging.getLogger(__name__)

CALL_THREADS = 4
"""Threads of a companion that are kept free for `RayCompanion.call`."""
POLL_SECONDS = 1.0
"""Seconds between two checks of a pending call."""
LOG_EVERY_SECONDS = 60.0
"""Seconds between two warnings about a pending call."""
LOST_DATA = "the data of a lost rank are gone with its machine"
"""Message about a reference whose object can no longer be read."""


class RayCompanion:
    """A `tether.distributed.Companion` as an actor of Ray.

    Args:
        process: the process of a rank on its node.
        threads: maximum number of methods that `work` executes at once.
        make: makes the object; it must be importable on the node.
        needs_node: whether the ranks cannot do without the node.
    """

    def __init__(self, process: Process, threads: int, make: Callable[[], Any], *, needs_node: bool = True) -> None:
        self.host, self._node = process.host, process.node
        self._threads, self._make, self._needs_node = threads, make, needs_node
        self._actor: Any = None
        self._cuts = 0

    def start(self) -> None:
        if self._actor is None:
            remote: Any = ray.remote
            self._actor = (
                remote(concurrency_groups={"calls": CALL_THREADS})(_Actor)
                .options(
                    num_cpus=0,  # the devices are those of the ranks on the node
                    max_concurrency=self._threads,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(self._node, soft=False),
                )
                .remote(Path.cwd(), self._make)
            )

    def call(self, method: str, *arguments: object, timeout: float) -> Any:
        return self._result(method, arguments, "calls", timeout)

    def work(self, method: str, *arguments: object) -> Any:
        return self._result(method, arguments, None, math.inf)

    def cut(self) -> None:
        self._cuts += 1

    def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            self.cut()
            with suppress(RayError):
                ray.kill(actor)

    def _result(self, method: str, arguments: tuple[object, ...], group: str | None, timeout: float) -> Any:
        actor, cuts, began = self._actor, self._cuts, time.monotonic()
        if actor is None:
            raise CompanionLost(f"{self.host}: the process that is to {method} was ended")
        try:
            reply = actor.run.options(concurrency_group=group).remote(method, *arguments)
            next_log = began + LOG_EVERY_SECONDS
            while not ray.wait([reply], timeout=POLL_SECONDS)[0]:
                waited = time.monotonic() - began
                if group is None and self._cuts != cuts:
                    raise CompanionLost(f"{self.host}: {method} was cut off")
                if waited > timeout:
                    raise CompanionLost(f"{self.host}: {method} took longer than {timeout:g} s")
                if group is not None:
                    raise_if_interrupted(began, f"{self.host} did not answer")
                if group is not None and time.monotonic() > next_log:
                    logger.warning("%s: %s takes %.0f of at most %g s", self.host, method, waited, timeout)
                    next_log += LOG_EVERY_SECONDS
            return ray.get(reply)
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):  # an argument, which a rank stored
                raise RankLost(f"{self.host}: {LOST_DATA}") from None
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except RayError as error:
            what = f"{self.host}: the process that is to {method} died"
            if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == self._node):
                raise (RankLost if self._needs_node else NodeLost)(f"{what}, with its node") from error
            raise CompanionLost(what) from error


class _Actor:
    """Holds the object of a companion.

    Args:
        folder: working directory.
        make: makes the object.
    """

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        with suppress(OSError):  # a folder of another machine
            os.chdir(folder)
        self._object = make()

    def run(self, method: str, *arguments: object) -> Any:
        return getattr(self._object, method)(*arguments)
