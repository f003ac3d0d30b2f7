"""The state of a row that servers sample. With a responder each turn is a separate request with its own seed.

A turn that is aborted for new weights continues with another request, whose prompt includes the tokens so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tether.keyed_random import seed_of
from tether.text.sampling.protocol import NoiseKey
from tether.text.servers.api import GenerateRequest, SampledRow


@dataclass
class Conversation:
    """The state of one row."""

    request: GenerateRequest
    """The current request."""
    key: NoiseKey
    sample: int
    """Index of the row in its step."""
    purpose: str
    """What its seeds are used for."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-probabilities; 0 for replies."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token; for replies the version at that time."""
    kept_tokens: list[list[int]] = field(default_factory=list)
    """Tokens that could be sampled; empty for replies."""
    reply_spans: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each reply."""
    experts: NDArray[np.int16] | None = None
    """Experts of the tokens of prompt and row that the last request computed."""
    _tokens_in_prompt: int = 0
    """Number of the row's tokens that are part of the current request's prompt."""

    def append_turn(self, turn: SampledRow, version: int) -> None:
        self.token_ids += turn.token_ids
        self.log_probs += turn.log_probs
        self.versions += [version] * len(turn.token_ids)
        self.kept_tokens += turn.kept_tokens or []
        self.experts = self.experts if turn.experts is None else turn.experts

    def current_turn(self) -> list[int]:
        """Return the policy's tokens since the last reply."""
        return self.token_ids[self.reply_spans[-1][1] if self.reply_spans else 0 :]

    def room(self) -> int:
        """Return the maximum number of further tokens."""
        return self.request.max_tokens - (len(self.token_ids) - self._tokens_in_prompt)

    def append_reply(self, reply: Sequence[int], version: int) -> None:
        """Append a reply and prepare the request for the next turn."""
        begin = len(self.token_ids)
        sampled = self.token_ids[self._tokens_in_prompt :]
        self.token_ids += reply
        self.log_probs += [0.0] * len(reply)
        self.versions += [version] * len(reply)
        self.kept_tokens += [[] for _ in reply] if self.request.return_kept_tokens else []
        self.reply_spans.append((begin, len(self.token_ids)))
        self._prepare([*sampled, *reply], len(self.reply_spans))

    def continue_turn(self) -> None:
        """Prepare the request for the remaining tokens of an aborted turn; no change if it had none."""
        if sampled := self.token_ids[self._tokens_in_prompt :]:
            self._prepare(sampled, len(self.reply_spans), len(self.token_ids))

    def _prepare(self, added: list[int], *index: int) -> None:
        max_tokens = self.request.max_tokens - len(added)
        assert max_tokens > 0, "no space is left"
        seed = seed_of(self.key.seed, self.key.step, self.purpose, self.sample, *index)
        prompt_ids = [*self.request.prompt_ids, *added]
        self.request = replace(self.request, prompt_ids=prompt_ids, max_tokens=max_tokens, seed=seed)
        self._tokens_in_prompt = len(self.token_ids)
