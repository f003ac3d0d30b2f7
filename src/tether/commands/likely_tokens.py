"""The process behind the alternatives of `tether view`: python -m tether.commands.likely_tokens

It reads a request of `tether.view.alternatives` from its standard input, and writes for each token of the response its
log-probability, its rank and the likeliest tokens, as JSON. It computes on the CPU: a GPU may be busy with the run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tether.text.data.prompts import decode
from tether.text.loading import DTYPES, number_format
from tether.text.models.load import load_causal_lm, load_tokenizer
from tether.text.models.output import lm_head_of, logits_of
from tether.types import JsonObject

CHUNK = 128
"""Positions whose logits are in memory together."""


@torch.no_grad()
def likely_tokens(
    model: Path, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float, dtype: str, count: int
) -> Iterator[JsonObject]:
    """Yield what a model finds likely at each token of a response.

    Args:
        model: folder of the model.
        prompt_ids: token ids before the response.
        response_ids: token ids of the response.
        temperature: what logits are divided by; 0 counts as 1, because greedy sampling has no distribution.
        dtype: number format of the weights; ``auto`` is the fastest one of this machine.
        count: number of alternatives.

    Raises:
        ValueError: the model cannot be loaded.
    """
    tokenizer = load_tokenizer(model)
    policy = load_causal_lm(model, dtype=DTYPES[number_format(dtype, torch.device("cpu"))])
    policy.set_attn_implementation("sdpa")  # a plain forward pass, without tether's packing
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    hidden = policy.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0, len(prompt_ids) - 1 :]
    head = lm_head_of(policy)
    for first in range(0, len(response_ids), CHUNK):
        logits = logits_of(hidden[first : first + CHUNK], head).float() / (temperature or 1.0)
        log_probs = logits.log_softmax(dim=-1)
        chosen = log_probs.gather(-1, ids[0, len(prompt_ids) + first :][: len(logits), None])[:, 0]
        ranks = (log_probs > chosen[:, None]).sum(-1) + 1
        top = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
        for at in range(len(logits)):
            candidates = top.indices[at].tolist()
            yield {
                "log_prob": chosen[at].item(),
                "rank": ranks[at].item(),
                "ids": candidates,
                # A tokenizer may strip the space before the first token of a text, but not that before the second.
                "texts": [decode(tokenizer, [id, id])[len(decode(tokenizer, [id])) :] for id in candidates],
                "log_probs": top.values[at].tolist(),
            }


def main() -> None:
    """Answer one request."""
    os.nice(10)  # what trains on this machine goes first
    request = json.load(sys.stdin)
    del request["checkpoint"]
    answers = list(likely_tokens(Path(request.pop("model")), **request))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
