"""Records of the episodes of a step, for `tether view`; `tether.metrics.records` is the file.

A rollout has segments of episodes: what lies between two resets of an environment, or between a reset and the beginning
or the end of the rollout. ``columns`` has a number for each segment, ``episodes`` the steps of a few: those with
the highest, the lowest and the median return and one more, as many as the budget allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tether.batch import EnvBatch
from tether.loop.protocol import Experience
from tether.metrics.records import RecordFile, pack
from tether.observations import TASK, Array, ObsLayout, ObsPart, decode_text

MAX_NUMBERS = 64
"""Largest number of entries of an observation that is recorded as numbers."""
MAX_COMPRESSION = 20
"""Pictures that are larger than so many times the budget are not compressed to see whether they fit."""
FLOAT32_MAX = np.finfo(np.float32).max
MAX_SEGMENTS = 4096
"""Segments of a step in ``columns``; the first ones."""


@dataclass(frozen=True)
class EpisodeRecorder:
    """Records the episodes of each step, as a `tether.loop.protocol.StepRecorder`."""

    file: RecordFile
    layout: ObsLayout
    """The fields of an observation."""

    @property
    def is_due(self) -> bool:
        return self.file.is_due

    def record(self, step: int, experience: Experience[EnvBatch, None], before: object, trained: object) -> None:
        segments = _Segments(experience.batch, self.layout)
        if not len(segments.row):
            return
        with self.file.recording(step) as add:
            used = add("columns", {name: pack(column[:MAX_SEGMENTS]) for name, column in segments.columns.items()})
            recorded, left_out, budget = list[dict[str, object]](), 0, self.file.max_bytes - used
            for segment, reasons in segments.chosen(step).items():
                one, size = segments.steps(segment, budget)
                if size > budget:
                    left_out += 1
                    continue
                budget -= size
                recorded.append({"segment": segment, "reasons": reasons} | one)
            fields = {field.name: {"kind": field.kind, "shape": field.shape} for field in self.layout}
            add(
                "episodes",
                {"rows": recorded, "left_out": left_out, "observation": fields, "chunk": segments.batch.chunk},
            )


@dataclass(frozen=True)
class _Segments:
    """The segments of episodes of a rollout, in the order of rows and then of time."""

    batch: EnvBatch
    layout: ObsLayout

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row, first step and end of each segment."""
        row, first, end = self._all_bounds
        carried_out = self._sums[1] > 0
        return row[carried_out], first[carried_out], end[carried_out]

    @cached_property
    def _all_bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row, first step and end of each segment, including those in which an environment only waited."""
        last = (self.batch.terminated | self.batch.truncated).numpy()
        last[:, -1] = True
        row, end = np.nonzero(last)
        first = np.concatenate([[0], end[:-1] + 1])
        first[np.concatenate([[True], row[1:] != row[:-1]])] = 0
        return row, first, end + 1

    @cached_property
    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Sum of rewards, and number of steps that were carried out, of each of `_all_bounds`."""
        valid = self.batch.valid.numpy()
        row, first, _ = self._all_bounds
        starts = row * valid.shape[1] + first
        rewards = np.where(valid, self.batch.token_level_scores.numpy(), 0.0)
        return (
            np.add.reduceat(rewards.ravel().astype(np.float64), starts),
            np.add.reduceat(valid.ravel().astype(np.int64), starts),
        )

    @property
    def row(self) -> NDArray[np.int64]:
        """The row of each segment."""
        return self._bounds[0]

    @cached_property
    def columns(self) -> Mapping[str, NDArray[np.generic]]:
        """What is known of each segment, by name."""
        row, first, end = self._bounds
        reward, length = (sums[self._sums[1] > 0] for sums in self._sums)
        batch = self.batch
        starts = batch.starts.numpy()[row, first // batch.chunk] | (first > 0)
        return {
            "env": row.astype(np.int32),
            "first": first.astype(np.int32),
            "return": np.clip(reward, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32),
            "length": length.astype(np.int32),
            "from_start": starts,
            "terminated": batch.terminated.numpy()[row, end - 1],
            "truncated": batch.truncated.numpy()[row, end - 1],
        }

    def chosen(self, step: int) -> Mapping[int, list[str]]:
        """Return the segments to record step by step, each with the reasons."""
        columns, reasons = self.columns, dict[int, list[str]]()
        complete = np.asarray(columns["from_start"]) & (
            np.asarray(columns["terminated"]) | np.asarray(columns["truncated"])
        )
        candidates = np.flatnonzero(complete) if complete.any() else np.arange(len(self.row))
        order = candidates[np.argsort(np.asarray(columns["return"])[candidates], kind="stable")]
        picks = {
            "best": order[-1], "worst": order[0], "median": order[len(order) // 2],
            "random": candidates[step * 2654435761 % len(candidates)],
        }  # fmt: skip
        for reason, segment in picks.items():
            if int(segment) < MAX_SEGMENTS:
                reasons.setdefault(int(segment), []).append(reason)
        return reasons

    def steps(self, segment: int, budget: int) -> tuple[dict[str, object], int]:
        """Return the steps of a segment, and about how many bytes they take.

        Observations that do not fit into the budget are left out, and named.
        """
        batch, chunk = self.batch, self.batch.chunk
        row, first, end = (int(bound[segment]) for bound in self._bounds)
        count = batch.token_level_scores.shape[1]
        values = {
            name: pack(_by_step(tensor[row], count)[first:end])
            for name, tensor in {
                "rewards": batch.token_level_scores,
                "shaped_rewards": batch.token_level_rewards,
                "values": None if batch.values is None else batch.values[:, :-1].flatten(1),
                "advantages": batch.advantages,
                "returns": batch.returns,
                "log_probs": None if batch.old_log_probs is None else batch.old_log_probs.flatten(2).sum(-1),
            }.items()
            if tensor is not None
        }
        actions = batch.actions[row].reshape(count, -1)[first:end].numpy()
        one: dict[str, object] = {"env": row, "first": first, "values": values, "actions": pack(actions)}
        size = sum(len(str(packed["data"])) + 80 for packed in [*values.values(), pack(actions)])
        observed, left_out = dict[str, object](), list[str]()
        for field in self.layout:
            array = self._observed(field, row, first // chunk, -(-end // chunk))
            if field.kind == "text":
                observed[field.name] = decode_text(array[0]) if field.name == TASK else "text"
                continue
            is_image = field.kind == "image"
            if array.nbytes > MAX_COMPRESSION * budget if is_image else field.width > MAX_NUMBERS:
                left_out.append(field.name)
                continue
            packed = pack(array if is_image else array.reshape(len(array), -1))
            if size + len(packed["data"]) > budget:
                left_out.append(field.name)
                continue
            observed[field.name] = packed
            size += len(packed["data"])
        return one | {"observations": observed, "left_out": left_out}, size

    def _observed(self, field: ObsPart, row: int, first: int, end: int) -> Array:
        """Return the observations before the decisions of a segment, and the last one of its episode if it is known."""
        batch = self.batch
        shown: Array = batch.obs[field.name][row, first : end + 1].numpy()
        if batch.starts[row, end]:  # what follows is the first observation of the next episode
            finals, steps = (at.numpy() for at in batch.final_at)
            found = np.flatnonzero((finals == row) & (steps == end * batch.chunk - 1))
            shown = shown[:-1]
            if len(found):
                shown = np.concatenate([shown, batch.final_obs[field.name][found[:1]].numpy()])
        return shown


def _by_step(values: Tensor, steps: int) -> NDArray[np.float32]:
    """Return values of decisions or of steps as values of steps."""
    numbers: NDArray[np.float32] = values.detach().float().cpu().numpy()
    return np.repeat(numbers, steps // len(numbers))
