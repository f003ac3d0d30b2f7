"""A row as servers sample it: turn by turn where a partner answers, each turn a request with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tether.keyed_random import seed_of
from tether.rollout.protocol import NoiseKey
from tether.rollout.servers.dialect import Draw, Sampled


@dataclass
class Dialogue:
    """One row so far."""

    draw: Draw
    """The turn that is asked for."""
    key: NoiseKey
    sample: int
    """Number of the row in its step."""
    purpose: str
    """Name of its seeds."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """0 where the partner speaks."""
    kept: list[list[int]] = field(default_factory=list)
    """Tokens that could have been drawn; none where the partner speaks."""
    told: list[tuple[int, int]] = field(default_factory=list)
    """Where the partner's answers begin and end."""

    def hear(self, turn: Sampled) -> None:
        """Take a turn in."""
        self.token_ids += turn.token_ids
        self.log_probs += turn.log_probs
        self.kept += turn.kept or []

    def room(self) -> int:
        """Most tokens of an answer that leave the policy one more."""
        return self.draw.most - self._since() - 1

    def tell(self, answer: Sequence[int]) -> None:
        """Take an answer in, after which the next turn is asked for."""
        begin, most = len(self.token_ids), self.draw.most - self._since() - len(answer)
        assert most > 0, "the answer leaves no room"
        said = self.token_ids[self._heard() :]
        self.token_ids += answer
        self.log_probs += [0.0] * len(answer)
        self.kept += [[] for _ in answer] if self.draw.records else []
        self.told.append((begin, len(self.token_ids)))
        seed = seed_of(self.key.seed, self.key.step, self.purpose, self.sample, len(self.told))
        self.draw = replace(self.draw, prompt=[*self.draw.prompt, *said, *answer], most=most, seed=seed)

    def _heard(self) -> int:
        """Tokens that the present request was told already."""
        return self.told[-1][1] if self.told else 0

    def _since(self) -> int:
        return len(self.token_ids) - self._heard()
