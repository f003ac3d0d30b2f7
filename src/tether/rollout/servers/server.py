"""One inference server: started here, or by somebody else; what is asked of it beside samples."""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from tether.rollout.servers.claim import Claim
from tether.rollout.servers.dialect import Dialect, Draw, Launch, Sampled, TakesAdapters
from tether.rollout.servers.http import Connections, NoSuchHost, ServerFailed, ServerGone, ServerRefuses, ServerSilent
from tether.rollout.servers.transfer import Outgoing, Staging, buckets
from tether.runtime.interrupt import give_up_if_interrupted
from tether.runtime.program import start_program
from tether.runtime.supervised import SupervisedProcess

_log = logging.getLogger(__name__)
_PORTS = 4  # to try: between its choice and the server's start another program may take one
_SAYS_AFTER, _SAYS = 2.0, 60.0  # seconds to the first line about a server that does not answer, and between lines
_LOOKS = 2.0  # seconds between two looks at a server that takes weights
_ERROR = re.compile(r"(?:^|\s)((?:[\w.]*(?:Error|Exception)|error): \S.*)")
_A_WHILE = 86400.0  # seconds: a whole row may take long, and what hangs is noticed by its signs of life


@dataclass(eq=False)
class Server:
    """One server, and which weights it has."""

    speaks: Dialect
    where: Launch | str
    """Its settings, or the address of one that somebody else started."""
    timeout: float
    """Seconds in which it must have started, and must have taken weights."""
    patience: float = math.inf
    """Seconds in which it must sample at least one token; at most the timeout."""
    weights: str | None = None
    """Name of the weights that it has; None: not ours."""
    moved: int = 0
    """Bytes of weights that went to it so far."""
    http: Connections = field(init=False)
    _process: SupervisedProcess | None = field(default=None, init=False)
    _was_up: bool = field(default=False, init=False)
    is_new: bool = field(default=True, init=False)
    """It was given no weights since it started."""
    _claim: Claim | None = field(default=None, init=False)
    """Of one of somebody else."""
    _staging: Staging = field(default_factory=Staging, init=False)
    _log_begins: int = field(default=0, init=False)
    """Bytes in its log of those before it."""

    def __post_init__(self) -> None:
        self.patience = min(self.patience, self.timeout)
        self.http = Connections(self.where if isinstance(self.where, str) else "http://127.0.0.1:0")

    @property
    def _soon(self) -> float:
        """Seconds in which it must answer a question that costs it nothing."""
        return min(30.0, self.patience)

    @property
    def url(self) -> str:
        """Its address."""
        return self.http.url

    def begin(self) -> None:
        """Start it where it is ours and does not run; it is not ready yet."""
        if isinstance(self.where, Launch) and self._process is None:
            port, log = _free_port(), self.where.log
            self._log_begins = log.stat().st_size if log.exists() else 0
            self.http, self.weights, self._was_up = Connections(f"http://127.0.0.1:{port}"), None, False
            self.is_new = True
            self._process = start_program(self.where.command(port), log, self.where.environment)

    def ready(self) -> None:
        """Wait until it answers, and see that it is a server that can be used.

        Raises:
            ServerGone: it was up, and is not any more; or a signal ended it while it started.
            ValueError: it does not come up, is of another kind or version, or another run uses it.
        """
        self.begin()
        begun, title = time.monotonic(), self.speaks.title
        unusable = f"This is no {title} server that tether can use; {self.speaks.how}"
        ports, says = 1, begun + _SAYS_AFTER
        while (error := self._trouble("/health")) is not None:
            if isinstance(error, ServerRefuses | NoSuchHost):
                raise ValueError(f"{error}. {unusable}")
            if self._was_up:
                raise ServerGone(f"{self.url}: the server does not answer any more")
            if self._process is not None and self._process.has_ended():
                how = self._process.close()
                self._process = None
                if any("already in use" in line for line in self._end_of_log()) and ports < _PORTS:
                    _log.warning("%s: another program took the port; the server is started with another", self.url)
                    ports += 1
                    self.begin()
                    continue
                kind = ServerGone if how.startswith("was killed") else ValueError  # what kills may leave the next alone
                raise kind(f"the {title} server {how} while it started. {self._last_words()}")
            if time.monotonic() - begun > self.timeout:
                self.stop()
                key = f"actor_rollout_ref.rollout.server_timeout={self.timeout:g}"
                what = f"{self.url}: no {title} server answers within {key} seconds"
                raise ValueError(". ".join([what, *self._why_late(), self._last_words()]))
            if time.monotonic() > says:
                self._say_that_it_waits(time.monotonic() - begun, error)
                says += _SAYS
            give_up_if_interrupted(begun, f"the {title} server did not start")
            time.sleep(0.1)
        if not self._was_up:
            if isinstance(self.where, str) and self._claim is None:
                self._claim = Claim(self.http)
            try:
                self.speaks.look(self.http, self.timeout)
            except (ServerGone, ServerRefuses) as error:
                raise ValueError(f"{error}. {unusable}") from None
            except (TypeError, KeyError, IndexError, AttributeError) as error:  # of an answer of another layout
                what = f"an answer that is not {title}'s ({type(error).__name__}: {error})"
                raise ValueError(f"{self.url}: gave {what}. {unusable}") from error
        self._was_up = True

    def answers(self) -> bool:
        """Whether it says that it is well."""
        return self._answers("/health")

    def _answers(self, route: str) -> bool:
        return self._trouble(route) is None

    def _trouble(self, route: str) -> ServerGone | ServerRefuses | None:
        """The error of a request for a route, or None if it is answered."""
        try:
            self.http.get(route, within=self._soon)
        except (ServerGone, ServerRefuses) as error:
            return error
        return None

    def _say_that_it_waits(self, seconds: float, error: Exception) -> None:
        if isinstance(self.where, Launch):
            what = "%s starts (%.0f of at most %g seconds); it writes to %s"
            _log.warning(what, self.speaks.title, seconds, self.timeout, self.where.log)
        else:
            _log.warning("%s; the run waits up to %g seconds for the server", error, self.timeout)

    def sample(self, draw: Draw, vocabulary: int) -> Sampled:
        """A row, drawn with the present weights.

        Args:
            draw: what is asked for.
            vocabulary: tokens of the policy.

        Raises:
            ServerGone: no answer, half of one, one that does not answer the draw, or one by other weights.
            ServerRefuses: the request is refused.
        """
        sampled = self.speaks.sample(self.http, draw, _A_WHILE)
        try:
            sampled.check(draw, vocabulary)
        except ValueError as error:
            raise ServerGone(f"{self.url}: gave an answer that is none: {error}") from None
        if sampled.token_ids and sampled.weights != {self.weights}:
            others = ", ".join(sorted(sampled.weights))
            raise ServerGone(f"{self.url}: sampled with weights {others}, not the present ones")
        return sampled

    def interrupt(self) -> None:
        """Break off what it samples; `sample` then returns what there is.

        Raises:
            ServerGone: it does not answer.
            ValueError: it cannot.
        """
        try:
            self.speaks.interrupt(self.http, self._soon)
        except ServerRefuses as error:
            key = "actor_rollout_ref.rollout.partial_rollout=True"
            raise ValueError(f"{error}: the server breaks off no responses, as {key} asks for. Leave it out") from None

    def has(self, weights: str) -> bool:
        """Whether it still has these weights: a server that was started again has not."""
        if self.weights != weights:
            return False
        try:
            return self.speaks.weights(self.http, self._soon) == weights
        except (ServerGone, ServerRefuses):
            return False

    def has_some_of(self, run: str) -> bool:
        """Whether its weights came from this run, though they may be older ones."""
        try:
            return (self.speaks.weights(self.http, self._soon) or "").startswith(f"{run}-")
        except (ServerGone, ServerRefuses):
            return False

    def take(self, weights: str, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket: int) -> None:
        """Give it new weights, and let it forget what it computed with the old ones.

        Args:
            weights: name of the weights.
            tensors: as `WeightUpdate.tensors`.
            dtype: that it computes in.
            bucket: bytes that travel at a time.

        Raises:
            ServerGone: it died meanwhile.
            ValueError: it does not take them.
        """
        must = (
            "It must run the model of actor_rollout_ref.model.path, and see this machine's memory unless "
            f"actor_rollout_ref.rollout.weight_transfer=distributed; {self.speaks.how}"
        )
        outgoing = Outgoing(self._counted(tensors, dtype), dtype, bucket, self._staging)
        self._give(weights, lambda: self.speaks.give(self.http, weights, outgoing, self.timeout), must)

    def take_adapters(self, weights: str, adapters: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Like `take`, of adapters above the weights that it has; see `TakesAdapters.adapt`."""
        assert isinstance(self.speaks, TakesAdapters)
        speaks = self.speaks
        must = "It must take adapters of these layers; actor_rollout_ref.model.lora.merge=True sends layers instead"
        (part,) = buckets(self._counted(adapters.items(), dtype), dtype, sys.maxsize)
        self._give(weights, lambda: speaks.adapt(self.http, weights, part, self.timeout), must)

    def _counted(self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, value in tensors:
            self.moved += value.numel() * (dtype if value.is_floating_point() else value.dtype).itemsize
            yield name, value

    def _give(self, weights: str, give: Callable[[], None], must: str) -> None:
        self.weights, self.is_new = None, False
        try:
            with self._cut_when_dead():
                give()
                self.forget()
        except ServerRefuses as error:
            lacks = error.status in (404, 405)
            why = f"takes no weights: it has no such route; {self.speaks.how}" if lacks else f"refuses them. {must}"
            raise ValueError(f"{error}. The server {why}") from None
        except ServerGone as error:
            if not (isinstance(error, ServerFailed) and self.answers()):
                raise
            raise ValueError(f"{error}. The server did not take the weights. {must}") from None
        self.weights = weights

    @contextmanager
    def _cut_when_dead(self) -> Iterator[None]:
        """Break off what waits for it once it says that it is dead, or is gone: a vLLM server whose engine died answers
        none of the requests about weights that it has, and ends only when they do.
        """
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_LOOKS):
                try:
                    self.http.get(self.speaks.health_asleep, within=_LOOKS)
                except (ServerSilent, ServerRefuses):  # it may be busy
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

    def forget(self) -> None:
        """Empty its prefix cache.

        Raises:
            ServerGone: it does not, as requests still run.
        """
        self.speaks.forget(self.http, self.timeout)

    def sign_of_life(self, within: float) -> float | None:
        """See `Dialect.sign_of_life`; None too where it does not answer in time."""
        try:
            return self.speaks.sign_of_life(self.http, min(within, self._soon))
        except (ServerGone, ValueError):
            return None

    def sleep(self) -> None:
        """Have one of ours give its memory back.

        Raises:
            ServerGone: it does not answer.
            ValueError: it cannot.
        """
        if isinstance(self.where, Launch):
            try:
                self.speaks.sleep(self.http, self.timeout)
            except ServerRefuses as error:
                key = "actor_rollout_ref.rollout.free_cache_engine=True"
                raise ValueError(
                    f"{error}: the server gives no memory back, as {key} asks for. Set it to False"
                ) from None

    def wake(self) -> None:
        """The opposite of `sleep`; one that hangs is found in seconds, by a question that costs it nothing."""
        if isinstance(self.where, Launch) and self._answers(self.speaks.health_asleep):
            self.speaks.wake(self.http, self.timeout)

    def restart(self) -> None:
        """End it and start it again, where it is ours; else only break off what waits for it."""
        self.stop()
        self.begin()

    def stop(self) -> None:
        """End it where it is ours, and break off what waits for it; one of somebody else is let go."""
        self.http.cut()
        if self._claim is not None:
            self._claim.close()
            self._claim = None
        self.weights, self._was_up = None, False
        self._staging.close()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _why_late(self) -> list[str]:
        """Advice about a server that tether started and that still runs, for messages."""
        if isinstance(self.where, str):
            return []
        longer = "a larger actor_rollout_ref.rollout.server_timeout"
        if self.where.options.get(self.where.eager):
            return [f"Its process was still at work. Set {longer}"]
        why = "its first start compiles, which takes a busy CPU many minutes"
        return [f"Its process was still at work: {why}. Set actor_rollout_ref.rollout.enforce_eager=True, or {longer}"]

    def explained(self, error: Exception) -> str:
        """A failure, and of one of ours what its log says."""
        if isinstance(self.where, str):
            return str(error)
        return ". ".join([str(error), *self._first_error(), f"Its log: {self.where.log}"])

    def next_step(self) -> str:
        """For a log line about its failure: whether it is restarted, or what its owner should do."""
        if isinstance(self.where, Launch):
            return "The server is started again"
        if self.answers():
            return "It still answers, and gets the weights again. Start it again if this goes on"
        return "Start it again"

    def fault(self) -> str:
        """The first error in the log of one of ours, where it tells more than that a process was gone; else empty."""
        return next((error for error in self._first_error() if "EngineDeadError" not in error), "")

    def _first_error(self) -> list[str]:
        errors = (found[1] for line in self._log() if "WARNING" not in line and (found := _ERROR.search(line)))
        return [f"Its first error: {error[:600]}" for error in islice(errors, 1)]

    def _last_words(self) -> str:
        if isinstance(self.where, str):
            return "Start it, or take its address out of actor_rollout_ref.rollout.server_urls"
        first = self._first_error()
        return "\n".join([*first, f"{self.where.log} ends with:", *self._end_of_log()[-4 if first else -12 :]])

    def _end_of_log(self) -> list[str]:
        return [line[:300] for line in self._log() if line.strip()][-12:]

    def _log(self) -> list[str]:
        """The lines that one of ours has printed."""
        if isinstance(self.where, str) or not self.where.log.exists():
            return []
        with self.where.log.open(errors="replace") as file:
            file.seek(self._log_begins)
            return file.read().splitlines()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
