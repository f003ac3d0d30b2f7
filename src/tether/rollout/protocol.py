"""The protocol of a rollout engine: prompts in, sampled responses out; and the check of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tether.batch import RolloutBatch, TokenIds, WeightUpdate


@dataclass(frozen=True)
class SamplingParams:
    """Settings of sampling."""

    max_new_tokens: int
    n: int = 1
    """Responses a prompt; they stand next to each other in the result."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 or 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose mass reaches top_p; 1 keeps all."""
    ignore_eos: bool = False
    record_kept: bool = True
    """Record which tokens top_k and top_p kept, for training to replay; where they keep all nothing is recorded."""
    record_experts: bool = False
    """Record which experts of a mixture each token went to, for training to replay."""
    max_length: int | None = None
    """Prompt and response together; a response that reaches it is cut. None: only max_new_tokens limits it."""

    def room(self, prompt_length: int) -> int:
        """Most tokens of a response to a prompt of this length; below 1 where the prompt leaves none."""
        most = self.max_new_tokens
        return most if self.max_length is None else min(most, self.max_length - prompt_length)

    def cuts(self, vocabulary: int) -> bool:
        """Whether some of the tokens can never be drawn; greedy sampling has no distribution to cut."""
        return self.temperature > 0 and (0 < self.top_k < vocabulary or self.top_p < 1)


@dataclass(frozen=True)
class NoiseKey:
    """Names the random draws of one call: noise depends on (seed, step, sample, token) and on nothing else."""

    seed: int
    step: int
    first_sample: int = 0
    """Response r of prompt p is sample ``first_sample + p * n + r`` of the step."""


@dataclass(frozen=True)
class FinishedResponse:
    """Handed to `on_finished` the moment a response is complete, so that scoring overlaps generation."""

    row: int
    """Row of the result: prompt index * n + response index."""
    token_ids: list[int]
    """With what a partner said in between."""


@dataclass(frozen=True)
class RolloutProgress:
    """Handed to `on_progress` after every decoding step."""

    finished: int
    """Responses that are complete."""
    total: int
    """Responses asked for."""
    tokens: int
    """Tokens sampled so far."""


class Partner(Protocol):
    """Who the policy talks to: tools, an environment. A response then holds all turns and what was said in between."""

    def listen(self, row: int, token_ids: list[int]) -> None:
        """Begin to answer a turn that ended by itself; returns at once, while others are sampled.

        Args:
            row: of the result.
            token_ids: of this turn, as sampled.
        """
        ...

    def answer(self, row: int, room: int) -> Sequence[int] | None:
        """The answer to the row's last turn, waited for.

        Args:
            row: of the result.
            room: most tokens that leave the policy one more; below 1 where there is no room at all.

        Returns:
            Ids up to where the policy goes on, at most `room` of them; None: the conversation is over.
        """
        ...


class RolloutEngine(Protocol):
    """Samples responses from the current policy."""

    eos_token_ids: frozenset[int]
    """Tokens that end a response."""

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        partner: Partner | None = None,
    ) -> RolloutBatch:
        """Sample ``n`` responses to each prompt.

        With a partner, a response goes on after each of its answers; its `response_mask` is False there. Which rows go
        on at a time follows from counts of rows and never from the clock, so that the same answers give the same
        batch.

        Returns:
            A batch of ``len(prompts) * n`` rows ordered by prompt, then response, in the memory of the host; `uid` is
            the prompt's index.

        Raises:
            ValueError: no prompts, an empty prompt, or one too long for `max_length` or the model's context.
        """
        ...

    def load_weights(self, weights: WeightUpdate) -> None:
        """Sample with these weights from now on; free where they are shared.

        The native engine takes them from `on_finished` and `on_progress` too: the responses that are not complete go on
        with them, and `token_versions` of the result says which token is of which.
        """
        ...


def check_prompts(prompts: Sequence[TokenIds], sampling: SamplingParams, context: int | None) -> None:
    """See that each prompt can be answered.

    Args:
        prompts: to be answered.
        sampling: how long responses may be.
        context: most tokens of prompt and response together by the model, where it has a limit.

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
