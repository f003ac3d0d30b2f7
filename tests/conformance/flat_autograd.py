"""`FlatEngine` with the gradients of autograd: the definition that its closed forms are held to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tether.control.learning.flat import FlatEngine
from tether.control.learning.losses import ControlLoss, Draws, Outputs, Samples, decision_outputs
from tether.loop.engines.protocol import LossSizes


class FlatAutogradEngine(FlatEngine):
    """Owns and trains a control policy of any kind; see `FlatEngine`, which is faster and gives the same gradient."""

    def _gradients(self, mini: Samples, loss: ControlLoss, draws: Draws) -> Outputs:
        rows, width = mini.decisions(), self.policy.head.width
        count = len(rows.actions)
        sizes = LossSizes(count if rows.mask is None else int(rows.mask.sum()), count)
        pieces = list(mini.split(self._decisions_at_once(mini)))
        selected = self._selected(pieces, rows, loss, draws)
        if selected is not None:
            whole = selected
            if mini.memory is not None:
                kept = mini.memory.selected
                whole = selected.new_zeros(*kept.shape, selected.shape[1])
                whole[kept] = selected
            pieces = list(replace(mini, selected=whole).split(self._decisions_at_once(mini)))
        self._flat.grads.zero_()
        said = []
        for piece in pieces:
            with torch.enable_grad():
                found = decision_outputs(self.policy, piece)
                found.outputs.retain_grad()
                loss(found, piece.decisions(), sizes).loss.backward()
            said.append(found)
        if loss.critic_only:
            self._flat.grads[self._flat.slices[0]].zero_()
        values = [found.values.detach() for found in said if found.values is not None]
        log_probs = loss.log_probs(torch.cat([found.log_probs.detach() for found in said]), rows.mask, self._chunk)
        entropy = torch.cat([found.entropy.detach() for found in said])
        outputs = Outputs(log_probs, entropy, torch.cat(values) if values else None, None)
        if loss.critic_only:
            return outputs
        by_outputs = torch.cat([found.outputs.grad for found in said if found.outputs.grad is not None])
        norm = torch.linalg.vector_norm(by_outputs)
        token_loss = loss.token_loss(log_probs, replace(rows, selected=selected), width)
        return replace(outputs, loss=token_loss, policy_grad_norm=norm)

    def _decisions_at_once(self, mini: Samples) -> int:
        of_each = 1 if mini.memory is None else mini.memory.selected.shape[1]
        return max(of_each, self.policy.micro_batch or len(mini) * of_each)

    def _selected(self, pieces: list[Samples], rows: Samples, loss: ControlLoss, draws: Draws) -> Tensor | None:
        """The tokens that the loss treats apart, chosen over all micro-batches."""
        if loss.critic_only or not loss.selects:
            return None
        columns = torch.cat([decision_outputs(self.policy, piece).log_probs for piece in pieces])
        return loss.select(loss.log_probs(columns, rows.mask, self._chunk), rows, self.policy.head.width, draws)
