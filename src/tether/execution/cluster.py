"""A Ray cluster: one that exists already, or a local one; room in it for the ranks of a run."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves ranks beside any other work on their machine

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tether.execution.worker import Process, this_process
from tether.runtime.ranks import Pool, RankFailed
from tether.runtime.threads import usable_cores
from tether.spelling import did_you_mean

logger = logging.getLogger(__name__)

LOOK_SECONDS, SAY_SECONDS = 1.0, 10.0
"""Seconds between two looks of a wait, and until it says what it waits for."""
REACH_SECONDS, ANSWER_SECONDS = 10.0, 60.0
"""Seconds in which a cluster takes a connection, and in which its nodes start a process that has imported tether."""
SETTINGS = 4
"""The type of a frame of HTTP/2."""
STARTS = 3
"""A machine under load may start Ray too slowly for Ray's own patience."""
OBJECT_STORE = 1 << 30  # bytes
LOCAL = "local"
KEY = "ray_kwargs.ray_init"
TOKEN = (
    "Started where there is a ~/.ray/auth_token, which a local Ray makes, it asks for that token: set "
    "RAY_AUTH_MODE=token here and for each ray start, or RAY_AUTH_MODE=disabled for all"
)


def address_of(nodes: int, options: Mapping[str, Any]) -> str:
    """The cluster that a run uses: the one that is named, by an option or by RAY_ADDRESS; else one of its own, or for
    several nodes the one that runs on this machine.
    """
    found: str = options.get("address") or os.environ.get("RAY_ADDRESS") or (LOCAL if nodes == 1 else "auto")
    return found


def is_local(nodes: int, options: Mapping[str, Any]) -> bool:
    """Whether a run starts a cluster of its own, on this machine."""
    return not ray.is_initialized() and address_of(nodes, options) == LOCAL


def connect(nodes: int, here: int, device: str, options: Mapping[str, Any]) -> str:
    """Connect to a cluster, or start one on this machine; returns this machine's address in it.

    The cluster that this process is connected to already, such as that of a sweep, is used as it is.

    Args:
        nodes: machines that a run needs.
        here: its devices on this one, if that is all there is.
        device: ``cpu`` or ``cuda``.
        options: of ``ray.init``.

    Raises:
        RankFailed: an option that there is not, or no cluster.
    """
    address = address_of(nodes, options)
    given = {name: value for name, value in options.items() if value is not None} | {"address": address}
    known = inspect.signature(ray.init).parameters
    for name in given:
        if name not in known and not name.startswith("_"):
            raise RankFailed(f"{KEY}.{name}: ray.init takes no {name}.{did_you_mean(name, known)}")
    if ray.is_initialized():
        for name, value in options.items():
            if value is not None and (name, value) != ("address", "auto"):
                raise RankFailed(
                    f"{KEY}.{name}={value}: this process is connected to Ray already, and the run uses that as it is. "
                    f"Leave {KEY} out, or call ray.shutdown() before the run"
                )
        return str(ray.util.get_node_ip_address())
    _reach(address, nodes)
    gc.collect()  # what an earlier session left would free its namesakes in this one: both number from 1
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        cores = max(here, usable_cores()) if device == "cpu" else None
        quiet |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "num_cpus": cores}
    for attempt in range(STARTS):
        try:
            with _signals_kept():
                ray.init(**quiet | given)
        except Exception as error:  # Ray raises many kinds
            ray.shutdown()
            if address != LOCAL:
                asks = isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ
                raise _no_cluster(address, nodes, f"{error}. {TOKEN}" if asks else error) from error
            if attempt == STARTS - 1:
                why = f"{type(error).__name__}: {error}"
                raise RankFailed(f"Ray does not start on this machine ({why}); its options are {KEY}") from error
        else:
            break
    return "127.0.0.1" if address == LOCAL else str(ray.util.get_node_ip_address())


def _reach(address: str, nodes: int) -> None:
    """Whether Ray listens at HOST:PORT, or where the last cluster of this machine did: Ray itself would wait there for
    minutes.
    """
    if address == "auto":
        with suppress(OSError):
            address = (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/ray_current_cluster").read_text().strip()
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        try:
            with socket.create_connection((host, int(port)), REACH_SECONDS) as there:
                known = "RAY_USE_TLS" in os.environ or _speaks_http2(there)
        except OSError as error:
            raise _no_cluster(address, nodes, error) from error
        if not known:
            raise _no_cluster(address, nodes, "another program listens there; give Ray a port with --port=...")


def _speaks_http2(there: socket.socket) -> bool:
    """Whether a server answers as gRPC's do: the preface of HTTP/2 (RFC 9113, 3.4) by a frame of settings."""
    try:
        there.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]))
        head = there.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(head) == 9 and head[3] == SETTINGS


def _no_cluster(address: str, nodes: int, error: Exception | str) -> RankFailed:
    fix = "Start it: ray start --head on one machine, ray start --address=HOST:6379 on the others"
    if nodes == 1 and os.environ.get("RAY_ADDRESS") == address:
        fix = f"RAY_ADDRESS={address} names it: unset that, and the run starts Ray by itself. {fix}"
    return RankFailed(f"trainer.nnodes={nodes}: no Ray cluster to join at {address} ({error}). {fix}")


def room(pool: Pool, device: str, seconds: float) -> PlacementGroup:
    """Reserve devices of a run: a bundle for each node, no two of them on the same.

    Raises:
        RankFailed: they are not there within so many seconds; says what is missing.
    """
    share = {"CPU": pool.per_node} | ({"GPU": pool.per_node} if device == "cuda" else {})
    group = placement_group([share] * pool.nodes, strategy="STRICT_SPREAD" if pool.nodes > 1 else "STRICT_PACK")
    ready, began, said = group.ready(), time.monotonic(), False
    while not ray.wait([ready], timeout=LOOK_SECONDS)[0]:
        waited = time.monotonic() - began
        if waited > seconds:
            missing = _missing(pool, next(reversed(share)))
            remove_placement_group(group)
            raise RankFailed(f"{missing}; waited {seconds:g} s. Ask for fewer, or start more")
        if waited > SAY_SECONDS and not said:
            said = True
            logger.warning("waiting up to %g s: %s", seconds, _missing(pool, next(reversed(share))))
    return group


def _missing(pool: Pool, kind: str) -> str:
    """Resources that a run asks for, and those of the cluster's nodes."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    have = [(node["NodeManagerHostname"], int(node["Resources"].get(kind, 0))) for node in alive]
    best = sorted((min(count, pool.per_node) for _, count in have), reverse=True)[: pool.nodes]
    lack = pool.size - sum(best)
    shown = ", ".join(f"{name}: {count}" for name, count in have)
    why = f"{lack} {kind}s are missing" if lack else f"others use them: {ray.available_resources().get(kind, 0):g} free"
    asked = f"{pool.section}.nnodes={pool.nodes} with {pool.section}.n_gpus_per_node={pool.per_node} each"
    return f"{asked}: {why}; {kind}s of the {len(have)} nodes of the cluster: {shown}"


def nodes_of(address: str, seconds: float = ANSWER_SECONDS) -> list[str]:
    """A line for each node of a cluster: its devices, and the versions there that differ from those here.

    Raises:
        RankFailed: there is no such cluster.
    """
    connect(2, 0, "cpu", {"address": address})
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        ask = ray.remote(this_process)
        asked = [ask.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
        ray.wait(asked, num_returns=len(asked), timeout=seconds)
        lines = []
        for node, answer in zip(nodes, asked, strict=True):
            has = ", ".join(f"{int(node['Resources'].get(kind, 0))} {kind}s" for kind in ("GPU", "CPU"))
            said = _versions_of(answer, seconds)
            lines.append(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}): {has}; {said}")
        return lines
    finally:
        ray.shutdown()


def _versions_of(answer: Any, seconds: float) -> str:
    """The versions on a node, which had as many seconds to answer, beside those here."""
    try:
        theirs = ray.get(answer, timeout=0).versions
    except GetTimeoutError:
        return f"no answer within {seconds:g} seconds; all its CPUs may be busy, so ask again"
    except RayError as error:
        return f"does not answer ({type(error).__name__}); is tether installed there?"
    mine = this_process().versions
    other = [f"{name} {theirs[name]} (here {version})" for name, version in mine.items() if theirs[name] != version]
    return f"REFUSED, other versions: {', '.join(other)}" if other else "versions as here"


def check_versions(mine: Process, theirs: Sequence[Process]) -> None:
    """Compare the nodes of a run with this one.

    Raises:
        RankFailed: names each node with another version.
    """
    wrong = {
        f"{process.host} has {name} {process.versions[name]}, {mine.host} has {version}": None
        for process in theirs
        for name, version in mine.versions.items()
        if process.versions[name] != version
    }
    if wrong:
        raise RankFailed(f"nodes with other versions: {'; '.join(wrong)}. Install the same on all of them")


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM and `breakpoint` over for good."""
    term, debugger = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONBREAKPOINT")
    yield
    if signal.getsignal(signal.SIGTERM) is not term:
        signal.signal(signal.SIGTERM, term)
    if debugger is None:
        os.environ.pop("PYTHONBREAKPOINT", None)
