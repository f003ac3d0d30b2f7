"""Scores recorded responses again, with the run's reward in its current version or with a function of another file.

Another process (`tether.commands.rescore`) reads the rows of the training data, loads the reward and calls it; the
viewer itself does not run user code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tether.types import JsonObject
from tether.view.process import run_json_process
from tether.view.queries import RECORD_MORE, numbers
from tether.view.run import RunFolder


@dataclass(frozen=True)
class Rescoring:
    """The inputs for scoring responses again, read from a run."""

    request: JsonObject
    """Request for the other process."""
    rows: Sequence[JsonObject]
    """The rows of the table of samples to score."""
    left_out: Sequence[JsonObject]
    """Samples that were only recorded in part, ``{"step": ..., "row": ...}``."""

    def score(self) -> list[JsonObject]:
        """Return the new outcome of each row.

        Raises:
            ValueError: the reward cannot be loaded or needs inputs that were not recorded, or the data are missing.
        """
        if not self.rows:
            return []
        answer = run_json_process("tether.commands.rescore", self.request, self.reward)
        if "error" in answer:
            raise ValueError(answer["error"])
        outcomes: list[JsonObject] = answer["outcomes"]
        return outcomes

    def compare(self, outcomes: Sequence[JsonObject]) -> JsonObject:
        """Return new outcomes next to the recorded ones."""
        compared = [_compared(row, now) for row, now in zip(self.rows, outcomes, strict=True)]
        changed = sum(not one["same_score"] for one in compared)
        return {"reward": self.reward, "rows": compared, "changed": changed, "left_out": list(self.left_out)}

    @property
    def reward(self) -> str:
        """Description of the reward that scores them."""
        name: str | None = self.request["reward"]
        return name or "the reward of the run"


def prepare(run: RunFolder, rows: Sequence[JsonObject], reward: str | None) -> Rescoring:
    """Prepare to score responses of a run again.

    Args:
        run: the run.
        rows: rows of the table of samples, as `tether.view.queries` returns them.
        reward: ``FILE.py:NAME`` of a function instead of the reward of the run.

    Raises:
        ValueError: the run has no reward that can be called again, or no response was recorded completely.
    """
    if run.kind != "text":
        raise ValueError(f"{run.folder}: is a run in a simulator, whose rewards cannot be computed again from a record")
    if not run.config:
        raise ValueError(f"{run.folder}: has no events.jsonl, which names its reward and its data")
    requests = [_request(run, row) for row in rows]
    left_out = [
        {"step": row["step"], "row": row["row"]} for row, one in zip(rows, requests, strict=True) if one is None
    ]
    if left_out and len(left_out) == len(rows):
        raise ValueError(
            f"sample {left_out[0]['row']} of step {left_out[0]['step']}: only the beginning of its response was "
            f"recorded; {RECORD_MORE} bounds it"
        )
    return Rescoring(
        {
            "config": run.config,
            "folder": str(run.folder.resolve()),
            "reward": reward,
            "responses": [one for one in requests if one is not None],
        },
        [row for row, one in zip(rows, requests, strict=True) if one is not None],
        left_out,
    )


def _request(run: RunFolder, row: JsonObject) -> JsonObject | None:
    """Return the response of a row for the other process; None if it was not recorded completely."""
    by_token = (run.record("tokens", row["step"]) or {"rows": []})["rows"]
    recorded = next((one for one in by_token if one["row"] == row["row"]), None)
    is_complete = "response" in row and not row["cut"]
    if recorded is None and not is_complete:
        return None
    return {
        "index": row["index"],
        "text": row["response"] if is_complete else None,
        "prompt_ids": numbers(recorded["prompt_ids"]) if recorded else None,
        "response_ids": numbers(recorded["response_ids"]) if recorded else None,
    }


def _compared(row: JsonObject, now: JsonObject) -> JsonObject:
    recorded = {"score": row["reward"], "extra": row.get("extra", {}), "error": row.get("error")}
    warnings = []
    for name, words in (("prompt", "prompt"), ("ground_truth", "expected answer")):
        before, current = row.get(name) or "", now[name]
        if current[: len(before)] != before:
            warnings.append(f"{now['place']} has another {words} now than the one that was recorded: {current[:80]!r}")
    return {
        "step": row["step"],
        "row": row["row"],
        "recorded": recorded,
        "now": now,
        "same_score": _are_equal(recorded["score"], now["score"]),
        "warnings": warnings,
    }


def _are_equal(recorded: float | None, now: float | None) -> bool:
    """Whether two scores are equal in float32, in which they are recorded; None means no score."""
    if recorded is None or now is None:
        return recorded is now
    return math.isclose(recorded, now, rel_tol=1e-6, abs_tol=1e-9)
