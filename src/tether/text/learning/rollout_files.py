"""Training samples on disk, one jsonl file per step, for users and `tether critic pretrain`.

Each line is one response. Its first keys are those of verl's rollout dumps::

    input, output   prompt and response as text, special tokens written out
    gts, score      ground truth; the reward, null if it abstained or failed
    step            training step
    data_source, index, uid                     source of the prompt, its row there, its index in the step
    prompt_ids, response_ids, response_mask     tokens; 1 if the update trains on the token
    rewards                                     reward of each response token, after shaping and the KL penalty
    policy_version                              version of the weights that sampled it; the lowest if there are several
    token_versions                              version for each response token, if weights changed within a batch
    ...                                         other values that the reward returned
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from tether.batch import TrainBatch, filled
from tether.metrics.loggers import LogFailed
from tether.text.data.prompts import decode
from tether.text.learning.collector import ScoredResponses
from tether.text.rewards.outcome import Score


@dataclass(frozen=True)
class RolloutFiles:
    """Writes the samples of each step to ``<folder>/<step>.jsonl``; a step that is repeated replaces its file."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase

    def write(self, step: int, experience: ScoredResponses, batch: TrainBatch) -> None:
        """Write the samples of a step; `batch` has its `token_level_rewards`.

        Raises:
            LogFailed: the file cannot be written.
        """
        lines = (json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in self._records(step, experience, batch))
        path, unfinished = self.folder / f"{step}.jsonl", self.folder / f".{step}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
            unfinished.replace(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise LogFailed(
                error.errno,
                f"{path}: cannot be written ({error.strerror}). Free space there, or name another folder with "
                "trainer.rollout_data_dir",
            ) from error

    def _records(self, step: int, experience: ScoredResponses, batch: TrainBatch) -> Iterator[dict[str, object]]:
        rollout, mask = experience.rollout, batch.response_mask
        rewards = torch.where(mask, filled(batch.token_level_rewards), 0.0)
        for row, outcome in enumerate(experience.outcomes):
            prompt, length = experience.prompt_of(row), int(rollout.response_length[row])
            prompt_ids = rollout.prompt_ids[row, : int(rollout.prompt_length[row])].tolist()
            response = rollout.response_ids[row, :length].tolist()
            score = experience.report.scores[row]
            record = {
                "input": decode(self.tokenizer, prompt_ids),
                "output": decode(self.tokenizer, response),
                "gts": prompt.ground_truth,
                "score": None if math.isnan(score) else score,
                "step": step,
                "data_source": prompt.data_source,
                "index": prompt.index,
                "uid": int(rollout.uid[row]),
                "prompt_ids": prompt_ids,
                "response_ids": response,
                "response_mask": mask[row, :length].long().tolist(),
                "rewards": rewards[row, :length].tolist(),
            }
            if rollout.policy_version is not None:
                record["policy_version"] = int(rollout.policy_version[row])
            if rollout.token_versions is not None:
                record["token_versions"] = rollout.token_versions[row, :length].tolist()
            extra = outcome.extra if isinstance(outcome, Score) else {}
            yield record | {key: value for key, value in extra.items() if key not in record}


@dataclass(frozen=True)
class StoredResponse:
    """The fields of a scored response that a critic is pretrained on."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[bool]
    rewards: list[float]
    """The reward of each response token."""


def read_rollouts(folder: Path) -> list[StoredResponse]:
    """Read the scored responses of all files in `folder`, by step and line.

    Raises:
        ValueError: no files, no scored response, or a line that is not one of `RolloutFiles`.
    """
    files = sorted((path for path in folder.glob("*.jsonl") if path.stem.isdigit()), key=lambda path: int(path.stem))
    if not files:
        raise ValueError(
            f"{folder}: no rollouts (files 1.jsonl, 2.jsonl, ...). "
            f"Train with {shlex.quote(f'trainer.rollout_data_dir={folder}')}"
        )
    responses = [response for path in files for response in _read(path)]
    if not responses:
        raise ValueError(f"{folder}: no response in {len(files)} files has a score, so there is nothing to learn")
    return responses


def _read(path: Path) -> Iterator[StoredResponse]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not a line of JSON ({error}); fix or delete the file") from error
            response = _response(record, f"{path}:{number}")
            if record["score"] is not None and any(response.response_mask):
                yield response


def _response(record: Any, location: str) -> StoredResponse:
    names = ("score", "prompt_ids", "response_ids", "response_mask", "rewards")
    missing = [name for name in names if not isinstance(record, dict) or name not in record]
    if missing:
        raise ValueError(
            f"{location}: no {', '.join(missing)}. A rollout needs the keys that tether writes with "
            "trainer.rollout_data_dir; delete files of other programs"
        )
    prompt, response, mask, rewards = (record[name] for name in names[1:])
    if not prompt or not len(response) == len(mask) == len(rewards):
        raise ValueError(
            f"{location}: {len(prompt)} prompt_ids, {len(response)} response_ids, {len(mask)} response_mask and "
            f"{len(rewards)} rewards; the prompt must not be empty, and the others need one entry per response token"
        )
    return StoredResponse(prompt, response, [bool(valid) for valid in mask], [float(reward) for reward in rewards])
