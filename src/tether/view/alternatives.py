"""Which other tokens a checkpoint finds likely at each token of a recorded response.

A run records no alternatives. On request another process (`tether.commands.likely_tokens`) loads the checkpoint that is
nearest to the weights that sampled the response, and computes them; the viewer itself loads no model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tether.types import JsonObject
from tether.view.queries import sample
from tether.view.run import RunFolder

COUNT = 8
"""Alternatives of a token."""
TIMEOUT = 900.0
"""Seconds in which a checkpoint must be loaded and answer."""


def request_of(run: RunFolder, step: int, row: int) -> JsonObject:
    """Return what the process that loads the checkpoint needs to know of a response.

    Raises:
        ValueError: the response was not recorded token by token, or the run has no checkpoint.
    """
    if run.kind != "text":
        raise ValueError(f"{run.folder} is a run in a simulator; only responses have tokens")
    one = sample(run, step, row)
    if one["tokens"] is None:
        raise ValueError(f"sample {row} of step {step}: {one['why_no_tokens']}")
    if one["checkpoint"] is None:
        raise ValueError(
            f"{run.folder} has no checkpoint, from which alternatives are computed; trainer.save_freq saves them"
        )
    return {
        "model": str(run.checkpoints[one["checkpoint"]].resolve()),
        "checkpoint": one["checkpoint"],
        "prompt_ids": one["tokens"]["prompt_ids"],
        "response_ids": one["tokens"]["ids"],
        "temperature": run.setting("actor_rollout_ref.rollout.temperature") or 1.0,
        "dtype": run.setting("actor_rollout_ref.rollout.dtype") or "auto",
        "count": COUNT,
    }


def compute_alternatives(request: JsonObject, step: int) -> JsonObject:
    """Return the likeliest tokens at each token of a response, and how likely the token itself is.

    Args:
        request: from `request_of`.
        step: the step of the response.

    Raises:
        ValueError: the checkpoint cannot be loaded, or not in time.
    """
    command = [sys.executable, "-m", "tether.commands.likely_tokens"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{request['model']}: no answer in {TIMEOUT:g} s; is the machine out of memory?") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{request['model']}: {reason}")
    saved = request["checkpoint"]
    source = f"Recomputed from the checkpoint of step {saved}, at temperature {request['temperature']:g}"
    if saved != step - 1:
        source += f"; the response was sampled with the weights of step {step - 1}, so its probabilities differ"
    return {"source": f"{source}.", "tokens": json.loads(done.stdout)}
