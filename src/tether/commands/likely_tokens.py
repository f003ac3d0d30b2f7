"""The process behind the alternatives of `tether view`: python -m tether.commands.likely_tokens

It reads a request of `tether.view.alternatives` from standard input. For each token of the response it writes, as JSON,
the token's log-probability and rank, the most likely tokens, and their log-probabilities under the reference. It
computes on the CPU, because a GPU may be busy with the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import count as count_from
from itertools import repeat
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.runtime.cache import cache_dir
from tether.text.data.prompts import decode
from tether.text.loading import DTYPES, number_format
from tether.text.models.load import load_causal_lm, load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.models.output import lm_head_of, logits_of
from tether.types import JsonObject

CHUNK = 128
"""Number of positions whose logits are in memory at the same time."""


def likely_tokens(
    model: PreTrainedModel,
    reference: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    temperature: float,
    count: int,
) -> Iterator[JsonObject]:
    """Yield a model's most likely tokens at each position of a response, and their log-probabilities under a reference.

    Args:
        model: the model.
        reference: the reference, if any.
        tokenizer: tokenizer of both.
        prompt_ids: token ids before the response.
        response_ids: token ids of the response.
        temperature: divisor of the logits; 0 counts as 1, because greedy sampling has no distribution.
        count: number of alternatives per position.
    """
    begin = len(prompt_ids)
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    distributions = _log_probs(model, ids, begin, temperature or 1.0)
    others = repeat(None) if reference is None else _log_probs(reference, ids, begin, temperature or 1.0)
    for first, log_probs, reference_log_probs in zip(count_from(0, CHUNK), distributions, others, strict=False):
        chosen = ids[0, begin + first :][: len(log_probs), None]
        chosen_log_probs = log_probs.gather(-1, chosen)
        ranks = (log_probs > chosen_log_probs).sum(-1) + 1
        top = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
        for at, token in enumerate(chosen[:, 0].tolist()):
            candidates = top.indices[at].tolist()
            answer = {
                "log_prob": chosen_log_probs[at, 0].item(),
                "rank": ranks[at].item(),
                "ids": candidates,
                # A tokenizer may strip the space before a text's first token, so each is decoded as the second of two.
                "texts": [decode(tokenizer, [id, id])[len(decode(tokenizer, [id])) :] for id in candidates],
                "log_probs": top.values[at].tolist(),
            }
            if reference_log_probs is not None:
                answer["reference_log_prob"] = reference_log_probs[at, token].item()
                answer["reference_log_probs"] = reference_log_probs[at, candidates].tolist()
            yield answer


@torch.no_grad()
def _log_probs(model: PreTrainedModel, ids: Tensor, begin: int, temperature: float) -> Iterator[Tensor]:
    """Yield log-probabilities [positions, V] of the tokens from `begin` on, for at most `CHUNK` positions at a time."""
    hidden = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0, begin - 1 :]
    head = lm_head_of(model)
    for first in range(0, len(hidden), CHUNK):
        yield (logits_of(hidden[first : first + CHUNK], head).float() / temperature).log_softmax(dim=-1)


def load(path: Path | str, dtype: str) -> PreTrainedModel:
    """Load a model that computes on the CPU.

    Args:
        path: a value of `actor_rollout_ref.model.path`.
        dtype: number format of the weights; ``auto`` is the fastest one on this machine.

    Raises:
        ValueError: the model cannot be loaded.
    """
    found = resolve_model_path(path, cache_dir())
    model = load_causal_lm(found, dtype=DTYPES[number_format(dtype, torch.device("cpu"))])
    model.set_attn_implementation("sdpa")  # a plain forward pass, without tether's packing
    return model


def main() -> None:
    """Answer one request."""
    os.nice(10)  # lower priority than training on this machine
    request = json.load(sys.stdin)
    folder, dtype = Path(request["model"]), request["dtype"]
    model, reference, why_no_reference = load(folder, dtype), None, ""
    try:
        reference = load(request["reference"], dtype)
    except ValueError as error:  # for example, the model is on another machine
        why_no_reference = str(error)
    shown = {key: request[key] for key in ("prompt_ids", "response_ids", "temperature", "count")}
    tokens = list(likely_tokens(model, reference, load_tokenizer(folder), **shown))
    json.dump({"tokens": tokens, "why_no_reference": why_no_reference}, sys.stdout)


if __name__ == "__main__":
    main()
