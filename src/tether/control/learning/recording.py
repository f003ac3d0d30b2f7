"""Records the episodes of a step for `tether view`; `tether.metrics.records` writes the file.

A rollout consists of segments of episodes, which begin and end at a reset of the environment or at the boundaries of
the rollout. ``columns`` has one number per segment. ``episodes`` has the steps of a few segments, as many as the budget
allows: those with the highest, lowest and median return, and a random one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tether.batch import EnvBatch
from tether.loop.protocol import Experience
from tether.metrics.records import RecordFile, pack
from tether.observations import TASK, Array, ObsLayout, ObsPart, decode_text

MAX_NUMBERS = 64
"""Maximum number of entries of an observation that is recorded as numbers."""
MAX_COMPRESSION = 20
"""Compression factor beyond which images are not expected to fit the budget, so that compressing is not attempted."""
FLOAT32_MAX = np.finfo(np.float32).max
MAX_SEGMENTS = 4096
"""Maximum number of segments per step in ``columns``; later ones are dropped."""


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
            columns: dict[str, object] = {
                name: pack(column[:MAX_SEGMENTS]) for name, column in segments.columns.items()
            }
            used = add("columns", columns | ({"tasks": segments.tasks[0]} if segments.tasks else {}))
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
        """Row, first step and end (exclusive) of each segment."""
        row, first, end = self._all_bounds
        carried_out = self._lengths > 0
        return row[carried_out], first[carried_out], end[carried_out]

    @cached_property
    def _all_bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Row, first step and end of each segment, including segments in which the environment only waited."""
        last = (self.batch.terminated | self.batch.truncated).numpy()
        last[:, -1] = True
        row, end = np.nonzero(last)
        first = np.concatenate([[0], end[:-1] + 1])
        first[np.concatenate([[True], row[1:] != row[:-1]])] = 0
        return row, first, end + 1

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Number of executed steps in each of `_all_bounds`."""
        return self._reduced(np.add, self.batch.valid.numpy().astype(np.int64))

    def _reduced(self, reduce: np.ufunc, values: Array) -> Array:
        """Reduce the values of steps, [M, T], to one value for each of `_all_bounds`."""
        row, first, _ = self._all_bounds
        reduced: Array = reduce.reduceat(values.ravel(), row * values.shape[1] + first)
        return reduced

    @property
    def row(self) -> NDArray[np.int64]:
        """The row of each segment."""
        return self._bounds[0]

    @cached_property
    def columns(self) -> Mapping[str, NDArray[np.generic]]:
        """Name -> value of each segment."""
        row, first, end = self._bounds
        batch, carried_out = self.batch, self._lengths > 0
        rewards = np.where(batch.valid.numpy(), batch.token_level_scores.numpy(), 0.0).astype(np.float64)
        reward = self._reduced(np.add, rewards)[carried_out]
        starts = batch.starts.numpy()[row, first // batch.chunk] | (first > 0)
        columns: dict[str, NDArray[np.generic]] = {
            "env": row.astype(np.int32),
            "first": first.astype(np.int32),
            "return": np.clip(reward, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32),
            "length": self._lengths[carried_out].astype(np.int32),
            "from_start": starts,
            "terminated": batch.terminated.numpy()[row, end - 1],
            "truncated": batch.truncated.numpy()[row, end - 1],
        }
        if batch.success is not None:
            columns["success"] = self._reduced(np.logical_or, batch.success.numpy())[carried_out]
        if batch.seeds is not None:
            columns["seed"] = batch.seeds.numpy()[self._last_decision]
        if self.tasks is not None:
            columns["task"] = self.tasks[1]
        return columns

    @property
    def _last_decision(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and index of the last decision of each segment; at the first one the environment may still be waiting."""
        row, _, end = self._bounds
        return row, (end - 1) // self.batch.chunk

    @cached_property
    def tasks(self) -> tuple[list[str], NDArray[np.int32]] | None:
        """The task descriptions, and the index of each segment's task; None if the environments have no tasks."""
        if not any(field.name == TASK for field in self.layout):
            return None
        codes = np.ascontiguousarray(self.batch.obs[TASK].numpy()[self._last_decision])
        names, index = np.unique(codes.view(f"S{codes.shape[1]}").ravel(), return_inverse=True)
        return [name.decode(errors="replace") for name in names], index.astype(np.int32)

    def chosen(self, step: int) -> Mapping[int, list[str]]:
        """Return the segments whose steps are recorded, each with the reasons for choosing it."""
        columns, reasons = self.columns, dict[int, list[str]]()
        complete = np.asarray(columns["from_start"]) & (
            np.asarray(columns["terminated"]) | np.asarray(columns["truncated"])
        )
        candidates = np.flatnonzero(complete) if complete.any() else np.arange(len(self.row))
        order = candidates[np.argsort(np.asarray(columns["return"])[candidates], kind="stable")]
        picks = {
            "best": order[-1], "worst": order[0], "median": order[len(order) // 2],
            "random": candidates[step * 2654435761 % len(candidates)],  # Knuth's hash: a different one in each step
        }  # fmt: skip
        for reason, segment in picks.items():
            if int(segment) < MAX_SEGMENTS:
                reasons.setdefault(int(segment), []).append(reason)
        return reasons

    def steps(self, segment: int, budget: int) -> tuple[dict[str, object], int]:
        """Return the steps of a segment, and their approximate size in bytes.

        Observations that do not fit into the budget are left out, and their names listed.
        """
        batch, chunk = self.batch, self.batch.chunk
        row, first, end = (int(bound[segment]) for bound in self._bounds)
        count = batch.token_level_scores.shape[1]
        values = {name: pack(_by_step(numbers[row], count)[first:end]) for name, numbers in self._values.items()}
        actions = pack(batch.actions[row].reshape(count, -1)[first:end].numpy())
        one: dict[str, object] = {"env": row, "first": first, "values": values, "actions": actions}
        size = sum(len(packed["data"]) + 80 for packed in [*values.values(), actions])
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

    @cached_property
    def _values(self) -> Mapping[str, NDArray[np.float32]]:
        """Name -> value of each step or decision of each row."""
        batch = self.batch
        known = {
            "rewards": batch.token_level_scores,
            "shaped_rewards": batch.token_level_rewards,
            "values": None if batch.values is None else batch.values[:, :-1].flatten(1),
            "advantages": batch.advantages,
            "returns": batch.returns,
            "log_probs": None if batch.old_log_probs is None else batch.old_log_probs.flatten(2).sum(-1),
        }
        return {name: tensor.detach().float().cpu().numpy() for name, tensor in known.items() if tensor is not None}

    def _observed(self, field: ObsPart, row: int, first: int, end: int) -> Array:
        """Return the observations before the decisions of a segment, and the last one of its episode if it is
        stored."""
        batch = self.batch
        shown: Array = batch.obs[field.name][row, first : end + 1].numpy()
        if batch.starts[row, end]:  # obs[end] is the first observation of the next episode
            finals, steps = (at.numpy() for at in batch.final_at)
            found = np.flatnonzero((finals == row) & (steps == end * batch.chunk - 1))
            shown = shown[:-1]
            if len(found):
                shown = np.concatenate([shown, batch.final_obs[field.name][found[:1]].numpy()])
        return shown


def _by_step(values: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """Return one value per step, repeating values of decisions."""
    return values if len(values) == steps else np.repeat(values, steps // len(values))
