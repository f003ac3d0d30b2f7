"""The engine of `vllm` and `sglang`: servers sample rows and receive the policy's weights after each update.

A row is one request, or one for each of its turns, with a seed that is a function of (seed, step, sample, turn): it
does not depend on the server, the other rows or retries, as far as the server respects seeds. A server that dies or
hangs is restarted with the current weights, and its unfinished rows are requested again with the same seeds::

    rows ──► server 0 ──► results, each checked: complete, and sampled with the current weights
         ──► server 1 ──x dead: restart, load weights, request its unfinished rows again
         ──► server 2 ──x its machine is lost: request its unfinished rows from the others
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from tether.batch import KeptTokens, RolloutBatch, TokenIds, WeightUpdate, as_token_ids
from tether.keyed_random import seed_of
from tether.runtime.interrupt import raise_if_interrupted
from tether.runtime.ranks import RankLost
from tether.text.models.truncation_record import KeptRecorder
from tether.text.sampling.protocol import (
    FinishedResponse,
    NoiseKey,
    Responder,
    RolloutProgress,
    SamplingParams,
    check_prompts,
)
from tether.text.servers.api import GenerateRequest, SampledRow
from tether.text.servers.conversation import Conversation
from tether.text.servers.http import ConnectionLost, Connections, MachineLost, ServerGone
from tether.text.servers.protocol import NamedUpdate, SamplingServer, Traffic
from tether.text.servers.status import ServersStatus

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 4  # consecutive ones without progress, before the run ends; two if the server reports the same reason
LOG_EVERY_SECONDS = 60.0  # between two warnings about a server without progress
POLL_SECONDS = 2.0  # between two checks of a server that finishes no row
MIN_WAIT_SECONDS = 1.0  # minimum timeout of such a check
ABORT_EVERY_SECONDS = 0.05  # between two attempts to abort requests
POSITIONS_AT_ONCE = 64  # positions of a row whose kept tokens are expanded to the vocabulary together


class ServersFailed(RuntimeError):
    """Servers died or returned wrong results repeatedly; the run ends, and can resume from its last checkpoint."""


class ServedEngine:
    """A `RolloutEngine` that samples with servers of one kind.

    Args:
        servers: at least one; rows are assigned round-robin.
        export: returns the current weights, for a server that has to be restarted.
        eos_token_ids: tokens that end a response.
        vocabulary: number of tokens.
        context: maximum number of tokens of prompt and response.
        traffic: sizes and dtypes of the data that is sent.
        status: file for the state of the servers; None writes none.
    """

    def __init__(
        self,
        servers: Sequence[SamplingServer],
        export: Callable[[], WeightUpdate],
        *,
        eos_token_ids: frozenset[int],
        vocabulary: int,
        context: int | None,
        traffic: Traffic,
        status: Path | None = None,
    ) -> None:
        self.servers, self._export, self._traffic = servers, export, traffic
        self.api, self._status = servers[0].api, ServersStatus(status)
        self.options = self.api.options
        self.eos_token_ids, self.context = eos_token_ids, context
        self._vocabulary = vocabulary
        self._run = ""  # set with the first weights, so that weights of another run are not mistaken for this run's
        self._version = 0
        self._pushes = 0
        self._name: str | None = None
        self._asleep = False
        self._loaded: WeightUpdate | None = None
        self._newer: WeightUpdate | None = None  # weights that arrived while rows were sampled
        self._is_sampling = False
        self._recoveries = 0
        self._reported = (0, 0)

    def load_weights(self, weights: WeightUpdate) -> None:
        """Load weights as `RolloutEngine.load_weights` does; running requests are aborted and continue with the new
        weights."""
        if self._is_sampling:
            self._newer = weights
        else:
            self._load(weights)

    def _load(self, weights: WeightUpdate) -> None:
        """Load weights into the servers, none of which is sampling."""
        self._newer = None
        self._version = weights.version
        self._loaded = weights if self._traffic.restores_last_weights else None
        self._run = self._run or uuid.uuid4().hex[:8]
        self._pushes += 1
        self._name = f"{self._run}-{self._pushes}"
        self._wake()
        self._status.report(self.servers, "getting ready")
        for server in self.servers:
            server.start()  # all start in parallel
        failures = dict[SamplingServer, ServerGone]()
        for server in self.servers:
            try:
                server.wait_ready()
            except ServerGone as error:
                failures[server] = error
        failures |= self._send([server for server in self.servers if server not in failures], weights)
        for server, failure in failures.items():
            self._recover(server, failure, restart=_is_down(server, failure))

    def recovery_actions(self) -> dict[str, Callable[[], None]]:
        """Return the possibly stale state of a server, with the actions that renew it."""
        actions = {cause: partial(self._on_all, action) for cause, action in self.api.recovery_actions().items()}
        return {**actions, "older weights": self._load_all}

    def _load_all(self) -> None:
        self._run = ""  # as if nothing had been sent
        self._load(self._export())

    def transfer_metrics(self) -> dict[str, float]:
        """Return the bytes of weights sent to the servers and the failures of servers since the last call, as
        metrics."""
        before, self._reported = self._reported, (sum(server.bytes_sent for server in self.servers), self._recoveries)
        names = ("transfer/weights_bytes", "transfer/server_failures")
        return {name: float(now - then) for name, now, then in zip(names, self._reported, before, strict=True)}

    def _on_all(self, action: Callable[[Connections, float], None]) -> None:
        for server in self.servers:
            server.run(action)

    def close(self) -> None:
        """Stop the servers that tether started."""
        for server in self.servers:
            server.stop()
        if self._pushes:  # otherwise no server was started
            self._status.report(self.servers, "stopped")

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        responder: Responder | None = None,
    ) -> RolloutBatch:
        """Generate as `RolloutEngine.generate` describes. A row continues as soon as its reply is available.

        Raises:
            ValueError: the prompts are invalid, or a server cannot be used.
            ServersFailed: servers failed repeatedly.
        """
        arrays = [as_token_ids(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        check_prompts(arrays, sampling, self.context)
        self._synchronise()
        total, tokens, finished = len(arrays) * sampling.n, 0, set[int]()
        rows = [self._conversation(arrays[row // sampling.n], sampling, key, row) for row in range(total)]
        paused: list[int] = []  # rows that wait for the responder
        aborted: list[int] = []  # rows whose request was aborted

        def on_result(row: int, turn: SampledRow) -> None:
            nonlocal tokens
            rows[row].append_turn(turn, self._version)
            tokens += len(turn.token_ids)
            if not turn.is_complete and rows[row].room() > 0:
                rows[row].continue_turn()
                aborted.append(row)
            elif responder is None or turn.token_ids[-1] not in self._stop_token_ids(sampling):
                finish(row)
            else:
                responder.submit_turn(row, rows[row].current_turn())
                paused.append(row)

        def finish(row: int) -> None:
            finished.add(row)
            if on_finished is not None:
                on_finished(FinishedResponse(row, list(rows[row].token_ids)))
            if on_progress is not None:
                on_progress(RolloutProgress(len(finished), total, tokens))

        def next_requests() -> dict[int, GenerateRequest]:
            requests = {row: rows[row].request for row in aborted}
            aborted.clear()
            while paused:
                row = paused.pop(0)
                assert responder is not None
                reply = responder.wait_reply(row, rows[row].room() - 1)
                if reply is None:
                    finish(row)
                else:
                    rows[row].append_reply(reply, self._version)
                    requests[row] = rows[row].request
            return requests

        failed, faults = 0, dict[SamplingServer, str]()
        while len(finished) < total:
            before = tokens
            unfinished = {row: rows[row].request for row in range(total) if row not in finished}
            failures = self._request(unfinished, on_result, next_requests)
            failed = 1 if tokens > before else failed + 1
            for server, error in failures.items():
                fault, fault_before = server.fault(), faults.get(server)
                if failed == MAX_ATTEMPTS or (failed > 1 and fault and fault == fault_before):
                    what = f"{self.api.title} failed {failed} times on the same rows"
                    raise ServersFailed(f"{what}, most recently: {server.explained(error)}")
                faults[server] = fault
                self._recover(server, error)
            if self._newer is not None:
                self._load(self._newer)
        if self._traffic.sleeps:
            self._sleep()
        return self._assemble(arrays, sampling, rows)

    def _conversation(self, prompt: TokenIds, sampling: SamplingParams, key: NoiseKey, row: int) -> Conversation:
        request = self._first_request(prompt, sampling, key, row)
        return Conversation(request, key, key.sample(row), self.api.name)

    def _first_request(self, prompt: TokenIds, sampling: SamplingParams, key: NoiseKey, row: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=prompt.tolist(),
            sampling=sampling,
            max_tokens=sampling.room(len(prompt)),
            seed=seed_of(key.seed, key.step, self.api.name, key.sample(row)),
            stop_token_ids=self._stop_token_ids(sampling),
            return_kept_tokens=self._returns_kept_tokens(sampling),
        )

    def _stop_token_ids(self, sampling: SamplingParams) -> list[int]:
        return [] if sampling.ignore_eos else sorted(self.eos_token_ids)

    def _returns_kept_tokens(self, sampling: SamplingParams) -> bool:
        if not (sampling.record_kept and sampling.cuts(self._vocabulary)):
            return False
        if not 0 < sampling.top_k < self._vocabulary:
            what = f"{self.api.title} returns the kept tokens only together with top_k"
            raise ValueError(f"top_p: {what}. Set top_k too")
        return True

    def _request(
        self,
        requests: dict[int, GenerateRequest],
        on_result: Callable[[int, SampledRow], None],
        next_requests: Callable[[], dict[int, GenerateRequest]],
    ) -> dict[SamplingServer, Exception]:
        """Request rows; returns the servers that failed, each with its last error.

        When newer weights arrive, running requests are aborted and continue once the servers have loaded them.
        """
        failures: dict[SamplingServer, Exception] = {}
        owner = {row: self.servers[row % len(self.servers)] for row in requests}
        max_running = min(len(requests), self._traffic.max_num_seqs * len(self.servers))
        running: dict[Future[SampledRow], int] = {}
        self._is_sampling = True
        self._status.report(self.servers, "sampling")
        with ThreadPoolExecutor(max_running, thread_name_prefix="request") as pool:
            watch = _Watchdog(self.servers)
            try:
                while requests or running:
                    if self._newer is None:
                        items = requests.items()
                        running |= {
                            pool.submit(owner[row].generate, item, self._vocabulary): row for row, item in items
                        }
                        requests = {}
                    elif not running:
                        self._load(self._newer)
                        watch = _Watchdog(self.servers)
                        continue
                    else:
                        self._abort(set(self.servers) - set(failures), failures)
                    poll = POLL_SECONDS if self._newer is None else ABORT_EVERY_SECONDS
                    done, _ = wait(running, timeout=poll, return_when=FIRST_COMPLETED)
                    for future in done:
                        server = owner[row := running.pop(future)]
                        error = self._error_of(server, future)
                        if isinstance(error, ServerGone):
                            failures.setdefault(server, error)
                        elif error is not None:
                            raise error
                        elif not future.cancelled():
                            watch.on_progress(server)
                            on_result(row, future.result())
                    # Unfinished requests of a failed server are repeated after its recovery.
                    queue = requests | next_requests()
                    requests = {row: request for row, request in queue.items() if owner[row] not in failures}
                    for server in watch.hanging({owner[row] for row in running.values()} - set(failures)):
                        failures[server] = ServerGone(f"{server.url}: no token within {server.token_timeout:g} s")
                    for future, row in running.items():
                        if owner[row] in failures:
                            future.cancel()
                    for server in failures:
                        server.cut()  # this also ends its other requests
                    raise_if_interrupted(watch.last_progress())
            except BaseException:
                for future in running:
                    future.cancel()
                for server in self.servers:
                    server.cut()
                raise
            finally:
                self._is_sampling = False
                self._status.report([server for server in self.servers if server not in failures], "idle")
        return failures

    def _error_of(self, server: SamplingServer, future: Future[SampledRow]) -> BaseException | None:
        """Return the error of a finished request, if any; None if it was cancelled."""
        if future.cancelled():
            return None
        if (error := future.exception()) is not None or future.result().is_complete or self._newer is not None:
            return error
        return ServerGone(f"{server.url}: aborted a request by itself")

    def _abort(self, servers: set[SamplingServer], failures: dict[SamplingServer, Exception]) -> None:
        """Abort running requests; called repeatedly, because some may not have reached the server yet."""
        for server in servers:
            try:
                server.abort()
            except ServerGone as error:
                failures[server] = error

    def _synchronise(self) -> None:
        """Wait until every server is ready with the current weights."""
        for server in self.servers:
            server.start()  # all start in parallel
        if self._name is None or self._newer is not None:
            self._load(self._newer or self._export())
            return
        self._wake()
        for server in self.servers:
            if not server.has_weights(self._name):
                self._recover(server, ServerGone(f"{server.url}: lost its weights"), restart=not server.is_healthy())

    def _recover(self, server: SamplingServer, error: Exception, *, restart: bool = True) -> None:
        """Restart a server if tether started it, and load the current weights; drop it if its machine is lost.

        Raises:
            ServersFailed: it failed repeatedly.
            RankLost: the machine of the last server is lost.
        """
        if server not in self.servers:  # dropped by a weight update during sampling
            return
        self._recoveries += 1
        self._status.report_failure(server, str(error))
        for attempt in range(MAX_ATTEMPTS):
            if isinstance(error, MachineLost):
                self._drop(server, error)
                return
            _log.warning(
                "%s. %s", server.explained(error), server.next_step() if restart else "Its weights are loaded again"
            )
            if restart:
                server.restart()
            try:
                server.wait_ready()
                if failures := self._send([server], self._loaded or self._export()):
                    raise failures[server]
                return
            except ServerGone as next_error:
                if attempt == MAX_ATTEMPTS - 1:
                    what = f"{self.api.title} failed {MAX_ATTEMPTS} times to load weights"
                    raise ServersFailed(f"{what}, most recently: {server.explained(next_error)}") from None
                error, restart = next_error, _is_down(server, next_error)

    def _drop(self, server: SamplingServer, error: MachineLost) -> None:
        """Continue without a server whose machine is lost."""
        others = [other for other in self.servers if other is not server]
        if not others:
            raise RankLost(f"{error}, and no other server is left")
        self.servers = others
        self._reported = (self._reported[0] - server.bytes_sent, self._reported[1])
        self._status.report([server], "lost with its machine")
        server.stop()
        _log.warning("%s. The run continues with %d of its servers until it is started again", error, len(others))

    def _send(self, servers: Sequence[SamplingServer], weights: WeightUpdate) -> dict[SamplingServer, ServerGone]:
        """Load weights into servers of this engine, and return those that died."""
        assert self._name is not None
        self._status.report(servers, "loading weights")
        update = NamedUpdate(weights.tensors, self._name, self._run, self._traffic)
        failures = self.servers[0].load(servers, update) if servers else {}
        self._status.report([server for server in servers if server not in failures], "idle")
        return failures

    def _sleep(self) -> None:
        for server in self.servers:
            with suppress(ServerGone):  # a failure is noticed in the next step
                server.sleep()
        self._asleep = True
        self._status.report(self.servers, "asleep")

    def _wake(self) -> None:
        if self._asleep:
            self._asleep = False
            for server in self.servers:
                with suppress(ServerGone):  # a failure is noticed by the next request
                    server.wake()

    def _assemble(
        self, prompts: Sequence[TokenIds], sampling: SamplingParams, conversations: Sequence[Conversation]
    ) -> RolloutBatch:
        n, count = sampling.n, len(conversations)
        length = torch.tensor([len(conversation.token_ids) for conversation in conversations])
        width = int(length.max())
        ids = [torch.tensor(conversation.token_ids, dtype=torch.int64) for conversation in conversations]
        probs = [torch.tensor(conversation.log_probs) for conversation in conversations]
        versions = pad_sequence(
            [torch.tensor(conversation.versions) for conversation in conversations], batch_first=True
        )
        response_ids, rows = pad_sequence(ids, batch_first=True), torch.arange(count)
        prompt_ids = pad_sequence([torch.from_numpy(prompt) for prompt in prompts], batch_first=True)
        stops = torch.tensor(self._stop_token_ids(sampling), dtype=torch.int64)
        sampled = torch.arange(width) < length[:, None]
        for row, conversation in enumerate(conversations):
            for begin, end in conversation.reply_spans:
                sampled[row, begin:end] = False
        return RolloutBatch(
            uid=rows // n,
            prompt_ids=prompt_ids.long().repeat_interleave(n, dim=0),
            prompt_length=torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(n),
            response_ids=response_ids,
            response_length=length,
            response_mask=sampled,
            rollout_log_probs=pad_sequence(probs, batch_first=True),
            truncated=~torch.isin(response_ids[rows, length - 1], stops),
            policy_version=versions.masked_fill(~sampled, torch.iinfo(torch.int64).max).amin(dim=-1),
            token_versions=versions if len(versions[sampled].unique()) > 1 else None,
            kept=self._kept(conversations, width) if self._returns_kept_tokens(sampling) else None,
            routed_experts=_experts(conversations, prompt_ids.shape[1] + width) if sampling.record_experts else None,
            batch_size=[count],
        )

    def _kept(self, conversations: Sequence[Conversation], width: int) -> KeptTokens:
        recorder = KeptRecorder(len(conversations), width, self._vocabulary, torch.device("cpu"))
        for row, conversation in enumerate(conversations):
            for first in range(0, len(conversation.kept_tokens), POSITIONS_AT_ONCE):
                chunk = conversation.kept_tokens[first : first + POSITIONS_AT_ONCE]
                is_kept = torch.zeros(len(chunk), self._vocabulary, dtype=torch.bool)
                for position, candidates in enumerate(chunk):
                    is_kept[position, candidates] = True
                recorder.add(torch.full((len(chunk),), row), torch.arange(first, first + len(chunk)), is_kept)
        return recorder.result(width)


def _is_down(server: SamplingServer, error: ServerGone) -> bool:
    """Return whether a failed server has to be restarted: False if only a connection broke and it is healthy."""
    return not (isinstance(error, ConnectionLost) and server.is_healthy())


def _experts(conversations: Sequence[Conversation], width: int) -> torch.Tensor:
    """Return [B, W, L, k] for `RolloutBatch.routed_experts`."""
    recorded = [
        torch.from_numpy(conversation.experts) for conversation in conversations if conversation.experts is not None
    ]
    result = torch.full((len(conversations), width, *recorded[0].shape[1:]), -1, dtype=torch.int16)
    for row, experts in enumerate(recorded):
        result[row, : len(experts)] = experts
    return result


class _Watchdog:
    """Detects servers that do not sample."""

    def __init__(self, servers: Sequence[SamplingServer]) -> None:
        self._last_progress = dict.fromkeys(servers, time.monotonic())
        self._counters: dict[SamplingServer, float | None] = dict.fromkeys(servers)
        self._last_warning = dict(self._last_progress)  # when its lack of progress was last reported

    def on_progress(self, server: SamplingServer) -> None:
        """Record that a server finished a row."""
        self._last_progress[server] = time.monotonic()

    def last_progress(self) -> float:
        """Return the time of the last progress of any server."""
        return max(self._last_progress.values())

    def hanging(self, busy: set[SamplingServer]) -> list[SamplingServer]:
        """Return the busy servers that have sampled no token for longer than their timeout."""
        hanging = []
        for server in busy:
            silent = time.monotonic() - self._last_progress[server]
            if silent < min(POLL_SECONDS, server.token_timeout / 2):
                continue
            wait = max(min(server.token_timeout - silent, LOG_EVERY_SECONDS), MIN_WAIT_SECONDS)
            counter = server.progress_counter(wait)
            silent = time.monotonic() - self._last_progress[server]
            if counter is not None and counter != self._counters[server]:
                self._counters[server] = counter
                self._last_progress[server] = time.monotonic()
            elif silent >= server.token_timeout:
                hanging.append(server)
            elif time.monotonic() - max(self._last_progress[server], self._last_warning[server]) > LOG_EVERY_SECONDS:
                self._last_warning[server] = time.monotonic()
                what = "%s: %s has sampled no token for %.0f s; after %g s without one it is considered hanging"
                _log.warning(what, server.url, server.api.title, silent, server.token_timeout)
        return hanging
