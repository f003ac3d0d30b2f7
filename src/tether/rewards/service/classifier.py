"""Reward models behind vLLM's or SGLang's ``/classify``: a conversation in, the raw output of its head back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, outcome_of
from tether.rewards.service.endpoint import Endpoint, EndpointError

Api = Literal["vllm", "sglang"]
Written: TypeAlias = tuple[str | None, Sequence[int]]
"""A conversation as the reward model reads it: its text, or None where that is read as other tokens, and its tokens."""


@dataclass(frozen=True)
class ServedRewardModel:
    """Asks a server for the score of one response."""

    write: Callable[[RewardRequest], Written | RewardError]
    endpoint: Endpoint
    api: Api
    model: str
    """Its name on the server."""

    def __call__(self, request: RewardRequest) -> RewardOutcome:
        """Score a response.

        Raises:
            EndpointError: no answer, or one without a score, or the server has read other tokens than were meant.
        """
        written = self.write(request)
        if isinstance(written, RewardError):
            return written
        text, ids = written
        answer = self.endpoint.ask(self._body(text, ids))
        score, read = _vllm(answer) if self.api == "vllm" else _sglang(answer)
        if score is None:
            raise EndpointError(f"the server at {self.endpoint.url} gave no score: {str(answer)[:300]}")
        if read is not None and read != len(ids):
            raise EndpointError(
                f"the server at {self.endpoint.url} read {read} tokens, and the conversation has {len(ids)}: it adds "
                "special tokens of its own, or has another tokenizer than reward_model.model.path"
            )
        return outcome_of(score)

    def _body(self, text: str | None, ids: Sequence[int]) -> dict[str, Any]:
        if self.api == "sglang":
            return {"model": self.model, "input_ids": list(ids)}
        # Token ids only where they have to be: older versions of vLLM take text alone.
        # The raw output, not its sigmoid: `activation` before vLLM 0.11.2, `use_activation` since.
        raw = {"activation": False, "use_activation": False}
        return {"model": self.model, "input": list(ids) if text is None else text, "add_special_tokens": False, **raw}


def _vllm(answer: Any) -> tuple[float | None, int | None]:
    """The score in an answer and the tokens that were read; None for what is not there."""
    match answer:
        case {"data": [{"probs": [int() | float() as score]}], **rest} if not isinstance(score, bool):
            return score, _count(rest.get("usage"))
    return None, None


def _sglang(answer: Any) -> tuple[float | None, int | None]:
    """See `_vllm`."""
    match answer:
        case {"embedding": [int() | float() as score], **rest} | [
            {"embedding": [int() | float() as score], **rest}
        ] if not isinstance(score, bool):
            return score, _count(rest.get("meta_info"))
    return None, None


def _count(usage: Any) -> int | None:
    match usage:
        case {"prompt_tokens": int(count)}:
            return count
    return None
