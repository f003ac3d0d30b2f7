"""Reward models: one score for a whole sequence, and the Bradley-Terry loss on pairs of sequences.

A score is computed at the last token that is not padding, as in transformers' sequence classifiers. Sequences with a
common prefix compute it once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from tensordict import TensorClass
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.algorithms import Mean
from tether.batch import RolloutBatch, TrainBatch, on_device
from tether.loop.engine import Engine, LossSizes, LossTerm
from tether.text.data.prompts import ControlTokens, decode, tokenize, write_conversation
from tether.text.learning.losses import ReferenceModel
from tether.text.learning.packing import token_rows
from tether.text.models.layers import Packed
from tether.text.models.output import hidden_states, value_head_of, values_from_hidden
from tether.text.rewards.outcome import Dialogue, RewardError, RewardRequest

TokenList = list[int]


class ScoreOutputs(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The score of each row, on the model's device."""

    scores: Tensor  # [B]


class PairOutputs(TensorClass["nocast"]):  # type: ignore[type-arg]
    """The scores of the two sequences of each row, on the model's device."""

    chosen: Tensor  # [B]
    rejected: Tensor  # [B]


@dataclass(frozen=True)
class ScoreForward:
    """The forward pass of a reward model over rows of `score_batch`."""

    def __call__(
        self, model: PreTrainedModel, batch: TrainBatch, reference: ReferenceModel | None = None
    ) -> ScoreOutputs:
        rows = on_device(token_rows(batch, packed=True), model.device)
        states = hidden_states(model, rows.input_ids, rows.position_ids, rows.layout)[rows.ends]
        return ScoreOutputs(values_from_hidden(states, value_head_of(model)), batch_size=batch.batch_size)


@dataclass(frozen=True)
class PairForward:
    """The forward pass of a reward model over rows of `pair_batch`."""

    def __call__(
        self, model: PreTrainedModel, batch: TrainBatch, reference: ReferenceModel | None = None
    ) -> PairOutputs:
        """Score both sequences of each row at their last tokens."""
        sequences: list[Tensor] = []
        continues: list[int | None] = []
        for row, (ids, mask) in enumerate(zip(batch.response_ids, batch.response_mask, strict=True)):
            first, second = mask.nonzero().flatten().tolist()
            beginning = batch.prompt_ids[row, : batch.prompt_length[row]]
            sequences += [beginning, ids[: first + 1], ids[first + 1 : second + 1]]
            continues += [None, 3 * row, 3 * row]
        layout = Packed(tuple(map(len, sequences)), tuple(continues))
        ends = torch.tensor(layout.lengths).cumsum(0).view(-1, 3)[:, 1:] - 1
        ids = torch.cat(sequences)[None].to(model.device)
        states = hidden_states(model, ids, layout.position_ids(model.device), layout)[ends.flatten()]
        scores = values_from_hidden(states, value_head_of(model)).view(-1, 2)
        return PairOutputs(chosen=scores[:, 0], rejected=scores[:, 1], batch_size=batch.batch_size)


@dataclass(frozen=True)
class PreferenceLoss:
    """The Bradley-Terry loss: minus log sigmoid(chosen - rejected), averaged over pairs.

    The margin of a pair is subtracted inside the sigmoid (Llama 2, arXiv 2307.09288, section 3.2.2).
    """

    def __call__(self, outputs: PairOutputs, batch: TrainBatch, sizes: LossSizes) -> LossTerm:
        margin = outputs.chosen - outputs.rejected
        loss = -logsigmoid(margin - batch.token_level_scores.sum(-1))
        all_rows = torch.ones_like(margin)
        metrics = {"rm/accuracy": Mean.of(margin > 0, all_rows), "rm/margin": Mean.of(margin, all_rows)}
        total = loss.sum() / sizes.num_sequences
        return LossTerm(total, dict(metrics), {"rm/loss": total})


def score_batch(sequences: Sequence[TokenList], prompts: Sequence[Hashable]) -> TrainBatch:
    """Make a batch with a row for each sequence.

    Args:
        sequences: token ids, at least one each.
        prompts: identifies the prompt of each sequence; those with the same one compute their common prefix once.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    uid, shared = [0] * len(sequences), [0] * len(sequences)
    for number, rows in enumerate(groups.values()):
        common = _common_tokens([sequences[row] for row in rows])
        for row in rows:
            uid[row], shared[row] = number, common
    beginnings = [ids[:common] for ids, common in zip(sequences, shared, strict=True)]
    endings = [ids[common:] for ids, common in zip(sequences, shared, strict=True)]
    return marked_rows(uid, beginnings, endings, [[len(ending) - 1] for ending in endings])


def pair_batch(pairs: Sequence[tuple[TokenList, TokenList]], margins: Sequence[float] = ()) -> TrainBatch:
    """Make a batch with a row for each pair (chosen, rejected): their common prefix, then both endings.

    The mask is set at the last tokens of both, so that a split into micro-batches cannot separate a pair; the score of
    a row is the margin of its pair, 0 without `margins`.
    """
    beginnings, endings, ends = [], [], []
    for chosen, rejected in pairs:
        common = _common_tokens([chosen, rejected])
        beginnings.append(chosen[:common])
        endings.append(chosen[common:] + rejected[common:])
        ends.append([len(chosen) - common - 1, len(endings[-1]) - 1])
    return marked_rows(list(range(len(pairs))), beginnings, endings, ends, margins)


def without_padding(ids: TokenList, pad_id: int | None) -> TokenList:
    """Return token ids up to the last one that is not padding, where transformers' sequence classifiers compute the
    score."""
    end = len(ids)
    while end > 1 and ids[end - 1] == pad_id:
        end -= 1
    return ids[:end]


def _common_tokens(sequences: Sequence[TokenList]) -> int:
    """Return the length of the longest common prefix that leaves each sequence at least one token."""
    limit = min(map(len, sequences)) - 1
    return next((at for at in range(limit) if len({ids[at] for ids in sequences}) > 1), limit)


def marked_rows(
    uid: list[int],
    prompts: list[TokenList],
    responses: list[TokenList],
    marked: list[list[int]],
    scores: Sequence[float] = (),
) -> TrainBatch:
    """Make a batch of rows that were not sampled.

    Args:
        uid: the prompt of each row; rows with the same value share it.
        prompts: token ids, at least one each.
        responses: token ids after the prompt.
        marked: for each response the columns in which the mask is set.
        scores: one for each row; 0 without them.
    """

    def padded(rows: list[TokenList]) -> Tensor:
        return pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)

    response_ids, count = padded(responses), len(uid)
    mask = torch.zeros_like(response_ids, dtype=torch.bool)
    for row, columns in enumerate(marked):
        mask[row, columns] = True
    rollout = RolloutBatch(
        uid=torch.tensor(uid),
        prompt_ids=padded(prompts),
        prompt_length=torch.tensor([len(row) for row in prompts]),
        response_ids=response_ids,
        response_length=torch.tensor([len(row) for row in responses]),
        response_mask=mask,
        rollout_log_probs=torch.zeros_like(response_ids, dtype=torch.float32),
        truncated=torch.zeros(count, dtype=torch.bool),
        batch_size=[count],
    )
    return TrainBatch.assemble(rollout, torch.tensor(scores) if scores else torch.zeros(count))


_OF_ASSISTANTS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Control tokens that an assistant may generate, and that templates look for in its messages."""


@dataclass(frozen=True)
class ConversationReader:
    """Converts a response and its prompt into the token ids that a reward model scores."""

    tokenizer: PreTrainedTokenizerBase | None
    """The reward model's tokenizer, whose template formats prompt and response again; None: the policy's token ids are
    used unchanged."""
    pad_id: int | None
    vocabulary: int
    max_length: int
    """Maximum number of tokens of a conversation that the model can score."""
    chat_template: str | None = None
    """A template to use instead of the tokenizer's."""

    def ids(self, request: RewardRequest) -> TokenList | RewardError:
        """Return the token ids of prompt and response, up to the token where the score is computed."""
        assert request.dialogue, "a reward model needs the conversation"
        if self.tokenizer is None:
            assert request.dialogue.response_ids is not None, "the ids of a text that was not sampled"
            ids = [*map(int, request.dialogue.prompt_ids), *map(int, request.dialogue.response_ids)]
        else:
            text = self._text(request.solution_str, request.dialogue, self.tokenizer)
            if isinstance(text, RewardError):
                return text
            ids = self._control.tokenize(text).tolist()
        if not 0 < len(ids) <= self.max_length:
            return RewardError(
                f"the reward model cannot score {len(ids)} tokens of prompt and response, as reward_model.max_length "
                f"or its positions allow 1 to {self.max_length}"
            )
        if max(ids) >= self.vocabulary:
            return RewardError(f"the token {max(ids)} is beyond the {self.vocabulary} tokens of the reward model")
        return without_padding(ids, self.pad_id)

    def written(self, request: RewardRequest) -> tuple[str | None, TokenList] | RewardError:
        """Return the same ids, with a text that tokenizes to them, or None if there is no such text."""
        ids = self.ids(request)
        if isinstance(ids, RewardError) or self.tokenizer is None:
            return ids if isinstance(ids, RewardError) else (None, ids)
        text = decode(self.tokenizer, ids)  # a control token written as text in a response becomes a real one here
        return (text if tokenize([text], self.tokenizer)[0].tolist() == ids else None), ids

    @cached_property
    def _control(self) -> ControlTokens:
        assert self.tokenizer
        return ControlTokens(self.tokenizer)

    def _text(self, response: str, dialogue: Dialogue, tokenizer: PreTrainedTokenizerBase) -> str | RewardError:
        if not dialogue.messages:
            return RewardError(
                "the prompt is token ids without messages, which the reward model's template cannot write; set "
                "reward_model.model.input_tokenizer=null where both models have the same tokenizer"
            )
        content = self._control.as_text(response, spared=_OF_ASSISTANTS)
        try:
            conversation = [*dialogue.messages, {"role": "assistant", "content": content}]
            return write_conversation(conversation, tokenizer, chat_template=self.chat_template)
        except ValueError as error:
            return RewardError(f"of the reward model, {error}")


@dataclass(frozen=True)
class RewardModel:
    """Scores responses with a reward model."""

    engine: Engine[TrainBatch, ScoreOutputs]
    reader: ConversationReader

    def __call__(self, requests: Sequence[RewardRequest]) -> list[float | RewardError]:
        """Return the score of each request, in order, or the reason why it has none."""
        results: list[float | RewardError] = []
        rows: list[int] = []
        sequences: list[TokenList] = []
        prompts: list[tuple[int, ...]] = []
        for row, request in enumerate(requests):
            read = self.reader.ids(request)
            results.append(read if isinstance(read, RewardError) else math.nan)
            if not isinstance(read, RewardError) and request.dialogue:
                rows.append(row)
                sequences.append(read)
                prompts.append(tuple(request.dialogue.prompt_ids))
        if rows:
            scores = self.engine.infer(score_batch(sequences, prompts), ScoreForward()).scores
            for row, score in zip(rows, scores.tolist(), strict=True):
                results[row] = score
        return results
