"""The exact optimum of a policy held to its reference by a KL of weight beta, by counting all answers.

The best policy of E[score] - beta KL(policy, reference) is p(y) = p_ref(y) exp(score(y) / beta) / Z: see for example
Ziegler et al. 2019, arXiv 1909.08593, equation 2. With nine tokens and four places it can be written down.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.algorithms.reward import compute_score
from benchmarks.algorithms.tasks import EOS, PAD, TOKENS, Task, tiny_llama, tokenizer


def answers(max_length: int) -> list[tuple[str, ...]]:
    """Every answer that can be sampled: it ends with the first `EOS`, or at `max_length`."""
    others = [token for token in TOKENS if token != EOS]
    ended = [(*body, EOS) for n in range(max_length) for body in itertools.product(others, repeat=n)]
    return ended + list(itertools.product(others, repeat=max_length))


@torch.no_grad()
def best_score(task: Task, seed: int, beta: float) -> float:
    """Expected score, over all prompts, of the policy that is best for this beta and the model of `seed`."""
    model, encode, found = tiny_llama(seed).eval(), tokenizer(), answers(task.max_response_length)
    texts = ["".join(token for token in answer if token not in (EOS, PAD)) for answer in found]
    width = task.max_response_length
    tokens = torch.tensor([[TOKENS.index(t) for t in (*answer, *[PAD] * (width - len(answer)))] for answer in found])
    mask = torch.tensor([[place < len(answer) for place in range(width)] for answer in found])
    total = 0.0
    for prompt, truth in task.prompts:
        head = encode(prompt + ">", return_tensors="pt").input_ids.expand(len(found), -1)
        logits = model(torch.cat([head, tokens], dim=1)).logits[:, head.shape[1] - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[:, :, None])[:, :, 0]
        reference = (log_probs * mask).sum(dim=-1).double()
        scores = torch.tensor([compute_score(task.name, text, truth)["score"] for text in texts], dtype=torch.float64)
        total += float(((reference + scores / beta).softmax(dim=0) * scores).sum())
    return total / len(task.prompts)
