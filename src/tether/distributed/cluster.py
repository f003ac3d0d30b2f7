"""Connections to a Ray cluster, existing or local, and the reservation of its devices for the ranks of a run."""

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
os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, any other work on the machine starves ranks

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tether.distributed.worker import Process, this_process
from tether.runtime.ranks import Pool, RankFailed
from tether.runtime.threads import usable_cores
from tether.spelling import did_you_mean

logger = logging.getLogger(__name__)

POLL_SECONDS, LOG_AFTER_SECONDS = 1.0, 10.0
"""Seconds between two polls of a wait, and until it logs what it waits for or that this has changed."""
CONNECT_SECONDS, NODE_SECONDS = 10.0, 60.0
"""Timeouts of a connection to a cluster, and of starting a process that imports tether on its nodes."""
SETTINGS_FRAME = 4
"""Type of HTTP/2's SETTINGS frame."""
MAX_ATTEMPTS = 3
"""Attempts to start Ray, which can exceed its own timeout on a machine under load."""
OBJECT_STORE = 1 << 30  # bytes
LOCAL = "local"
KEY = "ray_kwargs.ray_init"
TOKEN = (
    "Started where there is a ~/.ray/auth_token, which a local Ray makes, it asks for that token: set "
    "RAY_AUTH_MODE=token here and for each ray start, or RAY_AUTH_MODE=disabled for all"
)


def address_of(nodes: int, options: Mapping[str, Any]) -> str:
    """Return the address of the cluster that a run uses.

    It is the `address` option, else RAY_ADDRESS; by default a run on one node starts a cluster of its own, and a run on
    several nodes uses the cluster that this machine is part of.
    """
    address: str = options.get("address") or os.environ.get("RAY_ADDRESS") or (LOCAL if nodes == 1 else "auto")
    return address


def is_local(nodes: int, options: Mapping[str, Any]) -> bool:
    """Return whether a run starts a cluster of its own on this machine."""
    return not ray.is_initialized() and address_of(nodes, options) == LOCAL


def connect(nodes: int, local_devices: int, device: str, options: Mapping[str, Any]) -> str:
    """Connect to a cluster or start one on this machine, and return this machine's address in it.

    If this process is already connected to a cluster, such as that of a sweep, that one is used unchanged.

    Args:
        nodes: number of machines that the run needs.
        local_devices: number of devices of a cluster that is started on this machine.
        device: ``cpu`` or ``cuda``.
        options: arguments of ``ray.init``.

    Raises:
        RankFailed: unknown option, or no cluster.
    """
    address = address_of(nodes, options)
    arguments = {name: value for name, value in options.items() if value is not None} | {"address": address}
    parameters = inspect.signature(ray.init).parameters
    for name in arguments:
        if name not in parameters and not name.startswith("_"):
            raise RankFailed(f"{KEY}.{name}: ray.init takes no {name}.{did_you_mean(name, parameters)}")
    if ray.is_initialized():
        for name, value in options.items():
            if value is not None and (name, value) != ("address", "auto"):
                raise RankFailed(
                    f"{KEY}.{name}={value}: this process is connected to Ray already, and the run "
                    f"uses that connection unchanged. Leave {KEY} out, or call ray.shutdown() before the run"
                )
        return str(ray.util.get_node_ip_address())
    _check_reachable(address, nodes)
    gc.collect()  # objects of an earlier session would free those of this one with equal ids: both count from 1
    defaults: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        cores = max(local_devices, usable_cores()) if device == "cpu" else None
        defaults |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE, "num_cpus": cores}
    for attempt in range(MAX_ATTEMPTS):
        try:
            with _preserving_signals():
                ray.init(**defaults | arguments)
        except Exception as error:  # Ray raises many kinds
            ray.shutdown()
            if address != LOCAL:
                needs_token = isinstance(error, ConnectionError) and "RAY_AUTH_MODE" not in os.environ
                raise _no_cluster(address, nodes, f"{error}. {TOKEN}" if needs_token else error) from error
            if attempt == MAX_ATTEMPTS - 1:
                why = f"{type(error).__name__}: {error}"
                raise RankFailed(f"Ray does not start on this machine ({why}); its options are {KEY}") from error
        else:
            break
    return "127.0.0.1" if address == LOCAL else str(ray.util.get_node_ip_address())


def _check_reachable(address: str, nodes: int) -> None:
    """Check that Ray listens at HOST:PORT, or at the address of this machine's last cluster.

    Ray itself would wait for minutes.
    """
    if address == "auto":
        with suppress(OSError):
            address = (Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray/ray_current_cluster").read_text().strip()
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        try:
            with socket.create_connection((host, int(port)), CONNECT_SECONDS) as connection:
                is_ray = "RAY_USE_TLS" in os.environ or _is_http2(connection)
        except OSError as error:
            raise _no_cluster(address, nodes, error) from error
        if not is_ray:
            raise _no_cluster(address, nodes, "another program listens there; give Ray a port with --port=...")


def _is_http2(connection: socket.socket) -> bool:
    """Return whether a server replies to the preface of HTTP/2 with a SETTINGS frame, as gRPC does (RFC 9113, 3.4)."""
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, SETTINGS_FRAME, 0, 0, 0, 0, 0]))
        header = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == 9 and header[3] == SETTINGS_FRAME


def _no_cluster(address: str, nodes: int, error: Exception | str) -> RankFailed:
    fix = "Start it: ray start --head on one machine, ray start --address=HOST:6379 on the others"
    if nodes == 1 and os.environ.get("RAY_ADDRESS") == address:
        fix = f"RAY_ADDRESS={address} names it: unset that, and the run starts Ray by itself. {fix}"
    return RankFailed(f"trainer.nnodes={nodes}: no Ray cluster to join at {address} ({error}). {fix}")


def reserve(pool: Pool, device: str, timeout: float) -> PlacementGroup:
    """Reserve the devices of a pool with one bundle per node.

    Raises:
        RankFailed: not available before the timeout; names what is missing.
    """
    share = {"CPU": pool.per_node} | ({"GPU": pool.per_node} if device == "cuda" else {})
    group = placement_group([share] * pool.nodes, strategy="STRICT_SPREAD" if pool.nodes > 1 else "STRICT_PACK")
    ready, began, logged, log_after = group.ready(), time.monotonic(), "", LOG_AFTER_SECONDS
    while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
        waited = time.monotonic() - began
        if waited > timeout:
            missing = _missing(pool, next(reversed(share)))
            remove_placement_group(group)
            raise RankFailed(f"{missing}; waited {timeout:g} s. Ask for fewer, or start more")
        if waited > log_after and (missing := _missing(pool, next(reversed(share)))) != logged:
            logged, log_after = missing, waited + LOG_AFTER_SECONDS
            logger.warning("waiting up to %g s: %s", timeout, missing)
    return group


def _missing(pool: Pool, resource: str) -> str:
    """Return a message with the requested resources and those of the cluster's nodes."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    available = [(node["NodeManagerHostname"], int(node["Resources"].get(resource, 0))) for node in alive]
    best = sorted((min(count, pool.per_node) for _, count in available), reverse=True)[: pool.nodes]
    shortage = pool.size - sum(best)
    shown = ", ".join(f"{name}: {count}" for name, count in available)
    why = (
        f"{shortage} {resource}s are missing"
        if shortage
        else f"{ray.available_resources().get(resource, 0):g} {resource}s are free, the others are in use or on a node "
        "that failed within the last minute"
    )
    requested = f"{pool.section}.nnodes={pool.nodes} with {pool.section}.n_gpus_per_node={pool.per_node} each"
    return f"{requested}: {why}; {resource}s of the {len(available)} nodes of the cluster: {shown}"


def nodes_of(address: str, timeout: float = NODE_SECONDS) -> list[str]:
    """Return a line for each node of a cluster: its devices, and the versions that differ from this machine's.

    Raises:
        RankFailed: no cluster at this address.
    """
    connect(2, 0, "cpu", {"address": address})
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        remote = ray.remote(this_process)
        replies = [remote.options(num_cpus=0, scheduling_strategy=strategy).remote() for strategy in strategies]
        ray.wait(replies, num_returns=len(replies), timeout=timeout)
        lines = []
        for node, reply in zip(nodes, replies, strict=True):
            devices = ", ".join(f"{int(node['Resources'].get(kind, 0))} {kind}s" for kind in ("GPU", "CPU"))
            versions = _versions_of(reply, timeout)
            lines.append(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}): {devices}; {versions}")
        return lines
    finally:
        ray.shutdown()


def _versions_of(reply: Any, timeout: float) -> str:
    """Return the comparison of a node's versions with those of this machine."""
    try:
        theirs = ray.get(reply, timeout=0).versions
    except GetTimeoutError:
        return f"no answer within {timeout:g} seconds; all its CPUs may be busy, so ask again"
    except RayError as error:
        return f"does not answer ({type(error).__name__}); is tether installed there?"
    mine = this_process().versions
    other = [f"{name} {theirs[name]} (here {version})" for name, version in mine.items() if theirs[name] != version]
    return f"REFUSED, other versions: {', '.join(other)}" if other else "versions as here"


def check_versions(mine: Process, theirs: Sequence[Process]) -> None:
    """Check that the nodes of a run have the versions of this one.

    Raises:
        RankFailed: names each node with a different version.
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
def _preserving_signals() -> Iterator[None]:
    """Restore what Ray replaces for good: the handler of SIGTERM, and `breakpoint`."""
    sigterm, debugger = signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONBREAKPOINT")
    yield
    if signal.getsignal(signal.SIGTERM) is not sigterm:
        signal.signal(signal.SIGTERM, sigterm)
    if debugger is None:
        os.environ.pop("PYTHONBREAKPOINT", None)
