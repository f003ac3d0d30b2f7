"""The `vllm` engine: rows are sampled by servers, which get the policy's weights after each update.

A row is one request, with a seed that is a function of (seed, step, sample): who samples it, beside what and how often
does not matter, as far as vLLM keeps to its seeds. A server that dies or hangs is started again with the present
weights, and the rows that it did not finish are asked for again with the same seeds::

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
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tether.batch import RolloutBatch, TokenIds, WeightUpdate, as_token_ids
from tether.keyed_random import seed_of
from tether.models.output import KeptRecorder
from tether.rollout.protocol import FinishedResponse, NoiseKey, Partner, RolloutProgress, SamplingParams, check_prompts
from tether.rollout.vllm.http import ServerGone, ServerRefuses
from tether.rollout.vllm.server import SERVED, Launch, Server, answer_of
from tether.runtime.interrupt import give_up_if_interrupted
from tether.types import JsonObject

_log = logging.getLogger(__name__)
_TRIES = 4  # of a row, before the run ends
_LOOKS = 2.0  # seconds between two looks at a server that finishes no row
_CUT_OFF = -9000.0  # vLLM writes -9999 for the log-prob of a token that could not be drawn
_POSITIONS = 64  # of a row, whose kept tokens are spread over the vocabulary at once


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
    holds_weights: bool = False
    """A server that is started again gets the weights that were loaded last, and not those of the moment, which
    training may be changing."""


class VllmEngine:
    """Samples with vLLM servers; see `RolloutEngine`.

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
        self.eos_token_ids = eos_token_ids
        self._vocabulary, self._context = vocabulary, context
        self._run = ""  # named when weights are: those of another run are not taken for ours
        self._version = 0
        self._pushes = 0
        self._name: str | None = None
        self._asleep = False
        self._held: WeightUpdate | None = None

    def load_weights(self, weights: WeightUpdate) -> None:
        """See `RolloutEngine.load_weights`."""
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
                self._revive(server, error)

    def remedies(self) -> dict[str, Callable[[], None]]:
        """See `tether.rollout.parity.Proven`: what may be stale in a server, and what renews it."""

        return {
            "a prefix cache of older weights": self._forget,
            "an output head that keeps its first weights": self._pack_heads,
            "older weights": lambda: self.load_weights(self._export()),
        }

    def _forget(self) -> None:
        for server in self.servers:
            server.http.post("/reset_prefix_cache", within=server.timeout)

    def _pack_heads(self) -> None:
        for server in self.servers:
            with suppress(ServerGone, ServerRefuses):  # a server of somebody else may not know how
                server.http.post("/collective_rpc", {"method": "pack_head"}, server.timeout)
        self._forget()

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
        """See `RolloutEngine.generate`; responses have one turn.

        Raises:
            ValueError: the prompts cannot be answered, or a server is not one that can be used.
            RuntimeError: the servers fail again and again.
        """
        assert partner is None, "the configuration refuses conversations with this engine"
        arrays = [as_token_ids(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]
        check_prompts(arrays, sampling, self._context)
        self._synchronise()
        waiting = {row: self._request(arrays[row // sampling.n], sampling, key, row)
                   for row in range(len(arrays) * sampling.n)}  # fmt: skip
        total, tokens = len(waiting), 0
        answers: dict[int, JsonObject] = {}

        def finish(row: int, answer: JsonObject) -> None:
            nonlocal tokens
            answers[row] = answer
            tokens += len(answer["token_ids"])
            if on_finished is not None:
                on_finished(FinishedResponse(row, list(answer["token_ids"])))
            if on_progress is not None:
                on_progress(RolloutProgress(len(answers), total, tokens))

        for attempt in range(_TRIES):
            failures = self._ask({row: request for row, request in waiting.items() if row not in answers}, finish)
            if not failures:
                break
            if attempt == _TRIES - 1:
                raise RuntimeError(
                    f"vLLM failed {_TRIES} times on the same rows, at last: {next(iter(failures.values()))}"
                )
            for server, error in failures.items():
                self._revive(server, error)
        if self._traffic.sleeps:
            self._sleep()
        return self._assemble(arrays, sampling, [answers[row] for row in range(total)])

    def _request(self, prompt: TokenIds, sampling: SamplingParams, key: NoiseKey, row: int) -> JsonObject:
        params = {
            "max_tokens": sampling.room(len(prompt)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed_of(key.seed, key.step, "vllm", key.first_sample + row),
            "logprobs": sampling.top_k if self._records(sampling) else 0,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else sorted(self.eos_token_ids),
            "detokenize": False,
        }
        return {"model": SERVED, "token_ids": prompt.tolist(), "sampling_params": params}

    def _records(self, sampling: SamplingParams) -> bool:
        if not (sampling.record_kept and sampling.cuts(self._vocabulary)):
            return False
        if not 0 < sampling.top_k < self._vocabulary:
            raise ValueError("top_p: vLLM tells which tokens it kept only together with top_k. Set top_k too")
        return True

    def _ask(
        self, requests: dict[int, JsonObject], finish: Callable[[int, JsonObject], None]
    ) -> dict[Server, Exception]:
        """Ask for all rows; returns the servers that failed, each with what it did last."""
        failures: dict[Server, Exception] = {}
        owner = {row: self.servers[row % len(self.servers)] for row in requests}
        most = min(len(requests), self._traffic.max_num_seqs * len(self.servers))
        with ThreadPoolExecutor(most, thread_name_prefix="vllm") as pool:
            running: dict[Future[JsonObject], int] = {
                pool.submit(self._sampled, owner[row], request): row for row, request in requests.items()
            }
            watch = _Watch(self.servers)
            try:
                while running:
                    done, _ = wait(running, timeout=_LOOKS, return_when=FIRST_COMPLETED)
                    for future in done:
                        server = owner[row := running.pop(future)]
                        error = None if future.cancelled() else future.exception()
                        if isinstance(error, ServerGone):
                            failures.setdefault(server, error)
                        elif error is not None:
                            raise error
                        elif not future.cancelled():
                            watch.lives(server)
                            finish(row, future.result())
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
        return failures

    def _sampled(self, server: Server, request: JsonObject) -> JsonObject:
        # A whole row may take long: what hangs is noticed by `_Watch`, which cuts the connection.
        answer = answer_of(server, request, within=86400.0)
        drawn_with = {span["version"] for span in answer.get("weight_versions") or ()}
        if drawn_with != {server.weights}:
            raise ServerGone(
                f"{server.url}: sampled with weights {', '.join(map(str, drawn_with))}, not the present ones"
            )
        return answer

    def _synchronise(self) -> None:
        """Have every server ready, with the present weights."""
        for server in self.servers:
            server.begin()  # all start at once
        if self._name is None:
            self.load_weights(self._export())
            return
        self._awake()
        for server in self.servers:
            if not server.has(self._name):
                self._revive(server, ServerGone(f"{server.url}: lost its weights"), restart=not server.answers())

    def _revive(self, server: Server, error: Exception, *, restart: bool = True) -> None:
        """Start a server again, where it is ours, and give it the present weights."""
        for attempt in range(_TRIES):
            _log.warning("%s; %s", error, "the server is started again" if restart else "it gets them again")
            if restart:
                server.restart()
            try:
                server.ready()
                self._give(server, self._held or self._export())
                return
            except ServerGone as again:
                if attempt == _TRIES - 1:
                    raise RuntimeError(f"vLLM failed {_TRIES} times to take weights, at last: {again}") from None
                error, restart = again, True

    def _give(self, server: Server, weights: WeightUpdate) -> None:
        assert self._name is not None
        kept = ((name, value) for name, value in weights.tensors if name not in self._traffic.left_out)
        server.take(self._name, kept, self._traffic.dtype, self._traffic.bucket)

    def _sleep(self) -> None:
        for server in self._ours():
            with suppress(ServerGone):  # the next step finds out
                server.http.post("/sleep?level=1", within=server.timeout)
        self._asleep = True

    def _awake(self) -> None:
        if self._asleep:
            self._asleep = False
            for server in self._ours():
                with suppress(ServerGone):  # one that hangs is found in seconds, by a question that costs it nothing
                    if server.answers():
                        server.http.post("/wake_up", within=server.timeout)

    def _ours(self) -> list[Server]:
        return [server for server in self.servers if isinstance(server.where, Launch)]

    def _assemble(
        self, prompts: Sequence[TokenIds], sampling: SamplingParams, answers: Sequence[JsonObject]
    ) -> RolloutBatch:
        n, count = sampling.n, len(answers)
        length = torch.tensor([len(answer["token_ids"]) for answer in answers])
        width = int(length.max())
        ids = [torch.tensor(answer["token_ids"], dtype=torch.int64) for answer in answers]
        probs = [torch.tensor([token["logprob"] for token in answer["logprobs"]["content"]]) for answer in answers]
        response_ids, rows = pad_sequence(ids, batch_first=True), torch.arange(count)
        prompt_ids = pad_sequence([torch.from_numpy(prompt) for prompt in prompts], batch_first=True)
        ends = torch.tensor(sorted(self.eos_token_ids), dtype=torch.int64)
        return RolloutBatch(
            uid=rows // n,
            prompt_ids=prompt_ids.long().repeat_interleave(n, dim=0),
            prompt_length=torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(n),
            response_ids=response_ids,
            response_length=length,
            response_mask=torch.arange(width) < length[:, None],
            rollout_log_probs=pad_sequence(probs, batch_first=True),
            truncated=~torch.isin(response_ids[rows, length - 1], ends),
            policy_version=torch.full((count,), self._version),
            kept=self._kept(answers, width) if self._records(sampling) else None,
            batch_size=[count],
        )

    def _kept(self, answers: Sequence[JsonObject], width: int) -> Any:
        recorder = KeptRecorder(len(answers), width, self._vocabulary, torch.device("cpu"))
        for row, answer in enumerate(answers):
            content = answer["logprobs"]["content"]
            for first in range(0, len(content), _POSITIONS):
                part = content[first : first + _POSITIONS]
                kept = torch.zeros(len(part), self._vocabulary, dtype=torch.bool)
                for place, token in enumerate(part):
                    drawable = [t["token_id"] for t in token["top_logprobs"] if t["logprob"] > _CUT_OFF]
                    kept[place, drawable] = True
                recorder.add(torch.full((len(part),), row), torch.arange(first, first + len(part)), kept)
        return recorder.result(width)


class _Watch:
    """Notices servers that sample nothing."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._alive = dict.fromkeys(servers, time.monotonic())
        self._tokens: dict[Server, float | None] = dict.fromkeys(servers)

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
            tokens = server.tokens_sampled()
            if tokens is not None and tokens != self._tokens[server]:
                self._tokens[server] = tokens
                self._alive[server] = time.monotonic()
            elif silent > server.patience:
                found.append(server)
        return found
