"""Scoring and sampling of action tokens behind an embedded prompt, for any network that embeds it.

With A action tokens::

    [prompt ... its end] [action token 1] ... [action token A - 1]
                   |            |
         predicts token 1    token 2      ...

OpenVLA (Kim et al. 2024) reads its own tokens one after the other. OpenVLA-OFT (Kim et al. 2025) reads A - 1
placeholders in their place, so that one pass gives all tokens. The value is read off the end of the prompt, which sees
no action.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from tether.models.control.observations import ObservationBatch
from tether.models.control.spec import Observations
from tether.models.vla.spec import ACTION_BINS, VlaSpec


@dataclass(frozen=True)
class Prompt:
    """Embedded prompts."""

    embedded: Tensor
    """[B, P, E]"""
    kept: Tensor | None = None
    """[B, P]: False where a token is padding, which nothing sees; None: there is none."""

    def followed_by(self, count: int) -> Tensor | None:
        """`kept`, and as much for that many tokens behind the prompt."""
        return None if self.kept is None else nn.functional.pad(self.kept, (0, count), value=True)


class ActionDecoder(nn.Module):
    """A causal transformer behind what embeds its prompts; a subclass sets `language` and `placeholders`.

    Args:
        spec: the shape.
    """

    language: LlamaForCausalLM
    placeholders: Tensor | None
    """[A - 1, E] of OpenVLA-OFT; None: tokens are read."""

    def __init__(self, spec: VlaSpec) -> None:
        super().__init__()
        self.spec = spec

    @abstractmethod
    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """The inputs of `prompt`, from observations [..., *shape]."""

    @abstractmethod
    def prompt(self, obs: Observations) -> Prompt:
        """The embedded prompts of B observations of `inputs`."""

    def forward(self, prompt: Prompt, bins: Tensor) -> tuple[Tensor, Tensor]:
        """Score all action tokens in one pass.

        Args:
            prompt: of B observations.
            bins: [B, A]: those that were chosen, which OpenVLA reads.

        Returns:
            Scores [B, A, bins] over the temperature, and the hidden state at the end of the prompt [B, E].
        """
        following = self._following(bins[:, :-1])
        inputs = torch.cat([prompt.embedded, following], dim=1)
        hidden = self._hidden(inputs, prompt.followed_by(following.shape[1]))[:, prompt.embedded.shape[1] - 1 :]
        return self.scores(hidden), hidden[:, 0]

    def end_of_prompt(self, prompt: Prompt) -> Tensor:
        """The hidden state [B, E] that values are read off."""
        return self._hidden(prompt.embedded, prompt.kept)[:, -1]

    def choose(self, prompt: Prompt, noise: Tensor | None) -> Tensor:
        """Sample action bins [B, A] one after the other, or all at once.

        Args:
            prompt: of B observations.
            noise: Gumbel noise [B, A, bins]; None takes the likeliest.
        """
        if self.placeholders is not None:
            unread = torch.zeros(len(prompt.embedded), self.spec.action_tokens, dtype=torch.int64)
            scores, _ = self(prompt, unread)
            return (scores if noise is None else scores + noise).argmax(dim=-1)
        cache, chosen, inputs = DynamicCache(), list[Tensor](), prompt.embedded
        for number in range(self.spec.action_tokens):
            scores = self.scores(self._hidden(inputs, prompt.followed_by(number), cache)[:, -1])
            chosen.append((scores if noise is None else scores + noise[:, number]).argmax(dim=-1))
            inputs = self._following(chosen[-1][:, None])
        return torch.stack(chosen, dim=1)

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores [..., bins] of the bins, which are the last ids backwards; no other token can be chosen."""
        size = self.spec.vocab_size
        weight = self.language.get_output_embeddings().weight[size - ACTION_BINS : size].flip(0)
        return hidden @ weight.T / self.spec.temperature

    def _following(self, bins: Tensor) -> Tensor:
        """The tokens behind the prompt: bins [B, n] as tokens, or placeholders."""
        if self.placeholders is not None:
            return self.placeholders.expand(len(bins), -1, -1)
        return self.language.get_input_embeddings()(self.spec.vocab_size - 1 - bins)

    def _hidden(self, inputs: Tensor, kept: Tensor | None, cache: object = None) -> Tensor:
        """Last hidden states [B, S, E].

        Args:
            inputs: [B, S, E].
            kept: [B, of the cache and S]: no padding; positions count these. None: there is no padding.
            cache: holds what stands before, and is added to.
        """
        positions = None if kept is None else (kept.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        out = self.language.model(
            inputs_embeds=inputs,
            attention_mask=kept,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state
