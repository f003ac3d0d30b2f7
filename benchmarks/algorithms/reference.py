"""The same task learned by a plain loop of PyTorch, as a line to compare with: nothing of tether but task and model."""

from __future__ import annotations

import time

import torch
from torch.distributions import Categorical

from benchmarks.algorithms.reward import compute_score
from benchmarks.algorithms.tasks import EOS, GO, PAD, TOKENS, Learned, Task, tiny_llama

RESPONSES = 16
EPOCHS, MINI_BATCHES = 2, 2
LEARNING_RATE = 7e-3
CLIP = 0.2


def learn_by_hand(task: Task, steps: int, seed: int) -> Learned:
    """PPO's clipped loss, with the score minus the mean of the prompt's answers as advantage."""
    start = time.perf_counter()
    torch.manual_seed(seed)
    model = tiny_llama(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    eos = TOKENS.index(EOS)

    def log_probs_of(rows: torch.Tensor) -> Categorical:
        width = rows.shape[1] - task.max_response_length
        return Categorical(logits=model(rows).logits[:, width - 1 : -1])

    @torch.no_grad()
    def sample(answers: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prompts = [(prompt + GO, truth) for prompt, truth in task.prompts for _ in range(answers)]
        rows = torch.tensor([[TOKENS.index(letter) for letter in prompt] for prompt, _ in prompts])
        width = rows.shape[1]
        for _ in range(task.max_response_length):
            rows = torch.cat([rows, Categorical(logits=model(rows).logits[:, -1]).sample()[:, None]], dim=1)
        response = rows[:, width:]
        ended = (response == eos).long()
        mask = (ended.cumsum(dim=1) - ended) == 0  # up to and with the first end
        texts = [
            "".join(TOKENS[t] for t in row[kept].tolist() if TOKENS[t] not in (EOS, PAD))
            for row, kept in zip(response, mask, strict=True)
        ]
        pairs = zip(texts, prompts, strict=True)
        scores = [compute_score(task.name, text, truth)["score"] for text, (_, truth) in pairs]
        return rows, mask, torch.tensor(scores)

    before, curve = float(sample(32)[2].mean()), []
    for _ in range(steps):
        rows, mask, scores = sample(RESPONSES)
        curve.append(float(scores.mean()))
        groups = scores.view(-1, RESPONSES)
        deviations = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)
        advantages = deviations.view(-1, 1)
        actions = rows[:, -task.max_response_length :]
        with torch.no_grad():
            old = log_probs_of(rows).log_prob(actions)
        for _ in range(EPOCHS):
            for part in torch.randperm(len(rows)).chunk(MINI_BATCHES):
                ratio = (log_probs_of(rows[part]).log_prob(actions[part]) - old[part]).exp()
                gain = torch.minimum(ratio * advantages[part], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[part])
                optimizer.zero_grad()
                (-(gain * mask[part]).sum() / mask[part].sum()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
    return Learned(before, float(sample(32)[2].mean()), curve, time.perf_counter() - start)
