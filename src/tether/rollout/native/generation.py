"""The loop of the `native` engine: one call's prompts go in, and every step samples a token for each active row."""

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
from tether.kernels import AttentionLayout, backend
from tether.keyed_random import uniform
from tether.models.output import KeptRecorder
from tether.rollout.native.expert_recorder import ExpertRecorder
from tether.rollout.native.kv_cache import Continue, Decode, KVCache, Prefill, Prefix
from tether.rollout.native.recorded_decoder import ReplayedDecoder
from tether.rollout.native.repeated_step import RepeatedStep
from tether.rollout.native.sampling import draw
from tether.rollout.protocol import FinishedResponse, NoiseKey, Partner, RolloutProgress, SamplingParams

Forward = Callable[[Tensor, Tensor, AttentionLayout, Tensor | None], Tensor]
"""Token ids [R, Q], their positions [R, Q], the layout, and the flat positions [M] where logits are wanted (None: all)
-> logits [M, V]."""


class _Drawn(NamedTuple):
    """Of a token for each of M slots."""

    ended: Tensor
    """[M] bool, whether the row's turn ends with it."""
    by_itself: Tensor
    """[M] bool, whether it ends a response."""
    broken: Tensor
    """[M] bool, whether the logits gave no distribution."""
    state: Tensor
    """[2] int64: whether any row ended or is broken, and the keys of the longest row that goes on."""


class Generation:
    """One call of `generate`. Result rows are numbered 0..N-1; the R rows being decoded fill the slots 0..R-1."""

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
        partner: Partner | None,
        version: int,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        self._experts = recorder
        self._forward, self._prompts, self._sampling, self._key = forward, prompts, sampling, key
        self._device, self._dtype = model.device, model.dtype
        self._max_prefill_tokens = max_prefill_tokens
        self._prompt_tokens = torch.from_numpy(np.concatenate(prompts)).to(self._device, torch.int64)
        self._prompt_length = torch.tensor([len(prompt) for prompt in prompts])
        self._on_finished, self._partner = on_finished, partner
        self._version = version
        self._versions: Tensor | None = None  # of each token, once weights have changed
        self._num_rows = len(prompts) * sampling.n
        self._num_started = 0
        self._num_finished = 0
        self._num_tokens = 0
        self._active = 0
        self._cache = KVCache(num_slots, longest_row(prompts, sampling), self._device)
        self._kernels = backend(self._device.type, self._dtype)
        self._steps = RepeatedStep(self._kernels)
        # By slot: the row, its last token, the position of that token, the number of tokens sampled so far.
        self._state = torch.zeros(4, num_slots, dtype=torch.int64, device=self._device)
        self._row, self._token, self._position, self._count = self._state
        # A free slot may be decoded with the others: as the first token of a row beyond the last.
        self._free = torch.tensor([[self._num_rows], [0], [0], [0]], device=self._device)
        self._state[:] = self._free
        self._longest = 0  # keys of the longest active row, the one of its next token included
        self._eos = torch.tensor([] if sampling.ignore_eos else sorted(eos), dtype=torch.int64, device=self._device)
        shape = (self._num_rows + 1, sampling.max_new_tokens)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._log_probs = torch.zeros(shape, dtype=torch.promote_types(model.dtype, torch.float32), device=self._device)
        self._lengths = [0] * self._num_rows
        self._paused: deque[int] = deque()  # rows that the partner answers, in the order in which their turns ended
        self._heard = [0] * self._num_rows  # tokens of the row up to the end of the last answer
        self._answers: list[tuple[int, int, int]] = []  # row, and where an answer begins and ends in it
        self._kept_prefixes: dict[int, Prefix] = {}  # of paused rows: all but the last token
        self._room_to_keep = max_kept_tokens  # tokens of such prefixes that there still is room for
        vocabulary = model.config.get_text_config().vocab_size
        self._cuts = sampling.cuts(vocabulary)
        recorded = sampling.record_kept and self._cuts
        self._kept = KeptRecorder(self._num_rows, shape[1], vocabulary, self._device) if recorded else None

    def renew(self, forward: Forward, version: int) -> None:
        """Go on with other weights; between two steps.

        Args:
            forward: with these weights.
            version: of them.
        """
        if self._versions is None:
            self._versions = torch.full(self._tokens.shape, self._version, device=self._device)
        self._forward, self._version = forward, version
        self._steps = RepeatedStep(self._kernels)
        self._prefill_again()

    def step(self) -> bool:
        """Prefill waiting prompts or decode one token for every active row; False when nothing is left to do."""
        waiting = self._num_rows - self._num_started
        free = self._cache.num_slots - self._active
        if waiting == 0 and self._active == 0 and not self._paused:
            return False
        # A prefill has a fixed cost, so a few slots are let go empty before they are filled together.
        if free >= min(waiting, max(1, self._cache.num_slots // 8)) > 0:
            self._accept_first(self._prefill(free))
        elif free and len(self._paused) > 3 * self._active // 4:
            self._go_on(free)
        else:
            self._decode()
        return True

    def _prefill_again(self) -> None:
        """Recompute, by the present weights, the cache of rows that are being decoded, and drop that of others."""
        for row in list(self._kept_prefixes):
            self._take_prefix(row)
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

    def _go_on(self, free: int) -> None:
        """Wait for the answers to the rows that paused first, half of them, and prefill those that are not over."""
        kept: dict[int, Prefix] = {}  # rows whose cache was kept, and of the others the whole context
        whole: dict[int, Tensor] = {}
        tokens = 0
        for _ in range(min(free, (len(self._paused) + 1) // 2)):
            row = self._paused.popleft()
            goes_on, prefix = self._append_answer(row), self._take_prefix(row)
            if not goes_on:
                self._finish(row)
            elif prefix is not None:
                kept[row] = prefix
                tokens += len(self._piece(row, prefix))
            else:
                whole[row] = torch.cat([self._prompt_of(row), self._tokens[row, : self._heard[row]]])
                tokens += len(whole[row])
            if tokens >= self._max_prefill_tokens:
                break
        parts = [self._continued(kept)] if kept else []
        if whole:
            lengths = [len(context) for context in whole.values()]
            parts.append(self._prefilled(torch.cat(list(whole.values())), lengths, [1] * len(whole)))
            self._record_contexts(list(whole), lengths)
            self._occupy_again(list(whole), lengths)
        if parts:
            self._accept_first(torch.cat(parts))

    def _continued(self, kept: dict[int, Prefix]) -> Tensor:
        """Put kept prefixes into the next slots, and the tokens that came after them; logits after each."""
        pieces = [self._piece(row, prefix) for row, prefix in kept.items()]
        starts, lengths = [_length(prefix) for prefix in kept.values()], [len(piece) for piece in pieces]
        for slot, prefix in enumerate(kept.values(), start=self._active):
            self._cache.put(prefix, slot)
        layout = Continue.plan(self._cache, starts, lengths, first_slot=self._active)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self._device)
        logits = self._forward(torch.cat(pieces)[None], layout.position[None], layout, ends)
        if self._experts:
            self._experts.add_pieces([([row], first, n) for row, first, n in zip(kept, starts, lengths, strict=True)])
        self._occupy_again(list(kept), [start + length for start, length in zip(starts, lengths, strict=True)])
        return logits

    def _piece(self, row: int, prefix: Prefix) -> Tensor:
        """Tokens of a row that were added since its prefix was kept: the last one of its turn, and the answer."""
        said = _length(prefix) - len(self._prompts[row // self._sampling.n])
        return self._tokens[row, said : self._heard[row]]

    def _keep_prefix(self, slot: int, row: int, length: int) -> None:
        """Keep what the cache holds of a row, where there is room. The row that paused last comes back last, so it is
        the one that is not kept."""
        if length <= self._room_to_keep:
            self._room_to_keep -= length
            self._kept_prefixes[row] = self._cache.copy_of(slot, length)

    def _take_prefix(self, row: int) -> Prefix | None:
        prefix = self._kept_prefixes.pop(row, None)
        if prefix is not None:
            self._room_to_keep += _length(prefix)
        return prefix

    def _append_answer(self, row: int) -> bool:
        """Put the partner's answer behind the row's last turn; False where there is none."""
        assert self._partner is not None
        said, sampling = self._lengths[row], self._sampling
        limit = sampling.room(len(self._prompts[row // sampling.n]))
        answer = self._partner.answer(row, limit - said - 1)
        if answer is None:
            return False
        assert 0 < len(answer) < limit - said, (row, len(answer))
        self._heard[row] = said + len(answer)
        self._tokens[row, said : self._heard[row]] = torch.tensor(answer, device=self._device)
        self._answers.append((row, said, self._heard[row]))
        return True

    def _prompt_of(self, row: int) -> Tensor:
        prompt = row // self._sampling.n
        start = int(self._prompt_length[:prompt].sum())
        return self._prompt_tokens[start : start + int(self._prompt_length[prompt])]

    def _prefill(self, free: int) -> Tensor:
        """Start as many waiting rows as there is room for; [rows, V] logits after their prompts."""
        last = min(self._num_started + free, self._num_rows)
        shares = groupby(range(self._num_started, last), key=lambda row: row // self._sampling.n)
        lengths: list[int] = []
        copies: list[int] = []
        for prompt, rows in shares:
            tokens = len(self._prompts[prompt])
            if lengths and sum(lengths) + tokens > self._max_prefill_tokens:
                break
            lengths.append(tokens)
            copies.append(len(list(rows)))
        start = int(self._prompt_length[: self._num_started // self._sampling.n].sum())
        logits = self._prefilled(self._prompt_tokens[start : start + sum(lengths)], lengths, copies)
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(copies))
        started = torch.arange(self._num_started, self._num_started + len(owner))
        if self._experts:
            rows = started.split(copies)
            self._experts.add_pieces([(of.tolist(), 0, length) for of, length in zip(rows, lengths, strict=True)])
        self._occupy(started, torch.tensor(lengths)[owner], torch.zeros_like(started))
        self._num_started += len(owner)
        return logits[owner.to(self._device)]

    def _prefilled(self, ids: Tensor, lengths: list[int], copies: list[int], first_slot: int | None = None) -> Tensor:
        """Put contexts that are laid end to end into slots, the next ones, in copies; logits after each."""
        layout = Prefill.plan(self._cache, lengths, copies, self._active if first_slot is None else first_slot)
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self._device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self._device)
        return self._forward(ids[None], positions[None], layout, ends)

    def _occupy(self, rows: Tensor, lengths: Tensor, counts: Tensor) -> None:
        """Give the next slots to these rows, whose contexts have these lengths, so many tokens of them in responses."""
        slots = slice(self._active, self._active + len(rows))
        self._row[slots] = rows.to(self._device)
        self._position[slots] = lengths.to(self._device) - 1
        self._count[slots] = counts.to(self._device)
        self._active += len(rows)

    def _occupy_again(self, rows: list[int], lengths: list[int]) -> None:
        """Give the next slots to rows that were answered."""
        self._occupy(torch.tensor(rows), torch.tensor(lengths), torch.tensor([self._heard[row] for row in rows]))

    def _decode(self) -> None:
        """Draw the next token of every active row."""
        rows = slice(0, self._active if self._experts else self._kernels.rows_at_once(self._active, len(self._row)))
        position, length = self._position[rows], self._longest

        def forward() -> Tensor:
            layout = Decode(self._cache, position, length)
            return self._forward(self._token[rows, None], position[:, None], layout, None)

        forwarded = self._forward
        repeats = self._kernels.captures and isinstance(forwarded, ReplayedDecoder) and forwarded.is_of_device_alone
        memory = Decode(self._cache, position, length).memory() if repeats else ()
        if self._experts:
            logits = forward()
            self._experts.add_tokens(self._row[rows], position)
            drawn = self._draw(logits, rows)
        elif self._cuts:  # what is cut is looked for on the host
            logits = self._steps(memory, forward)
            drawn = self._draw(logits[: self._active], slice(0, self._active))
        else:
            drawn = self._steps(memory, lambda: self._draw(forward(), rows))
        self._accept(slice(0, self._active), drawn)

    def _record_contexts(self, rows: list[int], lengths: list[int]) -> None:
        """Of rows whose whole contexts were just prefilled."""
        if self._experts:
            self._experts.add_pieces([([row], 0, length) for row, length in zip(rows, lengths, strict=True)])

    def _accept_first(self, logits: Tensor) -> None:
        """Draw a token for the last `len(logits)` active rows, which were just prefilled."""
        slots = slice(self._active - len(logits), self._active)
        self._accept(slots, self._draw(logits, slots))

    def _draw(self, logits: Tensor, slots: slice) -> _Drawn:
        """Sample a token for each of these slots, all by the device alone."""
        row, count = self._row[slots], self._count[slots]
        noise = uniform(self._key.seed, self._key.step, self._key.first_sample + row, count)
        token, log_prob, kept = draw(logits, noise, self._sampling, with_kept=self._kept is not None)
        if self._kept is not None:
            self._kept.add(row, count, kept)
        if self._versions is not None:
            self._versions[row, count] = self._version
        self._tokens[row, count] = token
        self._log_probs[row, count] = log_prob.to(self._log_probs.dtype)
        self._token[slots] = token
        is_real = row < self._num_rows
        count += is_real  # a view: this is the state itself
        position = self._position[slots]
        position += is_real

        broken = ~torch.isfinite(log_prob) & is_real
        by_itself = (token[:, None] == self._eos).any(dim=-1)  # torch.isin may sort, and wait for it
        ended = by_itself | (count == self._sampling.max_new_tokens)
        if self._sampling.max_length is not None:
            ended |= position + 1 == self._sampling.max_length
        ended &= is_real
        state = torch.stack([(ended | broken).any(), (position * ~ended).max() + 1])
        return _Drawn(ended, by_itself, broken, state)

    def _accept(self, slots: slice, drawn: _Drawn) -> None:
        """Let those of these active slots go that end with what was drawn."""
        has_ended, longest = drawn.state.tolist()
        self._longest = longest if len(drawn.ended) >= self._active else max(longest, self._longest)
        size = slots.stop - slots.start
        self._num_tokens += size
        if has_ended:
            ended, by_itself, broken = (x[:size] for x in (drawn.ended, drawn.by_itself, drawn.broken))
            if broken.any():
                self._refuse(int(self._row[slots][broken][0]))
            self._release(slots.start + ended.nonzero().flatten(), by_itself[ended])

    def _release(self, slots: Tensor, by_itself: Tensor) -> None:
        """Let rows go whose turn ended, by itself or by a limit, and close the gaps with the last rows that stay."""
        columns = (slots, self._row[slots], self._count[slots], self._position[slots], by_itself)
        for slot, row, length, position, ended_itself in zip(*(column.tolist() for column in columns), strict=True):
            self._lengths[row] = length
            if self._partner is None or not ended_itself:
                self._finish(row)
            else:
                self._partner.listen(row, self._tokens[row, self._heard[row] : length].tolist())
                self._paused.append(row)
                self._keep_prefix(slot, row, position)
        stays = torch.ones(self._active, dtype=torch.bool, device=self._device)
        stays[slots] = False
        kept = self._active - len(slots)
        gap, mover = (~stays[:kept]).nonzero().flatten(), kept + stays[kept:].nonzero().flatten()
        if len(gap):
            self._cache.move(mover, gap, self._longest)
            self._state[:, gap] = self._state[:, mover]
        self._state[:, kept : self._active] = self._free
        self._active = kept

    def _finish(self, row: int) -> None:
        self._num_finished += 1
        if self._on_finished is not None:
            self._on_finished(FinishedResponse(row, self._tokens[row, : self._lengths[row]].tolist()))

    def _refuse(self, row: int) -> None:
        n = self._sampling.n
        raise ValueError(
            f"sample {self._key.first_sample + row} (response {row % n} to prompts[{row // n}]), token "
            f"{int(self._count[self._row == row][0]) - 1}: the model's logits are NaN or infinite. "
            "If it has been trained, it diverged: begin again, or from an earlier checkpoint, with a lower "
            "actor_rollout_ref.actor.optim.lr. Else its weights are damaged, or too large for "
            f"{self._dtype} (actor_rollout_ref.rollout.dtype)"
        )

    def progress(self) -> RolloutProgress:
        """Progress of the call."""
        return RolloutProgress(self._num_finished, self._num_rows, self._num_tokens)

    def result(self) -> RolloutBatch:
        """All rows, once `step` has returned False."""
        n, width = self._sampling.n, max(self._lengths)
        length, rows = torch.tensor(self._lengths), torch.arange(self._num_rows)
        prompt_ids = pad_sequence([torch.tensor(prompt) for prompt in self._prompts], batch_first=True)
        response_ids = self._tokens[:-1, :width].to("cpu", copy=True)
        sampled = torch.arange(width) < length[:, None]
        for row, begin, end in self._answers:
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
            policy_version=self._oldest(sampled),
            token_versions=None if self._versions is None else self._versions[:-1, :width].to("cpu", copy=True),
            kept=None if self._kept is None else self._kept.result(width),
            routed_experts=self._experts.result(prompt_ids.shape[1] + width) if self._experts else None,
            batch_size=[self._num_rows],
        )

    def _oldest(self, sampled: Tensor) -> Tensor:
        """[B] version of the oldest weights that drew a token of the row."""
        if self._versions is None:
            return torch.full((self._num_rows,), self._version)
        versions = self._versions[:-1, : sampled.shape[1]].cpu()
        return versions.masked_fill(~sampled, torch.iinfo(torch.int64).max).amin(dim=-1)


def longest_row(prompts: Sequence[TokenIds], sampling: SamplingParams) -> int:
    """Most tokens that prompt and response together may have."""
    return max(len(prompt) + sampling.room(len(prompt)) for prompt in prompts)


def _length(prefix: Prefix) -> int:
    return prefix[0][0].shape[1]
