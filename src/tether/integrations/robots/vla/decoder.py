"""Scores and samples action tokens after an embedded prompt; subclasses embed the prompt.

With A action tokens::

    [prompt ... its end] [action token 1] ... [action token A - 1]
                   |            |
         predicts token 1    token 2      ...

OpenVLA (Kim et al. 2024) decodes its tokens one after the other. OpenVLA-OFT (Kim et al. 2025) reads A - 1 placeholders
instead, so that one pass predicts all tokens. Values are computed from the hidden state at the end of the prompt, which
does not depend on actions.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import DynamicCache, LlamaForCausalLM

from tether.control.policies.spec import ObservationBatch, Observations
from tether.integrations.robots.vla.spec import ACTION_BINS, VlaSpec


@dataclass(frozen=True)
class EncodedPrompt:
    """A batch of embedded prompts."""

    embedded: Tensor
    """[B, P, E]"""
    mask: Tensor | None = None
    """[B, P]: False for padding, to which nothing attends; None without padding."""

    def mask_with(self, count: int) -> Tensor | None:
        """Return `mask` extended by `count` tokens after the prompt."""
        return None if self.mask is None else nn.functional.pad(self.mask, (0, count), value=True)


class ActionDecoder(nn.Module):
    """A causal transformer over embedded prompts; a subclass sets `language` and `placeholders`, and embeds the
    prompts.

    Args:
        spec: the spec of the policy.
    """

    language: LlamaForCausalLM
    placeholders: Tensor | None
    """[A - 1, E]: embedded placeholders of OpenVLA-OFT; None if action tokens are decoded one after the other."""

    def __init__(self, spec: VlaSpec) -> None:
        super().__init__()
        self.spec = spec

    @abstractmethod
    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """Return the inputs of `prompt` for observations [..., *shape]."""

    @abstractmethod
    def prompt(self, obs: Observations) -> EncodedPrompt:
        """Embed the prompts of B observations, given the result of `inputs`."""

    def forward(self, prompt: EncodedPrompt, bins: Tensor) -> tuple[Tensor, Tensor]:
        """Score all action tokens in one pass.

        Args:
            prompt: the prompts of B observations.
            bins: [B, A] chosen bins, which OpenVLA reads and OpenVLA-OFT does not.

        Returns:
            Scores [B, A, bins] divided by the temperature, and the hidden state at the end of the prompt [B, E].
        """
        following = self._following(bins[:, :-1]).to(prompt.embedded.dtype)
        inputs = torch.cat([prompt.embedded, following], dim=1)
        hidden = self._hidden(inputs, prompt.mask_with(following.shape[1]))[:, prompt.embedded.shape[1] - 1 :]
        return self.scores(hidden), hidden[:, 0]

    def end_of_prompt(self, prompt: EncodedPrompt) -> Tensor:
        """Return the hidden state [B, E] from which values are computed."""
        return self._hidden(prompt.embedded, prompt.mask)[:, -1]

    def choose(self, prompt: EncodedPrompt, noise: Tensor | None) -> Tensor:
        """Sample action bins [B, A] one after the other, or for OpenVLA-OFT all at once.

        Args:
            prompt: the prompts of B observations.
            noise: Gumbel noise [B, A, bins]; None: choose the most likely bins.
        """
        if self.placeholders is not None:
            ignored = torch.zeros(len(prompt.embedded), self.spec.action_tokens, dtype=torch.int64)
            scores, _ = self(prompt, ignored)
            return (scores if noise is None else scores + noise).argmax(dim=-1)
        cache, chosen, inputs = DynamicCache(), list[Tensor](), prompt.embedded
        for number in range(self.spec.action_tokens):
            scores = self.scores(self._hidden(inputs, prompt.mask_with(number), cache)[:, -1])
            chosen.append((scores if noise is None else scores + noise[:, number]).argmax(dim=-1))
            inputs = self._following(chosen[-1][:, None])
        return torch.stack(chosen, dim=1)

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the scores [..., bins] of the bins, in at least float32.

        The bins are the last token ids in reverse order; other tokens cannot be chosen.
        """
        size, wide = self.spec.vocab_size, torch.promote_types(hidden.dtype, torch.float32)
        weight = self.language.get_output_embeddings().weight[size - ACTION_BINS : size].flip(0)
        return hidden.to(wide) @ weight.to(wide).T / self.spec.temperature

    def _following(self, bins: Tensor) -> Tensor:
        """Embed the tokens after the prompt: bins [B, n] as tokens, or placeholders."""
        if self.placeholders is not None:
            return self.placeholders.expand(len(bins), -1, -1)
        return self.language.get_input_embeddings()(self.spec.vocab_size - 1 - bins)

    def _hidden(self, inputs: Tensor, mask: Tensor | None, cache: object = None) -> Tensor:
        """Return the last hidden states [B, S, E].

        Args:
            inputs: [B, S, E] embeddings.
            mask: [B, cache length + S]: False for padding, which is not counted in positions; None without padding.
            cache: keys and values of earlier tokens; extended in place.
        """
        positions = None if mask is None else (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
        out = self.language.model(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state
