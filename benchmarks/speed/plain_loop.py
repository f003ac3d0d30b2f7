"""The training loop that one writes by hand: transformers, padding, logits in float32, AdamW. It is the peer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from tether.batch import TrainBatch


class PlainLoop:
    """One PPO step on padded rows, in micro-batches of so many rows; everything in bfloat16."""

    def __init__(self, model: PreTrainedModel, micro_rows: int, *, checkpointing: bool = False) -> None:
        self.model, self.micro_rows = model.train(), micro_rows
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)

    def __call__(self, batch: TrainBatch) -> None:
        """Update once."""
        ids, mask, answers = padded(batch)
        assert batch.advantages is not None
        assert batch.old_log_probs is not None
        total = batch.response_mask.sum()
        self.optimizer.zero_grad()
        for start in range(0, len(batch), self.micro_rows):
            rows = slice(start, start + self.micro_rows)
            width = int(mask[rows].sum(dim=-1).max())
            keep = answers.shape[1]
            logits = self.model(ids[rows, :width], attention_mask=mask[rows, :width], use_cache=False).logits
            log_probs = F.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[rows, 1:width, None]).squeeze(-1)
            place = (batch.prompt_length[rows, None] - 1 + torch.arange(keep)).clamp(max=width - 2)
            log_probs = log_probs.gather(1, place)
            ratio = (log_probs - batch.old_log_probs[rows]).exp()
            gain = batch.advantages[rows]
            loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
            ((loss * batch.response_mask[rows]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def padded(batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and attention mask [B, W], padded on the right, and the responses [B, T]."""
    lengths = (batch.prompt_length + batch.response_length).tolist()
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (p, n) in enumerate(zip(batch.prompt_length.tolist(), lengths, strict=True)):
        ids[row, :p], ids[row, p:n] = batch.prompt_ids[row, :p], batch.response_ids[row, : n - p]
        mask[row, :n] = 1
    return ids, mask, batch.response_ids
