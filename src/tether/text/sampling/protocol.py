"""The protocol of a rollout engine, which samples responses to prompts; and the check of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tether.batch import RolloutBatch, TokenIds, WeightUpdate
from tether.text.sampling.config import RolloutConfig


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling."""

    max_new_tokens: int
    n: int = 1
    """Responses per prompt; they are adjacent in the result."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 or 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches top_p; 1 keeps all."""
    ignore_eos: bool = False
    record_kept: bool = True
    """Record the tokens that top_k and top_p kept, for replay in training; nothing is recorded if they keep all."""
    record_experts: bool = False
    """Record the experts that each token was routed to, for replay in training."""
    max_length: int | None = None
    """Maximum length of prompt and response together; longer responses are truncated. None: only max_new_tokens
    applies."""

    @classmethod
    def from_config(cls, rollout: RolloutConfig) -> SamplingParams:
        """Return the parameters of training responses."""
        return cls(
            max_new_tokens=rollout.response_length,
            max_length=rollout.max_model_len,
            n=rollout.n,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            ignore_eos=rollout.ignore_eos,
            record_experts=rollout.enable_rollout_routing_replay,
        )

    @classmethod
    def for_validation(cls, rollout: RolloutConfig) -> SamplingParams:
        """Return the parameters of validation responses."""
        val = rollout.val_kwargs
        return cls(
            max_new_tokens=rollout.response_length,
            max_length=rollout.max_model_len,
            n=val.n,
            temperature=val.temperature if val.do_sample else 0.0,
            top_k=val.top_k,
            top_p=val.top_p,
            record_kept=False,
        )

    def room(self, prompt_length: int) -> int:
        """Return the maximum length of a response to a prompt of this length; below 1 if the prompt leaves no space."""
        limit = self.max_new_tokens
        return limit if self.max_length is None else min(limit, self.max_length - prompt_length)

    def cuts(self, vocabulary: int) -> bool:
        """Return whether top_k or top_p exclude tokens; greedy sampling has no distribution to truncate."""
        return self.temperature > 0 and (0 < self.top_k < vocabulary or self.top_p < 1)


@dataclass(frozen=True)
class NoiseKey:
    """Identifies the random numbers of one call: noise depends only on (seed, step, sample, token)."""

    seed: int
    step: int
    first_sample: int = 0
    """Index of the first sample; response r of prompt p is sample ``first_sample + p * n + r`` of the step."""
    samples: tuple[int, ...] | None = None
    """The sample index of each row of the result; overrides `first_sample`."""

    def sample(self, row: int) -> int:
        """Return the sample index of a row of the result."""
        return self.first_sample + row if self.samples is None else self.samples[row]


@dataclass(frozen=True)
class FinishedResponse:
    """Passed to `on_finished` as soon as a response is complete, so that scoring overlaps generation."""

    row: int
    """Row of the result: prompt index * n + response index."""
    token_ids: list[int]
    """Token ids of the response, including the responder's replies."""


@dataclass(frozen=True)
class RolloutProgress:
    """Passed to `on_progress` after every decoding step."""

    finished: int
    """Number of complete responses."""
    total: int
    """Number of requested responses."""
    tokens: int
    """Tokens sampled so far."""


class Responder(Protocol):
    """Replies to the policy: tools or an environment. A response then contains all turns and the replies between
    them."""

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        """Start to compute the reply to a turn that ended with a stop token; returns immediately.

        Args:
            row: row of the result.
            token_ids: sampled tokens of this turn.
        """
        ...

    def wait_reply(self, row: int, room: int) -> Sequence[int] | None:
        """Wait for the reply to the row's last turn.

        Args:
            row: row of the result.
            room: maximum length of the reply that leaves at least one token for the policy; below 1 if there is no
                space.

        Returns:
            Token ids up to the start of the policy's next turn, at most `room`; None: the conversation is over.
        """
        ...


class RolloutEngine(Protocol):
    """Samples responses from the current policy."""

    eos_token_ids: frozenset[int]
    """Tokens that end a response."""

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of prompt and response together; None: the model sets no limit."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        responder: Responder | None = None,
    ) -> RolloutBatch:
        """Sample ``n`` responses to each prompt.

        With a responder, a response continues after each of its replies; the `response_mask` of replies is False. Which
        rows continue together depends on counts of rows and never on time, so that the same replies give the same
        batch.

        Returns:
            A batch of ``len(prompts) * n`` rows ordered by prompt, then response, in host memory; `uid` is
            the prompt's index.

        Raises:
            ValueError: no prompts, an empty prompt, or one too long for `max_length` or the model's context.
        """
        ...

    def load_weights(self, weights: WeightUpdate) -> None:
        """Sample with these weights from now on; costs nothing if they are shared.

        For the native engine this may also be called from `on_finished` and `on_progress`: incomplete responses
        continue with the new weights, and `token_versions` of the result records the version for each token.
        """
        ...


def check_prompts(prompts: Sequence[TokenIds], sampling: SamplingParams, context: int | None) -> None:
    """Check that each prompt leaves space for a response.

    Args:
        prompts: the prompts.
        sampling: parameters with the lengths of responses.
        context: limit on the tokens of prompt and response together, if the model has any.

    Raises:
        ValueError: no prompts, an empty prompt, or one too long for `max_length` or the context.
    """
    if not prompts:
        raise ValueError("prompts: the list is empty. Pass at least one prompt")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompts[{index}]: no tokens. A prompt needs at least one, such as the BOS token")
        room = sampling.room(len(prompt))
        if room < 1:
            raise ValueError(
                f"prompts[{index}]: {len(prompt)} prompt tokens leave no room for a response in "
                f"{sampling.max_length} tokens. Raise actor_rollout_ref.rollout.max_model_len"
            )
        if context is not None and len(prompt) + room > context:
            raise ValueError(
                f"prompts[{index}]: {len(prompt)} prompt tokens + {room} new tokens exceed the "
                f"model's context of {context} tokens (max_position_embeddings, or longrope's original length). "
                "Lower data.max_prompt_length or data.max_response_length"
            )
