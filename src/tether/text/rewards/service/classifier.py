"""Reward models served by vLLM's or SGLang's ``/classify``, which returns the raw output of the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, outcome_of
from tether.text.rewards.service.endpoint import Endpoint, EndpointError

Api = Literal["vllm", "sglang"]
EncodedConversation: TypeAlias = tuple[str | None, Sequence[int]]
"""The text and the token ids of a conversation. The text is None if it would be tokenized to other ids."""


@dataclass(frozen=True)
class ServedRewardModel:
    """Queries a server for the score of one response."""

    encode: Callable[[RewardRequest], EncodedConversation | RewardError]
    endpoint: Endpoint
    api: Api
    model: str
    """Name of the model on the server."""

    def __call__(self, request: RewardRequest) -> RewardOutcome:
        """Score a response.

        Raises:
            EndpointError: there is no answer, it has no score, or the server has read other tokens.
        """
        encoded = self.encode(request)
        if isinstance(encoded, RewardError):
            return encoded
        text, ids = encoded
        answer = self.endpoint.ask(self._body(text, ids))
        score, num_tokens = _parse_vllm(answer) if self.api == "vllm" else _parse_sglang(answer)
        if score is None:
            raise EndpointError(f"the server at {self.endpoint.url} returned no score: {str(answer)[:300]}")
        if num_tokens is not None and num_tokens != len(ids):
            raise EndpointError(
                f"the server at {self.endpoint.url} read {num_tokens} tokens, but the conversation has {len(ids)}: it "
                "adds special tokens, or has another tokenizer than reward_model.model.path"
            )
        return outcome_of(score)

    def _body(self, text: str | None, ids: Sequence[int]) -> dict[str, Any]:
        if self.api == "sglang":
            return {"model": self.model, "input_ids": list(ids)}
        # Token ids are sent only if necessary, because older versions of vLLM accept only text.
        # Both options request the raw output instead of its sigmoid: vLLM 0.11.2 renamed `activation` to
        # `use_activation`.
        raw = {"activation": False, "use_activation": False}
        return {"model": self.model, "input": list(ids) if text is None else text, "add_special_tokens": False, **raw}


def _parse_vllm(answer: Any) -> tuple[float | None, int | None]:
    """Return the score in an answer and the number of tokens that the server read; None if missing."""
    match answer:
        case {"data": [{"probs": [int() | float() as score]}], **other} if not isinstance(score, bool):
            return score, _num_tokens(other.get("usage"))
    return None, None


def _parse_sglang(answer: Any) -> tuple[float | None, int | None]:
    """Return the score in an answer and the number of tokens that the server read; None if missing."""
    match answer:
        case {"embedding": [int() | float() as score], **other} | [
            {"embedding": [int() | float() as score], **other}
        ] if not isinstance(score, bool):
            return score, _num_tokens(other.get("meta_info"))
    return None, None


def _num_tokens(usage: Any) -> int | None:
    match usage:
        case {"prompt_tokens": int(count)}:
            return count
    return None
