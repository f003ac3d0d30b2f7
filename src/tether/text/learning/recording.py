"""Records the responses of a step for `tether view`, in the file of `tether.metrics.records`.

A step has three records. ``columns`` has one number for each response and column (`_Rows.columns`), ``texts`` the
prompts and the beginning of each response with the values that the reward returned, and ``tokens`` all data about each
token of a few responses: the best, the worst, the median, the one with the largest ratio, the one on which sampler and
trainer differ most, and one of each group whose rewards are all equal, as many as the budget allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tether.batch import TrainBatch
from tether.loop.protocol import Experience
from tether.metrics.records import RecordFile, pack
from tether.text.data.prompts import decode
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.losses import PolicyOutputs
from tether.text.rewards.outcome import RewardError, Score

TOKEN_SHARE = 0.7
"""Share of the budget for the records of tokens; the rest is for texts and columns."""
BYTES_PER_TOKEN = 80
"""Approximate size of a recorded response token."""
MAX_LISTED_GROUPS = 8
"""Maximum number of groups with equal rewards of which one response is recorded token by token."""
MAX_INCOMPLETE = 16
"""Number of consecutive tokens without a complete character after which their text is recorded as it is."""
Floats = NDArray[np.float32]


@dataclass
class SampleRecorder:
    """Records the responses of each step, as a `tether.loop.protocol.StepRecorder`."""

    file: RecordFile
    tokenizer: PreTrainedTokenizerBase
    _pieces: dict[int, str] = field(default_factory=dict, repr=False)
    """Token id -> text, for the tokens so far."""

    @property
    def is_due(self) -> bool:
        return self.file.is_due

    def record(
        self,
        step: int,
        experience: Experience[TrainBatch, ScoredResponses],
        before: PolicyOutputs | None,
        trained: PolicyOutputs | None,
    ) -> None:
        count = len(experience.details.texts)  # further branches of episodes are not recorded
        outputs = [None if outputs is None else outputs[:count] for outputs in (before, trained)]
        rows = _Rows(experience.batch[:count], experience.details, *outputs)
        with self.file.recording(step) as add:
            used = add("columns", {name: pack(column) for name, column in rows.columns.items()})
            tokens = self._tokens(rows, int(TOKEN_SHARE * self.file.max_bytes))
            used += add("tokens", tokens)
            add("texts", _texts(rows, self.file.max_bytes - used))

    def _tokens(self, rows: _Rows, budget: int) -> dict[str, object]:
        recorded: list[dict[str, object]] = []
        left_out = 0
        for row, reasons in rows.chosen.items():
            if BYTES_PER_TOKEN * int(rows.batch.response_length[row]) > budget:
                left_out += 1
                continue
            one = self._row(rows, row) | {"row": row, "reasons": reasons}
            size = len(json.dumps(one, default=str))
            if size > budget:
                left_out += 1
                continue
            budget -= size
            recorded.append(one)
        return {"rows": recorded, "left_out": left_out}

    def _row(self, rows: _Rows, row: int) -> dict[str, object]:
        batch = rows.batch
        prompt = batch.prompt_ids[row, : int(batch.prompt_length[row])].numpy()
        length = int(batch.response_length[row])
        response = batch.response_ids[row, :length].numpy()
        values = {name: pack(_numbers(tensor[row, :length])) for name, tensor in rows.by_token.items()}
        if batch.token_versions is not None:
            values["policy_version"] = pack(batch.token_versions[row, :length].numpy().astype(np.int32))
        return {
            "messages": rows.responses.prompt_of(row).messages,
            "prompt": decode(self.tokenizer, prompt),
            "response": decode(self.tokenizer, response),
            "prompt_ids": pack(prompt.astype(np.int32)),
            "response_ids": pack(response.astype(np.int32)),
            "pieces": self._texts_of(response.tolist()),
            "mask": pack(batch.response_mask[row, :length].numpy()),
            "values": values,
        }

    def _texts_of(self, ids: list[int]) -> list[str]:
        """Return the text of each token; if several tokens form one character, the last one has it and the others are
        empty."""
        pieces: list[str] = []
        incomplete: list[int] = []
        for token in ids:
            piece = self._pieces.get(token)
            if piece is None:
                # Decoded twice, because a tokenizer may strip the space before the first word of a text, but not before
                # the second.
                alone = decode(self.tokenizer, [token])
                piece = self._pieces[token] = decode(self.tokenizer, [token, token])[len(alone) :]
            if "\ufffd" in piece:
                incomplete.append(token)
                joined = decode(self.tokenizer, incomplete)
                is_complete = not joined.endswith("\ufffd") or len(incomplete) == MAX_INCOMPLETE
                pieces.append(joined if is_complete else "")
                incomplete = [] if is_complete else incomplete
                continue
            if incomplete:  # bytes that form no character
                pieces[-1] = decode(self.tokenizer, incomplete)
                incomplete = []
            pieces.append(piece)
        if incomplete:
            pieces[-1] = decode(self.tokenizer, incomplete)
        return pieces


@dataclass(frozen=True)
class _Rows:
    """The responses of a step."""

    batch: TrainBatch
    responses: ScoredResponses
    before: PolicyOutputs | None
    trained: PolicyOutputs | None

    @cached_property
    def by_token(self) -> Mapping[str, Tensor]:
        """The values of each token, as name -> [B, T]."""
        batch = self.batch
        outputs = self.before if self.before is not None else self.trained
        known = {
            "sampler_log_probs": batch.rollout_log_probs,
            "old_log_probs": batch.old_log_probs,
            "new_log_probs": None if self.trained is None else self.trained.log_probs,
            "ref_log_probs": batch.ref_log_probs,
            "entropy": None if outputs is None else outputs.entropy,
            "advantages": batch.advantages,
            "values": batch.values,
            "returns": None if batch.values is None else batch.returns,
            "rewards": batch.token_level_rewards,
            "weights": batch.rollout_is_weights,
            "kept_count": None if batch.kept is None else batch.kept.count,
        }
        return {name: values.detach().cpu() for name, values in known.items() if values is not None}

    @cached_property
    def columns(self) -> Mapping[str, NDArray[np.generic]]:
        """The values of each response, as name -> [B]."""
        batch, mask, known = self.batch, self.batch.response_mask, self.by_token
        prompts = [self.responses.prompt_of(row) for row in range(len(batch))]
        columns: dict[str, NDArray[np.generic]] = {
            "index": np.array([prompt.index for prompt in prompts], dtype=np.int32),
            "group": batch.uid.numpy().astype(np.int32),
            "reward": np.array(self.responses.report.scores, dtype=np.float32),
            "length": batch.response_length.numpy().astype(np.int32),
            "truncated": batch.truncated.numpy(),
        }
        if self.responses.call_seconds:
            columns["reward_seconds"] = np.array(self.responses.call_seconds, dtype=np.float32)
        differences = {
            "ratio": ("new_log_probs", "old_log_probs", _largest),
            "mismatch": ("old_log_probs", "sampler_log_probs", _largest),
            "ref_kl": ("old_log_probs", "ref_log_probs", _mean),
        }
        for name, (one, other, reduce) in differences.items():
            if one in known and other in known:
                columns[name] = _numbers(reduce(known[one] - known[other], mask))
        if "ratio" in columns:
            columns["ratio"] = np.exp(columns["ratio"])
        for name in ("entropy", "values", "returns"):
            if name in known:
                columns[name.removesuffix("s")] = _numbers(_mean(known[name], mask))
        if "advantages" in known:
            advantages = torch.where(mask, known["advantages"], 0.0)
            columns["advantage"] = _numbers(_mean(advantages, mask))
            columns["gradient_share"] = _numbers(advantages.abs().sum(-1) / advantages.abs().sum().clamp(min=1e-12))
            if "ratio" in columns:
                log_ratio = torch.where(mask, known["new_log_probs"] - known["old_log_probs"], 0.0)
                columns["moved"] = _numbers((advantages * log_ratio).sum(-1))
        if batch.policy_version is not None:
            columns["policy_version"] = batch.policy_version.numpy().astype(np.int32)
        return columns | self._parts()

    def _parts(self) -> dict[str, NDArray[np.generic]]:
        """Return the numbers that the reward returned in addition to the score, by name."""
        parts: dict[str, Floats] = {}
        for row, outcome in enumerate(self.responses.outcomes):
            for key, value in outcome.extra.items() if isinstance(outcome, Score) else ():
                if isinstance(value, int | float):
                    parts.setdefault(f"part/{key}", np.full(len(self.batch), np.nan, dtype=np.float32))[row] = value
        return dict(parts)

    @cached_property
    def chosen(self) -> Mapping[int, list[str]]:
        """The responses to record token by token, most important first, each with the reasons for its choice."""
        reasons: dict[int, list[str]] = {}
        for row, reason in self._choices():
            reasons.setdefault(row, []).append(reason)
        return reasons

    def _choices(self) -> Iterator[tuple[int, str]]:
        columns, reward = self.columns, np.asarray(self.columns["reward"], dtype=np.float64)
        scored = np.flatnonzero(np.isfinite(reward))
        if len(scored):
            order = scored[np.argsort(reward[scored], kind="stable")]
            yield int(order[-1]), "best"
            yield int(order[0]), "worst"
            yield int(order[len(order) // 2]), "median"
        for name, reason in (("ratio", "largest ratio"), ("mismatch", "largest mismatch")):
            if name in columns:
                distance = np.abs(np.log(columns[name]) if name == "ratio" else columns[name])
                yield int(np.argmax(np.nan_to_num(distance))), reason
        groups = columns["group"]
        equal = [rows for group in np.unique(groups) if _are_equal(reward[rows := np.flatnonzero(groups == group)])]
        for rows in equal[:MAX_LISTED_GROUPS]:
            yield int(rows[0]), "group without variance"
        if not len(scored):
            yield 0, "first"


def _are_equal(rewards: NDArray[np.float64]) -> bool:
    return len(rewards) > 1 and bool(np.all(rewards == rewards[0]))


def _texts(rows: _Rows, budget: int) -> dict[str, object]:
    """Return the prompts, responses and reward details of a step, truncated to a budget of bytes."""
    responses = rows.responses
    prompts = {int(rows.batch.uid[row]): responses.prompt_of(row) for row in range(len(rows.batch))}
    limit = max(0, budget // (4 * (len(responses.texts) + len(prompts))))  # characters; a character has up to 4 bytes
    listed = {
        group: {
            "index": prompt.index,
            "data_source": prompt.data_source,
            "prompt": "\n".join(str(message.get("content", "")) for message in prompt.messages)[:limit],
            "ground_truth": str(prompt.ground_truth)[:limit],
        }
        for group, prompt in prompts.items()
    }
    details = []
    for text, outcome in zip(responses.texts, responses.outcomes, strict=True):
        one: dict[str, object] = {"response": text[:limit]}
        if len(text) > limit:
            one["cut"] = len(text) - limit
        if isinstance(outcome, Score):
            one["extra"] = recorded_values(outcome, limit)
        elif isinstance(outcome, RewardError):
            one["error"], one["traceback"] = outcome.message[:limit], outcome.traceback[-limit:]
        details.append(one)
    return {"prompts": listed, "rows": details}


def recorded_values(score: Score, limit: int) -> dict[str, object]:
    """Return the values that a reward returned in addition to the score: finite numbers, and other values as text of at
    most `limit` characters."""
    return {
        key: (value if math.isfinite(value) else None) if isinstance(value, int | float) else str(value)[:limit]
        for key, value in score.extra.items()
    }


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Return the value of each row that is farthest from 0, with its sign."""
    inside = torch.where(mask, values, 0.0)
    return inside.gather(-1, inside.abs().argmax(-1, keepdim=True))[..., 0]


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1)


def _numbers(values: Tensor) -> Floats:
    return values.float().numpy()
