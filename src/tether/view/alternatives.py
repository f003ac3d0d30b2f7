"""Other tokens that a checkpoint finds likely at each token of a recorded response.

A run does not record alternatives. On request another process (`tether.commands.likely_tokens`) loads the checkpoint
closest to the weights that sampled the response, and computes them; the viewer itself does not load models.
"""

from __future__ import annotations

from tether.types import JsonObject
from tether.view.process import run_json_process
from tether.view.queries import sample
from tether.view.run import RunFolder

COUNT = 8
"""Number of alternatives per token."""


def request_of(run: RunFolder, step: int, row: int) -> JsonObject:
    """Return the request for a response, with all inputs of the process that loads the checkpoint.

    Raises:
        ValueError: the tokens of the response were not recorded, or the run has no checkpoint.
    """
    one = sample(run, step, row)
    if one["tokens"] is None:
        raise ValueError(f"sample {row} of step {step}: {one['why_no_tokens']}")
    if one["checkpoint"] is None:
        raise ValueError(
            f"{run.folder} has no checkpoint, from which alternatives are computed; trainer.save_freq saves them"
        )
    return {
        "model": str(run.checkpoints[one["checkpoint"]].resolve()),
        "reference": run.setting("actor_rollout_ref.model.path"),
        "checkpoint": one["checkpoint"],
        "prompt_ids": one["tokens"]["prompt_ids"],
        "response_ids": one["tokens"]["ids"],
        "temperature": run.setting("actor_rollout_ref.rollout.temperature") or 1.0,
        "dtype": run.setting("actor_rollout_ref.rollout.dtype") or "auto",
        "count": COUNT,
    }


def compute_alternatives(request: JsonObject, step: int) -> JsonObject:
    """Return the most likely tokens at each position of a response, and the probability of the actual token.

    If the reference, the model from which the run started, can be loaded, its probabilities are included.

    Args:
        request: the result of `request_of`.
        step: the step of the response.

    Raises:
        ValueError: the checkpoint cannot be loaded, or loading exceeds the timeout.
    """
    answer = run_json_process("tether.commands.likely_tokens", request, request["model"])
    saved = request["checkpoint"]
    source = f"Recomputed from the checkpoint of step {saved}, at temperature {request['temperature']:g}"
    if saved != step - 1:
        source += f"; the response was sampled with the weights of step {step - 1}, so its probabilities differ"
    reference = f"The reference is {request['reference']}"
    if answer["why_no_reference"]:
        reference = f"Without the reference: {answer['why_no_reference']}"
    return {"source": f"{source}. {reference}.", "tokens": answer["tokens"]}
