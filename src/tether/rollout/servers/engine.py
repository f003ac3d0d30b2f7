"""The engine of `vllm` and `sglang`: rows are sampled by servers, which get the policy's weights after each update.

A row is one request, or one for each of its turns, with a seed that is a function of (seed, step, sample, turn): who
samples it, beside what and how often does not matter, as far as the server keeps to its seeds. A server that dies or
hangs is started again with the present weights, and what it did not finish is asked for again with the same seeds::

    rows ──► server 0 ──► answers, each checked: whole, and drawn with the present weights
         ──► server 1 ──x dead: restart, weights, its unfinished rows once more
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.batch import KeptTokens, RolloutBatch, TokenIds, WeightUpdate, as_token_ids
from tether.keyed_random import seed_of
from tether.models.output import KeptRecorder
from tether.rollout.protocol import FinishedResponse, NoiseKey, Partner, RolloutProgress, SamplingParams, check_prompts
from tether.rollout.servers.checkpoint_names import checkpoint_weights, without_adapters
from tether.rollout.servers.dialect import Draw, Sampled
from tether.rollout.servers.dialogue import Dialogue
from tether.rollout.servers.http import ConnectionLost, Connections, ServerGone
from tether.rollout.servers.server import Server
from tether.runtime.interrupt import give_up_if_interrupted

_log = logging.getLogger(__name__)
_TRIES = 4  # without a turn between them that is heard, before the run ends; two where the server gives one reason
_SAYS = 60.0  # seconds without a token between two lines about that
_LOOKS = 2.0  # seconds between two looks at a server that finishes no row
_SHORTEST = 1.0  # seconds of a look at one whose patience ends meanwhile
_INTERRUPTS = 0.05  # seconds between two attempts to break off what is sampled
_POSITIONS = 64  # of a row, whose kept tokens are spread over the vocabulary at once


class ServersFailed(RuntimeError):
    """Servers died, or answered wrongly, again and again: the run ends, and resumes from its last checkpoint."""


@dataclass(frozen=True)
class Traffic:
    """Sizes and formats of what travels to the servers."""

    dtype: torch.dtype
    """That the servers compute in."""
    bucket: int
    """Bytes of weights that travel at a time."""
    left_out: frozenset[str]
    """Names of weights that are other names of a weight that travels: tied ones."""
    max_num_seqs: int
    """Requests at a time, to each server."""
    sleeps: bool
    """The servers give back their memory while nothing is sampled."""
    lora_scale: float = 1.0
    """Weight of the adapters, where they are added into the layers before these travel."""
    adapters: bool = False
    """Layers travel without their adapters, once, and after each update the adapters alone."""
    layers_are_there: bool = False
    """Servers begin with the layers below the adapters, which then need not travel."""
    holds_weights: bool = False
    """A server that is started again gets the weights that were loaded last, and not those of the moment, which
    training may be changing."""


class ServedEngine:
    """Samples with servers of one kind; see `RolloutEngine`.

    Args:
        servers: at least one; rows are dealt to them in turn.
        export: the present weights, for a server that has to be started again.
        eos_token_ids: tokens that end a response.
        vocabulary: number of tokens.
        context: most tokens of prompt and response.
        traffic: see `Traffic`.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        export: Callable[[], WeightUpdate],
        *,
        eos_token_ids: frozenset[int],
        vocabulary: int,
        context: int | None,
        traffic: Traffic,
    ) -> None:
        self.servers, self._export, self._traffic = servers, export, traffic
        self.speaks = servers[0].speaks
        self.options = self.speaks.options
        self.eos_token_ids = eos_token_ids
        self._vocabulary, self._context = vocabulary, context
        self._run = ""  # named when weights are: those of another run are not taken for ours
        self._version = 0
        self._pushes = 0
        self._name: str | None = None
        self._asleep = False
        self._held: WeightUpdate | None = None
        self._newer: WeightUpdate | None = None  # that came while rows were sampled
        self._is_sampling = False
        self._revivals = 0
        self._told = (0, 0)

    def load_weights(self, weights: WeightUpdate) -> None:
        """See `RolloutEngine.load_weights`; rows that are being sampled are broken off, and go on with them."""
        if self._is_sampling:
            self._newer = weights
        else:
            self._take(weights)

    def _take(self, weights: WeightUpdate) -> None:
        """Give them to the servers, none of which samples."""
        self._newer = None
        self._version = weights.version
        self._held = weights if self._traffic.holds_weights else None
        self._run = self._run or uuid.uuid4().hex[:8]
        self._pushes += 1
        self._name = f"{self._run}-{self._pushes}"
        self._awake()
        for server in self.servers:
            try:
                server.ready()
                self._give(server, weights)
            except ServerGone as error:
                self._revive(server, error, restart=_is_down(server, error))

    def remedies(self) -> dict[str, Callable[[], None]]:
        """See `tether.rollout.parity.Proven`: what may be stale in a server, and what renews it."""
        cures = {cause: partial(self._cure, cure) for cause, cure in self.speaks.cures().items()}
        return {**cures, "older weights": self._take_all}

    def _take_all(self) -> None:
        self._run = ""  # as if nothing had been sent
        self._take(self._export())

    def moved(self) -> dict[str, float]:
        """Bytes of weights that went to the servers, and failures of servers, since it was last asked, as metrics."""
        before, self._told = self._told, (sum(server.moved for server in self.servers), self._revivals)
        names = ("transfer/weights_bytes", "transfer/server_failures")
        return {name: float(now - then) for name, now, then in zip(names, self._told, before, strict=True)}

    def _cure(self, cure: Callable[[Connections, float], None]) -> None:
        for server in self.servers:
            cure(server.http, server.timeout)

    def close(self) -> None:
        """End the servers that are ours."""
        for server in self.servers:
            server.stop()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        partner: Partner | None = None,
    ) -> RolloutBatch:
        """See `RolloutEngine.generate`. A row goes on as soon as its answer is there.

        Raises:
            ValueError: the prompts cannot be answered, or a server is not one that can be used.
            ServersFailed: again and again.
        """
        arrays = [as_token_ids(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        check_prompts(arrays, sampling, self._context)
        self._synchronise()
        total, tokens, finished = len(arrays) * sampling.n, 0, set[int]()
        rows = [self._dialogue(arrays[row // sampling.n], sampling, key, row) for row in range(total)]
        paused: list[int] = []  # rows whose turn the partner answers
        cut: list[int] = []  # rows that were broken off

        def hear(row: int, turn: Sampled) -> None:
            nonlocal tokens
            rows[row].hear(turn, self._version)
            tokens += len(turn.token_ids)
            if not turn.whole and rows[row].room() > 0:
                rows[row].go_on()
                cut.append(row)
            elif partner is None or turn.token_ids[-1] not in self._ends(sampling):
                finish(row)
            else:
                partner.listen(row, rows[row].turn())
                paused.append(row)

        def finish(row: int) -> None:
            finished.add(row)
            if on_finished is not None:
                on_finished(FinishedResponse(row, list(rows[row].token_ids)))
            if on_progress is not None:
                on_progress(RolloutProgress(len(finished), total, tokens))

        def go_on() -> dict[int, Draw]:
            asked = {row: rows[row].draw for row in cut}
            cut.clear()
            while paused:
                row = paused.pop(0)
                assert partner is not None
                answer = partner.answer(row, rows[row].room() - 1)
                if answer is None:
                    finish(row)
                else:
                    rows[row].tell(answer, self._version)
                    asked[row] = rows[row].draw
            return asked

        failed, faults = 0, dict[Server, str]()
        while len(finished) < total:
            before = tokens
            failures = self._ask({row: rows[row].draw for row in range(total) if row not in finished}, hear, go_on)
            failed = 1 if tokens > before else failed + 1
            for server, error in failures.items():
                fault, fault_before = server.fault(), faults.get(server)
                if failed == _TRIES or (failed > 1 and fault and fault == fault_before):
                    what = f"{self.speaks.title} failed {failed} times on the same rows"
                    raise ServersFailed(f"{what}, at last: {server.explained(error)}")
                faults[server] = fault
                self._revive(server, error)
            if self._newer is not None:
                self._take(self._newer)
        if self._traffic.sleeps:
            self._sleep()
        return self._assemble(arrays, sampling, rows)

    def _dialogue(self, prompt: TokenIds, sampling: SamplingParams, key: NoiseKey, row: int) -> Dialogue:
        draw = self._draw(prompt, sampling, key, row)
        return Dialogue(draw, key, key.first_sample + row, self.speaks.name)

    def _draw(self, prompt: TokenIds, sampling: SamplingParams, key: NoiseKey, row: int) -> Draw:
        return Draw(
            prompt=prompt.tolist(),
            sampling=sampling,
            most=sampling.room(len(prompt)),
            seed=seed_of(key.seed, key.step, self.speaks.name, key.first_sample + row),
            ends=self._ends(sampling),
            records=self._records(sampling),
        )

    def _ends(self, sampling: SamplingParams) -> list[int]:
        return [] if sampling.ignore_eos else sorted(self.eos_token_ids)

    def _records(self, sampling: SamplingParams) -> bool:
        if not (sampling.record_kept and sampling.cuts(self._vocabulary)):
            return False
        if not 0 < sampling.top_k < self._vocabulary:
            what = f"{self.speaks.title} tells which tokens it kept only together with top_k"
            raise ValueError(f"top_p: {what}. Set top_k too")
        return True

    def _ask(
        self, requests: dict[int, Draw], hear: Callable[[int, Sampled], None], go_on: Callable[[], dict[int, Draw]]
    ) -> dict[Server, Exception]:
        """Ask for rows; returns the servers that failed, each with what it did last.

        Where newer weights have come, what runs is broken off, and goes on once the servers have them.

        Args:
            requests: by row.
            hear: takes in what was drawn for a row.
            go_on: what is to be asked for next, after some were heard.
        """
        failures: dict[Server, Exception] = {}
        owner = {row: self.servers[row % len(self.servers)] for row in requests}
        most = min(len(requests), self._traffic.max_num_seqs * len(self.servers))
        running: dict[Future[Sampled], int] = {}
        self._is_sampling = True
        with ThreadPoolExecutor(most, thread_name_prefix="request") as pool:
            watch = _Watch(self.servers)
            try:
                while requests or running:
                    if self._newer is None:
                        asked = requests.items()
                        running |= {pool.submit(owner[row].sample, draw, self._vocabulary): row for row, draw in asked}
                        requests = {}
                    elif not running:
                        self._take(self._newer)
                        watch = _Watch(self.servers)
                        continue
                    else:
                        self._interrupt(set(self.servers) - set(failures), failures)
                    looks = _LOOKS if self._newer is None else _INTERRUPTS
                    done, _ = wait(running, timeout=looks, return_when=FIRST_COMPLETED)
                    for future in done:
                        server = owner[row := running.pop(future)]
                        error = self._error_of(server, future)
                        if isinstance(error, ServerGone):
                            failures.setdefault(server, error)
                        elif error is not None:
                            raise error
                        elif not future.cancelled():
                            watch.lives(server)
                            hear(row, future.result())
                    # What a server that failed has not finished is asked for once it is there again.
                    requests = {row: draw for row, draw in (requests | go_on()).items() if owner[row] not in failures}
                    for server in watch.hanging({owner[row] for row in running.values()} - set(failures)):
                        failures[server] = ServerGone(f"{server.url}: no token within {server.patience:g} s")
                    for future, row in running.items():
                        if owner[row] in failures:
                            future.cancel()
                    for server in failures:
                        server.http.cut()  # its other rows end now, too
                    give_up_if_interrupted(watch.last_life())
            except BaseException:
                for future in running:
                    future.cancel()
                for server in self.servers:
                    server.http.cut()
                raise
            finally:
                self._is_sampling = False
        return failures

    def _error_of(self, server: Server, future: Future[Sampled]) -> BaseException | None:
        """The error of a request that is done, if any; None where it was cancelled."""
        if future.cancelled():
            return None
        if (error := future.exception()) is not None or future.result().whole or self._newer is not None:
            return error
        return ServerGone(f"{server.url}: broke a row off")

    def _interrupt(self, servers: set[Server], failures: dict[Server, Exception]) -> None:
        """Break off what they sample; again and again, as requests may still be on their way."""
        for server in servers:
            try:
                server.interrupt()
            except ServerGone as error:
                failures[server] = error

    def _synchronise(self) -> None:
        """Have every server ready, with the present weights."""
        for server in self.servers:
            server.begin()  # all start at once
        if self._name is None or self._newer is not None:
            self._take(self._newer or self._export())
            return
        self._awake()
        for server in self.servers:
            if not server.has(self._name):
                self._revive(server, ServerGone(f"{server.url}: lost its weights"), restart=not server.answers())

    def _revive(self, server: Server, error: Exception, *, restart: bool = True) -> None:
        """Start a server again, where it is ours, and give it the present weights."""
        self._revivals += 1
        for attempt in range(_TRIES):
            _log.warning("%s. %s", server.explained(error), server.next_step() if restart else "It gets them again")
            if restart:
                server.restart()
            try:
                server.ready()
                self._give(server, self._held or self._export())
                return
            except ServerGone as again:
                if attempt == _TRIES - 1:
                    what = f"{self.speaks.title} failed {_TRIES} times to take weights"
                    raise ServersFailed(f"{what}, at last: {server.explained(again)}") from None
                error, restart = again, _is_down(server, again)

    def _give(self, server: Server, weights: WeightUpdate) -> None:
        assert self._name is not None
        kept = ((name, value) for name, value in weights.tensors if name not in self._traffic.left_out)
        dtype, bucket = self._traffic.dtype, self._traffic.bucket
        if not self._traffic.adapters:
            server.take(self._name, checkpoint_weights(kept, self._traffic.lora_scale), dtype, bucket)
            return
        adapters: dict[str, Tensor] = {}
        layers = without_adapters(kept, adapters)
        loaded = self._traffic.layers_are_there and server.is_new
        if loaded or server.has_some_of(self._run):  # then the layers are those of this run, which stay as they are
            for _ in layers:
                pass
        else:
            server.take(f"{self._run}-base", layers, dtype, bucket)
        server.take_adapters(self._name, adapters, dtype)

    def _sleep(self) -> None:
        for server in self.servers:
            with suppress(ServerGone):  # the next step finds out
                server.sleep()
        self._asleep = True

    def _awake(self) -> None:
        if self._asleep:
            self._asleep = False
            for server in self.servers:
                with suppress(ServerGone):  # so does what comes next
                    server.wake()

    def _assemble(
        self, prompts: Sequence[TokenIds], sampling: SamplingParams, answers: Sequence[Dialogue]
    ) -> RolloutBatch:
        n, count = sampling.n, len(answers)
        length = torch.tensor([len(answer.token_ids) for answer in answers])
        width = int(length.max())
        ids = [torch.tensor(answer.token_ids, dtype=torch.int64) for answer in answers]
        probs = [torch.tensor(answer.log_probs) for answer in answers]
        versions = pad_sequence([torch.tensor(answer.versions) for answer in answers], batch_first=True)
        response_ids, rows = pad_sequence(ids, batch_first=True), torch.arange(count)
        prompt_ids = pad_sequence([torch.from_numpy(prompt) for prompt in prompts], batch_first=True)
        ends = torch.tensor(self._ends(sampling), dtype=torch.int64)
        sampled = torch.arange(width) < length[:, None]
        for row, answer in enumerate(answers):
            for begin, end in answer.told:
                sampled[row, begin:end] = False
        return RolloutBatch(
            uid=rows // n,
            prompt_ids=prompt_ids.long().repeat_interleave(n, dim=0),
            prompt_length=torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(n),
            response_ids=response_ids,
            response_length=length,
            response_mask=sampled,
            rollout_log_probs=pad_sequence(probs, batch_first=True),
            truncated=~torch.isin(response_ids[rows, length - 1], ends),
            policy_version=versions.masked_fill(~sampled, torch.iinfo(torch.int64).max).amin(dim=-1),
            token_versions=versions if len(versions[sampled].unique()) > 1 else None,
            kept=self._kept(answers, width) if self._records(sampling) else None,
            routed_experts=_experts(answers, prompt_ids.shape[1] + width) if sampling.record_experts else None,
            batch_size=[count],
        )

    def _kept(self, answers: Sequence[Dialogue], width: int) -> KeptTokens:
        recorder = KeptRecorder(len(answers), width, self._vocabulary, torch.device("cpu"))
        for row, answer in enumerate(answers):
            for first in range(0, len(answer.kept), _POSITIONS):
                part = answer.kept[first : first + _POSITIONS]
                kept = torch.zeros(len(part), self._vocabulary, dtype=torch.bool)
                for place, drawable in enumerate(part):
                    kept[place, drawable] = True
                recorder.add(torch.full((len(part),), row), torch.arange(first, first + len(part)), kept)
        return recorder.result(width)


def _is_down(server: Server, error: ServerGone) -> bool:
    """Whether a server that failed is to be started again: not where a connection broke, and it answers."""
    return not (isinstance(error, ConnectionLost) and server.answers())


def _experts(answers: Sequence[Dialogue], width: int) -> torch.Tensor:
    """[B, W, L, k], see `RolloutBatch.routed_experts`."""
    found = [torch.from_numpy(answer.experts) for answer in answers if answer.experts is not None]
    whole = torch.full((len(answers), width, *found[0].shape[1:]), -1, dtype=torch.int16)
    for row, experts in enumerate(found):
        whole[row, : len(experts)] = experts
    return whole


class _Watch:
    """Notices servers that sample nothing."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._alive = dict.fromkeys(servers, time.monotonic())
        self._tokens: dict[Server, float | None] = dict.fromkeys(servers)
        self._told = dict(self._alive)  # when its silence was told last

    def lives(self, server: Server) -> None:
        """It finished a row."""
        self._alive[server] = time.monotonic()

    def last_life(self) -> float:
        """When there last was a sign of life."""
        return max(self._alive.values())

    def hanging(self, busy: set[Server]) -> list[Server]:
        """Those of the busy servers that have sampled no token for as long as they may take."""
        found = []
        for server in busy:
            silent = time.monotonic() - self._alive[server]
            if silent < min(_LOOKS, server.patience / 2):
                continue
            tokens = server.sign_of_life(max(min(server.patience - silent, _SAYS), _SHORTEST))
            silent = time.monotonic() - self._alive[server]
            if tokens is not None and tokens != self._tokens[server]:
                self._tokens[server] = tokens
                self._alive[server] = time.monotonic()
            elif silent >= server.patience:
                found.append(server)
            elif time.monotonic() - max(self._alive[server], self._told[server]) > _SAYS:
                self._told[server] = time.monotonic()
                what = "%s: %s has sampled no token for %.0f s; after %g s without one it counts as hanging"
                _log.warning(what, server.url, server.speaks.title, silent, server.patience)
        return found
