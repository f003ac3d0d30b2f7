"""One inference server, started by tether or external, with its weights and its state."""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from tether.runtime.interrupt import raise_if_interrupted
from tether.runtime.program import start_program
from tether.runtime.supervised import SupervisedProcess
from tether.text.servers.api import GenerateRequest, Launch, SampledRow, ServerApi, SupportsLora
from tether.text.servers.checkpoint_names import checkpoint_weights, without_adapters
from tether.text.servers.claim import Claim
from tether.text.servers.http import Connections, NoSuchHost, ServerFailed, ServerGone, ServerRefuses, ServerSilent
from tether.text.servers.protocol import NamedUpdate, SamplingServer
from tether.text.servers.transfer import Staging, WeightPayload, buckets

_log = logging.getLogger(__name__)
MAX_PORTS = 4  # another program may bind a port after it was chosen
# Seconds until the first warning about a server that does not respond, and between warnings.
FIRST_LOG_SECONDS, LOG_EVERY_SECONDS = 2.0, 60.0
POLL_SECONDS = 2.0  # between two checks of a server that loads weights
_ERROR = re.compile(r"(?:^|\s)((?:[\w.]*(?:Error|Exception)|error): \S.*)")
GENERATE_TIMEOUT = 86400.0  # seconds: a row may take long, and hanging servers are detected by their progress


@dataclass(eq=False)
class InferenceServer(SamplingServer):
    """One server, with the name of its weights."""

    api: ServerApi
    launch_or_url: Launch | str
    """Settings for launching it, or the address of an external server."""
    timeout: float
    """Seconds for its start, and for loading weights."""
    token_timeout: float = math.inf
    weights: str | None = None
    """Name of its weights; None: not weights of this run."""
    bytes_sent: int = 0
    node: str = ""
    """Name of its node, for messages; empty: this machine."""
    http: Connections = field(init=False)
    _process: SupervisedProcess | None = field(default=None, init=False)
    _was_ready: bool = field(default=False, init=False)
    is_new: bool = field(default=True, init=False)
    """Whether it has received no weights since it started."""
    _claim: Claim | None = field(default=None, init=False)
    """The claim of an external server."""
    _staging: Staging = field(default_factory=Staging, init=False)
    _log_offset: int = field(default=0, init=False)
    """Size of its log file before it started."""

    def __post_init__(self) -> None:
        self.token_timeout = min(self.token_timeout, self.timeout)
        self.http = Connections(self.launch_or_url if isinstance(self.launch_or_url, str) else "http://127.0.0.1:0")

    @property
    def _quick_timeout(self) -> float:
        """Timeout in seconds of a cheap request."""
        return min(30.0, self.token_timeout)

    @property
    def url(self) -> str:
        return self.http.url

    def start(self) -> None:
        if isinstance(self.launch_or_url, Launch) and self._process is None:
            port, log = _free_port(), self.launch_or_url.log
            self._log_offset = log.stat().st_size if log.exists() else 0
            self.http = Connections(f"http://127.0.0.1:{port}", self.node)
            self.weights, self._was_ready, self.is_new = None, False, True
            where = self.launch_or_url
            self._process = start_program(where.command(port), log, where.environment, where.socket_folder)

    def wait_ready(self) -> None:
        self.start()
        started, title = time.monotonic(), self.api.title
        unusable = f"This is not a {title} server that tether can use. {self.api.how}"
        ports, next_log = 1, started + FIRST_LOG_SECONDS
        while (error := self._request_error("/health")) is not None:
            if isinstance(error, ServerRefuses | NoSuchHost):
                raise ValueError(f"{error}. {unusable}")
            if self._was_ready:
                raise ServerGone(f"{self.url}: the server no longer responds")
            if self._process is not None and self._process.has_ended():
                how = self._process.close()
                self._process = None
                if any("already in use" in line for line in self._end_of_log()) and ports < MAX_PORTS:
                    _log.warning("%s: another program took the port; the server is started with another", self.url)
                    ports += 1
                    self.start()
                    continue
                # A server that was killed may start at the next attempt.
                kind = ServerGone if how.startswith("was killed") else ValueError
                where = f" on {self.node}" if self.node else ""
                raise kind(f"the {title} server{where} {how} while it started. {self._log_summary()}")
            if time.monotonic() - started > self.timeout:
                self.stop()
                key = f"actor_rollout_ref.rollout.server_timeout={self.timeout:g}"
                what = f"{self.url}: no {title} server answers within {key} seconds"
                raise ValueError(". ".join([what, *self._why_late(), self._log_summary()]))
            if time.monotonic() > next_log:
                self._log_waiting(time.monotonic() - started, error)
                next_log += LOG_EVERY_SECONDS
            raise_if_interrupted(started, f"the {title} server did not start")
            time.sleep(0.1)
        if not self._was_ready:
            if isinstance(self.launch_or_url, str) and self._claim is None:
                self._claim = Claim(self.http)
            try:
                self.api.check(self.http, self.timeout)
            except (ServerGone, ServerRefuses) as error:
                raise ValueError(f"{error}. {unusable}") from None
            except (TypeError, KeyError, IndexError, AttributeError) as error:  # an unexpected response
                what = f"a response that is not {title}'s ({type(error).__name__}: {error})"
                raise ValueError(f"{self.url}: returned {what}. {unusable}") from error
        self._was_ready = True

    def is_healthy(self) -> bool:
        return self._responds("/health")

    def _responds(self, route: str) -> bool:
        return self._request_error(route) is None

    def _request_error(self, route: str) -> ServerGone | ServerRefuses | None:
        """Return the error of a GET request, or None if it succeeds."""
        try:
            self.http.get(route, timeout=self._quick_timeout)
        except (ServerGone, ServerRefuses) as error:
            return error
        return None

    def _log_waiting(self, seconds: float, error: Exception) -> None:
        if isinstance(self.launch_or_url, Launch):
            what = "%s starts (%.0f of at most %g seconds); it writes to %s"
            _log.warning(what, self.api.title, seconds, self.timeout, self.launch_or_url.log)
        else:
            _log.warning("%s; the run waits up to %g seconds for the server", error, self.timeout)

    def generate(self, request: GenerateRequest, vocabulary: int) -> SampledRow:
        sampled = self.api.generate(self.http, request, GENERATE_TIMEOUT)
        try:
            sampled.check(request, vocabulary)
        except ValueError as error:
            raise ServerGone(f"{self.url}: returned an invalid row: {error}") from None
        if sampled.token_ids and sampled.weight_names != {self.weights}:
            others = ", ".join(sorted(sampled.weight_names))
            raise ServerGone(f"{self.url}: sampled with weights {others}, not the current ones")
        return sampled

    def abort(self) -> None:
        try:
            self.api.abort(self.http, self._quick_timeout)
        except ServerRefuses as error:
            key = "actor_rollout_ref.rollout.partial_rollout=True"
            raise ValueError(
                f"{error}: the server cannot abort requests, which {key} requires. Remove that setting"
            ) from None

    def cut(self) -> None:
        self.http.cut()

    def run(self, action: Callable[[Connections, float], None]) -> None:
        action(self.http, self.timeout)

    def has_weights(self, weights: str) -> bool:
        if self.weights != weights:
            return False
        try:
            return self.api.weights_name(self.http, self._quick_timeout) == weights
        except (ServerGone, ServerRefuses):
            return False

    @classmethod
    def load(cls, servers: Sequence[Self], update: NamedUpdate) -> dict[Self, ServerGone]:
        failures = dict[Self, ServerGone]()
        for server in servers:
            try:
                server.load_update(update)
            except ServerGone as error:
                # Copied without its traceback, whose frames would keep the group and the buffer of this update alive.
                failures[server] = type(error)(*error.args)
        return failures

    def load_update(self, update: NamedUpdate) -> None:
        """Load new weights into this server.

        Raises:
            ServerGone: it died during the update.
            ValueError: it refuses them.
        """
        traffic = update.traffic
        tensors = ((name, value) for name, value in update.tensors if name not in traffic.skipped)
        if not traffic.adapters:
            layers = checkpoint_weights(tensors, traffic.lora_scale)
            self.load_weights(update.name, layers, traffic.dtype, traffic.bucket)
            return
        adapters: dict[str, Tensor] = {}
        layers = without_adapters(tensors, adapters)
        has_layers = traffic.has_base_layers and self.is_new
        if has_layers or self.has_weights_of(update.run):  # the layers are those of this run, which do not change
            for _ in layers:
                pass
        else:
            self.load_weights(f"{update.run}-base", layers, traffic.dtype, traffic.bucket)
        self.load_adapters(update.name, adapters, traffic.dtype)

    def has_weights_of(self, run: str) -> bool:
        """Return whether its weights are from this run, possibly older ones."""
        try:
            return (self.api.weights_name(self.http, self._quick_timeout) or "").startswith(f"{run}-")
        except (ServerGone, ServerRefuses):
            return False

    def load_weights(
        self, weights: str, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket: int
    ) -> None:
        """Load new weights, and reset the prefix cache of the old ones.

        Args:
            weights: name of the weights.
            tensors: names and values, as in `WeightUpdate.tensors`.
            dtype: the dtype that it computes in.
            bucket: bytes that are sent at a time.

        Raises:
            ServerGone: it died during the update.
            ValueError: it refuses them.
        """
        must = (
            "It must run the model of actor_rollout_ref.model.path, and see this machine's memory unless "
            f"actor_rollout_ref.rollout.weight_transfer=distributed. {self.api.how}"
        )
        payload = WeightPayload(self._counted(tensors, dtype), dtype, bucket, self._staging)
        self._send(weights, lambda: self.api.load_weights(self.http, weights, payload, self.timeout), must)

    def load_adapters(self, weights: str, adapters: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Load adapters on top of the weights that it has, as `SupportsLora.load_adapters` describes."""
        assert isinstance(self.api, SupportsLora)
        api = self.api
        must = "It must support adapters of these layers; actor_rollout_ref.model.lora.merge=True sends layers instead"
        (tensors,) = buckets(self._counted(adapters.items(), dtype), dtype, sys.maxsize)
        self._send(weights, lambda: api.load_adapters(self.http, weights, tensors, self.timeout), must)

    def _counted(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            self.bytes_sent += value.numel() * (dtype if value.is_floating_point() else value.dtype).itemsize
            yield name, value

    def _send(self, weights: str, send: Callable[[], None], must: str) -> None:
        self.weights, self.is_new = None, False
        try:
            with self._cut_when_dead():
                send()
                self.reset_prefix_cache()
        except ServerRefuses as error:
            has_no_route = error.status in (404, 405)
            why = (
                f"supports no weight updates: it has no such route. {self.api.how}"
                if has_no_route
                else f"refuses them. {must}"
            )
            raise ValueError(f"{error}. The server {why}") from None
        except ServerGone as error:
            if not (isinstance(error, ServerFailed) and self.is_healthy()):
                raise
            raise ValueError(f"{error}. The server did not load the weights. {must}") from None
        self.weights = weights

    @contextmanager
    def _cut_when_dead(self) -> Iterator[None]:
        """Cut pending requests once the server is gone or reports that it is dead.

        A vLLM server whose engine died does not respond to requests about weights, and exits only after they end.
        """
        done = threading.Event()

        def watch() -> None:
            while not done.wait(POLL_SECONDS):
                try:
                    self.http.get(self.api.health_asleep, timeout=POLL_SECONDS)
                except (ServerSilent, ServerRefuses):  # the server may be busy
                    pass
                except ServerGone:
                    if not done.is_set():
                        self.http.cut()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            ServerGone: requests are still running.
        """
        self.api.reset_prefix_cache(self.http, self.timeout)

    def progress_counter(self, timeout: float) -> float | None:
        try:
            return self.api.progress_counter(self.http, min(timeout, self._quick_timeout))
        except (ServerGone, ValueError):
            return None

    def sleep(self) -> None:
        if isinstance(self.launch_or_url, Launch):
            try:
                self.api.sleep(self.http, self.timeout)
            except ServerRefuses as error:
                key = "actor_rollout_ref.rollout.free_cache_engine=True"
                raise ValueError(
                    f"{error}: the server cannot release memory, which {key} requires. Set it to False"
                ) from None

    def wake(self) -> None:
        if isinstance(self.launch_or_url, Launch) and self._responds(self.api.health_asleep):
            self.api.wake(self.http, self.timeout)

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self.http.cut()
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        self.weights, self._was_ready = None, False
        self._staging.close()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _why_late(self) -> list[str]:
        """Return advice for messages about a launched server that is still starting."""
        if isinstance(self.launch_or_url, str):
            return []
        longer = "a larger actor_rollout_ref.rollout.server_timeout"
        if self.launch_or_url.options.get(self.launch_or_url.eager):
            return [f"Its process was still at work. Set {longer}"]
        why = "its first start compiles, which takes a busy CPU many minutes"
        return [f"Its process was still at work: {why}. Set actor_rollout_ref.rollout.enforce_eager=True, or {longer}"]

    def explained(self, error: Exception) -> str:
        if isinstance(self.launch_or_url, str):
            return str(error)
        return ". ".join([str(error), *self._first_error(), f"Its log: {self.launch_or_url.log}"])

    def next_step(self) -> str:
        if isinstance(self.launch_or_url, Launch):
            return "The server is restarted"
        if self.is_healthy():
            return "It still responds, and its weights are loaded again. Restart it if this continues"
        return "Restart it"

    def fault(self) -> str:
        return next((error for error in self._first_error() if "EngineDeadError" not in error), "")

    def _first_error(self) -> list[str]:
        errors = (match[1] for line in self._log() if "WARNING" not in line and (match := _ERROR.search(line)))
        return [f"Its first error: {error[:600]}" for error in islice(errors, 1)]

    def _log_summary(self) -> str:
        if isinstance(self.launch_or_url, str):
            return "Start it, or remove its address from actor_rollout_ref.rollout.server_urls"
        first = self._first_error()
        return "\n".join([*first, f"{self.launch_or_url.log} ends with:", *self._end_of_log()[-4 if first else -12 :]])

    def _end_of_log(self) -> list[str]:
        return [line[:300] for line in self._log() if line.strip()][-12:]

    def _log(self) -> list[str]:
        if isinstance(self.launch_or_url, str) or not self.launch_or_url.log.exists():
            return []
        with self.launch_or_url.log.open(errors="replace") as file:
            file.seek(self._log_offset)
            return file.read().splitlines()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
