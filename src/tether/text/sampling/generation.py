"""The loop of the `native` engine: each step samples a token for every active row of a call, with its log-probability
under the sampled distribution.

Sampling inverts the cumulative distribution at a uniform random number. Nothing of the vocabulary's size is sorted or
accumulated: each row is summed in blocks, then the block that contains the number is located, then the token in it.

Legend: R = rows, V = vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tether.batch import RolloutBatch, TokenIds
from tether.kernels import AttentionLayout, backend, inverse_sample, kernels_for, rows_in_scratch
from tether.keyed_random import uniform
from tether.text.models.truncation_record import KeptRecorder
from tether.text.sampling.decoder import RepeatedStep, ReplayedDecoder
from tether.text.sampling.expert_recorder import ExpertRecorder
from tether.text.sampling.kv_cache import Continue, Decode, KVCache, Prefill, Prefix, PrefixCache, length_of
from tether.text.sampling.protocol import FinishedResponse, NoiseKey, Responder, RolloutProgress, SamplingParams


class SampledTokens(NamedTuple):
    """One sampled token for each row."""

    token: Tensor
    """[R] int64."""
    log_prob: Tensor
    """[R], fp32 (fp64 for fp64 logits); not finite if and only if the row's logits give no distribution."""
    candidates: Tensor
    """[R, V] bool, the tokens that could be sampled; [R, 0] unless requested."""


def sample_tokens(
    logits: Tensor, uniform: Tensor, sampling: SamplingParams, *, with_candidates: bool = False
) -> SampledTokens:
    """Sample one token from each row.

    The order is temperature, then top-k, then top-p of the remaining tokens, each renormalised; the log-probability is
    that of the final distribution. Tokens that tie with the last candidate are candidates too, so the candidates are a
    function of the logits alone. At temperature 0 the token is the (first) argmax, regardless of top-k and top-p, and
    its log-probability is that of the plain softmax.

    Args:
        logits: [R, V], any floating dtype; -inf forbids a token.
        uniform: [R] numbers in [0, 1).
        sampling: temperature, top_k and top_p are read.
        with_candidates: also return the tokens with a probability above 0.
    """
    is_plain = sampling.temperature != 0 and not with_candidates and not sampling.cuts(logits.shape[-1])
    if is_plain:
        sampled = kernels_for(logits).sample(logits, uniform, sampling.temperature)
        return SampledTokens(*sampled, _no_candidates(logits))
    at_once = rows_in_scratch(logits)
    chunks = zip(logits.split(at_once), uniform.split(at_once), strict=True)
    if sampling.temperature == 0:
        draws = [_greedy(rows) for rows, _ in chunks]
    else:
        draws = [_sample(rows, numbers, sampling, with_candidates) for rows, numbers in chunks]
    return SampledTokens(*map(torch.cat, zip(*draws, strict=True)))


def _greedy(logits: Tensor) -> SampledTokens:
    exact = logits.to(_exact(logits))
    top, token = exact.max(dim=-1)
    return SampledTokens(token, top - exact.logsumexp(dim=-1), _no_candidates(logits))


def _no_candidates(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), 0, dtype=torch.bool, device=logits.device)


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams, with_candidates: bool) -> SampledTokens:
    exact = logits.to(_exact(logits))
    weights = (exact if sampling.temperature == 1 else exact / sampling.temperature).softmax(dim=-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        floor = weights.topk(sampling.top_k, sorted=False).values.amin(dim=-1, keepdim=True)
        weights.masked_fill_(weights < floor, 0.0)
    if sampling.top_p < 1:
        weights.masked_fill_(weights < _nucleus_floor(weights, sampling.top_p), 0.0)
    return SampledTokens(*inverse_sample(weights, uniform), weights > 0 if with_candidates else _no_candidates(logits))


def _nucleus_floor(weights: Tensor, top_p: float) -> Tensor:
    """Return [R, 1] the smallest weight in the smallest set of tokens whose mass reaches `top_p`.

    A token is in the set if the mass of the more likely tokens is below `top_p`. The set is usually small, so it is
    searched in the largest 256 weights first, then in eight times as many until the set of every row fits.
    """
    goal = weights.sum(dim=-1, keepdim=True) * top_p
    count = 256
    while True:
        largest = weights.topk(min(count, weights.shape[-1])).values
        inside = largest.cumsum(dim=-1) - largest < goal
        if count >= weights.shape[-1] or not inside[:, -1].any():
            return largest.masked_fill(~inside, torch.inf).amin(dim=-1, keepdim=True)
        count *= 8


Forward = Callable[[Tensor, Tensor, AttentionLayout, Tensor | None], Tensor]
"""Token ids [R, Q], their positions [R, Q], the layout, and the flat positions [M] for which to return logits (None:
all) -> logits [M, V]."""


class _Outcome(NamedTuple):
    """The outcome of sampling a token for each of M slots."""

    ended: Tensor
    """[M] bool, whether the row's turn ends with the token."""
    by_stop_token: Tensor
    """[M] bool, whether the token is a stop token."""
    broken: Tensor
    """[M] bool, whether the logits gave no distribution."""
    state: Tensor
    """[2] int64: whether any row ended or is broken, and the keys of the longest row that continues."""


class Generation:
    """One call of `generate`. Result rows are numbered 0..N-1; the R active rows occupy the slots 0..R-1."""

    def __init__(
        self,
        model: PreTrainedModel,
        forward: Forward,
        prompts: Sequence[TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        *,
        eos: frozenset[int],
        num_slots: int,
        max_prefill_tokens: int,
        max_kept_tokens: int,
        on_finished: Callable[[FinishedResponse], None] | None,
        responder: Responder | None,
        version: int,
        recorder: ExpertRecorder | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._experts, self._prefixes = recorder, prefixes
        self._forward, self._prompts, self._sampling, self._key = forward, prompts, sampling, key
        self._device, self._dtype = model.device, model.dtype
        self._max_prefill_tokens = max_prefill_tokens
        self._prompt_tokens = torch.from_numpy(np.concatenate(prompts)).to(self._device, torch.int64)
        self._prompt_length = torch.tensor([len(prompt) for prompt in prompts])
        self._on_finished, self._responder = on_finished, responder
        self._version = version
        self._versions: Tensor | None = None  # of each token, once weights have changed
        self._num_rows = len(prompts) * sampling.n
        # One more than the rows: the last one is for free slots.
        samples = [*(key.sample(row) for row in range(self._num_rows)), 0]
        self._samples = torch.tensor(samples, dtype=torch.int64, device=self._device)
        self._num_started = 0
        self._num_finished = 0
        self._num_tokens = 0
        self._active = 0
        self._cache = KVCache(num_slots, max_row_length(prompts, sampling), self._device)
        self._kernels = backend(self._device.type, self._dtype)
        self._steps = RepeatedStep(self._kernels)
        # By slot: the row, its last token, the position of that token, the number of tokens sampled so far.
        self._state = torch.zeros(4, num_slots, dtype=torch.int64, device=self._device)
        self._row, self._token, self._position, self._count = self._state
        # A free slot may be decoded along with the others; its state is the first token of a row beyond the last.
        self._free = torch.tensor([[self._num_rows], [0], [0], [0]], device=self._device)
        self._state[:] = self._free
        self._longest = 0  # keys of the longest active row, including that of its next token
        self._eos = torch.tensor([] if sampling.ignore_eos else sorted(eos), dtype=torch.int64, device=self._device)
        shape = (self._num_rows + 1, sampling.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._log_probs = torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=self._device)
        self._lengths = [0] * self._num_rows
        self._paused: deque[int] = deque()  # rows that wait for the responder, in the order in which their turns ended
        self._context_end = [0] * self._num_rows  # number of tokens of each row up to the end of the last reply
        self._reply_spans: list[tuple[int, int, int]] = []  # row, and start and end of a reply in it
        self._cached_prefixes: dict[int, Prefix] = {}  # of paused rows: all but the last token
        popped = {row: prefixes.pop(prompt) for row, prompt in enumerate(prompts)} if prefixes else {}
        self._known = {row: prefix for row, prefix in popped.items() if prefix}  # of rows that have not started
        self._free_prefix_tokens = max_kept_tokens  # number of tokens of such prefixes that can still be cached
        vocabulary = model.config.get_text_config().vocab_size
        self._cuts = sampling.cuts(vocabulary)
        recorded = sampling.record_kept and self._cuts
        self._kept = KeptRecorder(self._num_rows, shape[1], vocabulary, self._device) if recorded else None

    def renew(self, forward: Forward, version: int) -> None:
        """Continue with new weights; must be called between two steps.

        Args:
            forward: forward pass with these weights.
            version: version of the weights.
        """
        if self._versions is None:
            self._versions = torch.full(self._tokens.shape, self._version, device=self._device)
        self._forward, self._version = forward, version
        self._steps = RepeatedStep(self._kernels)
        self._known.clear()
        self._recompute_cache()

    def step(self) -> bool:
        """Prefill waiting prompts or decode one token for every active row; returns False when nothing is left to
        do."""
        waiting = self._num_rows - self._num_started
        free = self._cache.num_slots - self._active
        if waiting == 0 and self._active == 0 and not self._paused:
            return False
        # A prefill has a fixed cost, so it waits until several slots are free.
        if free >= min(waiting, max(1, self._cache.num_slots // 8)) > 0:
            self._accept_first(self._prefill(free))
        elif free and len(self._paused) > 3 * self._active // 4:
            self._resume_rows(free)
        else:
            self._decode()
        return True

    def _recompute_cache(self) -> None:
        """Recompute the cache of active rows with the current weights, and drop that of paused rows."""
        for row in list(self._cached_prefixes):
            self._pop_prefix(row)
        counts, first = self._count[: self._active].tolist(), 0
        contexts = [
            torch.cat([self._prompt_of(row), self._tokens[row, : count - 1]])
            for row, count in zip(self._row[: self._active].tolist(), counts, strict=True)
        ]
        while first < len(contexts):
            last, tokens = first, 0
            while last < len(contexts) and (last == first or tokens + len(contexts[last]) <= self._max_prefill_tokens):
                tokens += len(contexts[last])
                last += 1
            lengths = [len(context) for context in contexts[first:last]]
            self._prefilled(torch.cat(contexts[first:last]), lengths, [1] * len(lengths), first)
            self._record_contexts(self._row[first:last].tolist(), lengths)
            first = last

    def _resume_rows(self, free: int) -> None:
        """Wait for the replies to the half of the paused rows that paused first, and prefill the rows that continue."""
        cached: dict[int, Prefix] = {}
        uncached: dict[int, Tensor] = {}  # row -> its full context
        tokens = 0
        for _ in range(min(free, (len(self._paused) + 1) // 2)):
            row = self._paused.popleft()
            continues, prefix = self._append_reply(row), self._pop_prefix(row)
            if not continues:
                self._finish(row)
            elif prefix is not None:
                cached[row] = prefix
                tokens += len(self._new_tokens(row, prefix))
            else:
                uncached[row] = torch.cat([self._prompt_of(row), self._tokens[row, : self._context_end[row]]])
                tokens += len(uncached[row])
            if tokens >= self._max_prefill_tokens:
                break
        logits = [self._continued(cached)] if cached else []
        if uncached:
            lengths = [len(context) for context in uncached.values()]
            logits.append(self._prefilled(torch.cat(list(uncached.values())), lengths, [1] * len(uncached)))
            self._record_contexts(list(uncached), lengths)
            self._occupy_resumed(list(uncached), lengths)
        if logits:
            self._accept_first(torch.cat(logits))

    def _continued(self, cached: dict[int, Prefix]) -> Tensor:
        """Load cached prefixes into the next slots and process the tokens after them; returns the logits at their
        ends."""
        added = [self._new_tokens(row, prefix) for row, prefix in cached.items()]
        starts, lengths = [length_of(prefix) for prefix in cached.values()], [len(tokens) for tokens in added]
        for slot, prefix in enumerate(cached.values(), start=self._active):
            self._cache.put(prefix, slot)
        layout = Continue.plan(self._cache, starts, lengths, first_slot=self._active)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self._device)
        logits = self._forward(torch.cat(added)[None], layout.position[None], layout, ends)
        if self._experts:
            self._experts.add_spans([([row], first, n) for row, first, n in zip(cached, starts, lengths, strict=True)])
        self._occupy_resumed(list(cached), [start + length for start, length in zip(starts, lengths, strict=True)])
        return logits

    def _new_tokens(self, row: int, prefix: Prefix) -> Tensor:
        """Return the tokens of a row after its prefix, up to the end of the last reply."""
        context = torch.cat([self._prompt_of(row), self._tokens[row, : self._context_end[row]]])
        return context[length_of(prefix) :]

    def _cache_prefix(self, slot: int, row: int, length: int) -> None:
        """Cache the prefix of a row if there is space. Rows that paused last resume last, so the newest one is not
        cached."""
        if length <= self._free_prefix_tokens:
            self._free_prefix_tokens -= length
            self._cached_prefixes[row] = self._cache.copy_of(slot, length)

    def _pop_prefix(self, row: int) -> Prefix | None:
        prefix = self._cached_prefixes.pop(row, None)
        if prefix is not None:
            self._free_prefix_tokens += length_of(prefix)
        return prefix

    def _append_reply(self, row: int) -> bool:
        """Append the responder's reply to the row; returns False if there is none."""
        assert self._responder is not None
        length, sampling = self._lengths[row], self._sampling
        max_length = sampling.room(len(self._prompts[row // sampling.n]))
        reply = self._responder.wait_reply(row, max_length - length - 1)
        if reply is None:
            return False
        assert 0 < len(reply) < max_length - length, (row, len(reply))
        self._context_end[row] = length + len(reply)
        self._tokens[row, length : self._context_end[row]] = torch.tensor(reply, device=self._device)
        self._reply_spans.append((row, length, self._context_end[row]))
        return True

    def _prompt_of(self, row: int) -> Tensor:
        prompt = row // self._sampling.n
        start = int(self._prompt_length[:prompt].sum())
        return self._prompt_tokens[start : start + int(self._prompt_length[prompt])]

    def _prefill(self, free: int) -> Tensor:
        """Start waiting rows in the free slots; returns [rows, V] logits after their prompts."""
        if self._num_started in self._known:
            return self._continued(self._next_known(free))
        last = min(self._num_started + free, self._num_rows)
        shares = groupby(range(self._num_started, last), key=lambda row: row // self._sampling.n)
        lengths: list[int] = []
        copies: list[int] = []
        for prompt, rows in shares:
            tokens = len(self._prompts[prompt])
            if prompt in self._known or (lengths and sum(lengths) + tokens > self._max_prefill_tokens):
                break
            lengths.append(tokens)
            copies.append(len(list(rows)))
        start = int(self._prompt_length[: self._num_started // self._sampling.n].sum())
        logits = self._prefilled(self._prompt_tokens[start : start + sum(lengths)], lengths, copies)
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(copies))
        started = torch.arange(self._num_started, self._num_started + len(owner))
        if self._experts:
            rows = started.split(copies)
            self._experts.add_spans([(x.tolist(), 0, length) for x, length in zip(rows, lengths, strict=True)])
        self._occupy(started, torch.tensor(lengths)[owner], torch.zeros_like(started))
        self._num_started += len(owner)
        return logits[owner.to(self._device)]

    def _next_known(self, free: int) -> dict[int, Prefix]:
        """Start the waiting rows up to the next one without a cached prefix; returns the prefixes."""
        known, tokens = dict[int, Prefix](), 0
        while (row := self._num_started) in self._known and len(known) < free and tokens < self._max_prefill_tokens:
            known[row] = self._known.pop(row)
            tokens += len(self._prompts[row]) - length_of(known[row])
            self._num_started += 1
        return known

    def _prefilled(self, ids: Tensor, lengths: list[int], copies: list[int], first_slot: int | None = None) -> Tensor:
        """Prefill concatenated contexts into the next slots, in copies; returns the logits after each."""
        layout = Prefill.plan(self._cache, lengths, copies, self._active if first_slot is None else first_slot)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self._device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self._device)
        return self._forward(ids[None], positions[None], layout, ends)

    def _occupy(self, rows: Tensor, lengths: Tensor, counts: Tensor) -> None:
        """Assign the next slots to rows with these context lengths and numbers of response tokens."""
        slots = slice(self._active, self._active + len(rows))
        self._row[slots] = rows.to(self._device)
        self._position[slots] = lengths.to(self._device) - 1
        self._count[slots] = counts.to(self._device)
        self._active += len(rows)

    def _occupy_resumed(self, rows: list[int], lengths: list[int]) -> None:
        """Assign the next slots to rows that received a reply."""
        self._occupy(torch.tensor(rows), torch.tensor(lengths), torch.tensor([self._context_end[row] for row in rows]))

    def _decode(self) -> None:
        """Sample the next token of every active row."""
        rows = slice(0, self._active if self._experts else self._kernels.rows_at_once(self._active, len(self._row)))
        position, length = self._position[rows], self._longest

        def forward() -> Tensor:
            layout = Decode(self._cache, position, length)
            return self._forward(self._token[rows, None], position[:, None], layout, None)

        forwarded = self._forward
        repeats = self._kernels.captures and isinstance(forwarded, ReplayedDecoder) and forwarded.is_device_only
        memory = Decode(self._cache, position, length).memory() if repeats else ()
        if self._experts:
            logits = forward()
            self._experts.add_tokens(self._row[rows], position)
            outcome = self._sample(logits, rows)
        elif self._cuts:  # the CPU extracts the kept tokens
            logits = self._steps(memory, forward)
            outcome = self._sample(logits[: self._active], slice(0, self._active))
        else:
            outcome = self._steps(memory, lambda: self._sample(forward(), rows))
        self._accept(slice(0, self._active), outcome)

    def _record_contexts(self, rows: list[int], lengths: list[int]) -> None:
        """Record the experts of rows whose full contexts were just prefilled."""
        if self._experts:
            self._experts.add_spans([([row], 0, length) for row, length in zip(rows, lengths, strict=True)])

    def _accept_first(self, logits: Tensor) -> None:
        """Sample a token for the last `len(logits)` active rows, which were just prefilled."""
        slots = slice(self._active - len(logits), self._active)
        self._accept(slots, self._sample(logits, slots))

    def _sample(self, logits: Tensor, slots: slice) -> _Outcome:
        """Sample a token for each of these slots, without synchronising with the device."""
        row, count = self._row[slots], self._count[slots]
        noise = uniform(self._key.seed, self._key.step, self._samples[row], count)
        token, log_prob, candidates = sample_tokens(
            logits, noise, self._sampling, with_candidates=self._kept is not None
        )
        if self._kept is not None:
            self._kept.add(row, count, candidates)
        if self._versions is not None:
            self._versions[row, count] = self._version
        self._tokens[row, count] = token
        self._log_probs[row, count] = log_prob.to(self._log_probs.dtype)
        self._token[slots] = token
        is_real = row < self._num_rows
        count += is_real  # a view, so this updates the state in place
        position = self._position[slots]
        position += is_real

        broken = ~torch.isfinite(log_prob) & is_real
        # torch.isin may sort, which synchronises with the device.
        by_stop_token = (token[:, None] == self._eos).any(dim=-1)
        ended = by_stop_token | (count == self._sampling.max_new_tokens)
        if self._sampling.max_length is not None:
            ended |= position + 1 == self._sampling.max_length
        ended &= is_real
        state = torch.stack([(ended | broken).any(), (position * ~ended).max() + 1])
        return _Outcome(ended, by_stop_token, broken, state)

    def _accept(self, slots: slice, outcome: _Outcome) -> None:
        """Release those of these active slots whose turn ended."""
        has_ended, longest = outcome.state.tolist()
        self._longest = longest if len(outcome.ended) >= self._active else max(longest, self._longest)
        size = slots.stop - slots.start
        self._num_tokens += size
        if has_ended:
            ended, by_stop_token, broken = (x[:size] for x in (outcome.ended, outcome.by_stop_token, outcome.broken))
            if broken.any():
                self._raise_not_finite(int(self._row[slots][broken][0]))
            self._release(slots.start + ended.nonzero().flatten(), by_stop_token[ended])

    def _release(self, slots: Tensor, by_stop_token: Tensor) -> None:
        """Release rows whose turn ended, by a stop token or a limit, and move the last remaining rows into the gaps."""
        columns = (slots, self._row[slots], self._count[slots], self._position[slots], by_stop_token)
        for slot, row, length, position, stopped in zip(*(column.tolist() for column in columns), strict=True):
            self._lengths[row] = length
            if self._responder is None or not stopped:
                self._keep_prefix(slot, row, position)
                self._finish(row)
            else:
                self._responder.submit_turn(row, self._tokens[row, self._context_end[row] : length].tolist())
                self._paused.append(row)
                self._cache_prefix(slot, row, position)
        stays = torch.ones(self._active, dtype=torch.bool, device=self._device)
        stays[slots] = False
        remaining = self._active - len(slots)
        gap, mover = (~stays[:remaining]).nonzero().flatten(), remaining + stays[remaining:].nonzero().flatten()
        if len(gap):
            self._cache.move(mover, gap, self._longest)
            self._state[:, gap] = self._state[:, mover]
        self._state[:, remaining : self._active] = self._free
        self._active = remaining

    def _keep_prefix(self, slot: int, row: int, length: int) -> None:
        """Store the prefix of a finished row, without its last token, for prompts of later calls."""
        if self._prefixes is not None and self._prefixes.has_room(length):
            prompt = self._prompts[row]
            sampled = self._tokens[row, : length - len(prompt)].cpu().numpy().astype(prompt.dtype)
            self._prefixes.add(np.concatenate([prompt, sampled]), self._cache.copy_of(slot, length))

    def _finish(self, row: int) -> None:
        self._num_finished += 1
        if self._on_finished is not None:
            self._on_finished(FinishedResponse(row, self._tokens[row, : self._lengths[row]].tolist()))

    def _raise_not_finite(self, row: int) -> None:
        n = self._sampling.n
        raise ValueError(
            f"sample {self._key.sample(row)} (response {row % n} to prompts[{row // n}]), token "
            f"{int(self._count[self._row == row][0]) - 1}: the model's logits are NaN or infinite. "
            "If it has been trained, it diverged: start again, or resume from an earlier checkpoint, with a lower "
            "actor_rollout_ref.actor.optim.lr. Otherwise its weights are damaged, or too large for "
            f"{self._dtype} (actor_rollout_ref.rollout.dtype)"
        )

    def progress(self) -> RolloutProgress:
        """Return the progress of the call."""
        return RolloutProgress(self._num_finished, self._num_rows, self._num_tokens)

    def result(self) -> RolloutBatch:
        """Return all rows, after `step` has returned False."""
        n, width = self._sampling.n, max(self._lengths)
        length, rows = torch.tensor(self._lengths), torch.arange(self._num_rows)
        prompt_ids = pad_sequence([torch.tensor(prompt) for prompt in self._prompts], batch_first=True)
        response_ids = self._tokens[:-1, :width].to("cpu", copy=True)
        sampled = torch.arange(width) < length[:, None]
        for row, begin, end in self._reply_spans:
            sampled[row, begin:end] = False
        return RolloutBatch(
            uid=rows // n,
            prompt_ids=prompt_ids.long().repeat_interleave(n, dim=0),
            prompt_length=self._prompt_length.repeat_interleave(n),
            response_ids=response_ids,
            response_length=length,
            response_mask=sampled,
            rollout_log_probs=self._log_probs[:-1, :width].to("cpu", copy=True),
            truncated=~torch.isin(response_ids[rows, length - 1], self._eos.cpu()),
            policy_version=self._oldest_version(sampled),
            token_versions=None if self._versions is None else self._versions[:-1, :width].to("cpu", copy=True),
            kept=None if self._kept is None else self._kept.result(width),
            routed_experts=self._experts.result(prompt_ids.shape[1] + width) if self._experts else None,
            batch_size=[self._num_rows],
        )

    def _oldest_version(self, sampled: Tensor) -> Tensor:
        """Return [B] the version of the oldest weights that sampled a token of the row."""
        if self._versions is None:
            return torch.full((self._num_rows,), self._version)
        versions = self._versions[:-1, : sampled.shape[1]].cpu()
        return versions.masked_fill(~sampled, torch.iinfo(torch.int64).max).amin(dim=-1)


def max_row_length(prompts: Sequence[TokenIds], sampling: SamplingParams) -> int:
    """Return the maximum number of tokens of prompt and response together."""
    return max(len(prompt) + sampling.room(len(prompt)) for prompt in prompts)
