"""What prompts must be for an engine to answer them."""

from __future__ import annotations

from collections.abc import Sequence

from tether.batch import TokenIds
from tether.rollout.protocol import SamplingParams


def check_prompts(prompts: Sequence[TokenIds], sampling: SamplingParams, context: int | None) -> None:
    """See that each prompt can be answered.

    Args:
        prompts: to be answered.
        sampling: how long responses may be.
        context: the model's ``max_position_embeddings``, where it has any.

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
                f"model's max_position_embeddings of {context}. "
                "Lower data.max_prompt_length or data.max_response_length"
            )
