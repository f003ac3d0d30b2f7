"""A row as servers sample it: turn by turn where a partner answers, each turn a request with a seed of its own.

A turn that is broken off, as its weights are to change, goes on with a further request, whose prompt has what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tether.keyed_random import seed_of
from tether.rollout.protocol import NoiseKey
from tether.rollout.servers.dialect import Draw, Sampled


@dataclass
class Dialogue:
    """One row so far."""

    draw: Draw
    """The request whose answer comes next."""
    key: NoiseKey
    sample: int
    """Number of the row in its step."""
    purpose: str
    """Name of its seeds."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """0 where the partner speaks."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that drew each token; where the partner speaks, of the moment."""
    kept: list[list[int]] = field(default_factory=list)
    """Tokens that could have been drawn; none where the partner speaks."""
    told: list[tuple[int, int]] = field(default_factory=list)
    """Where the partner's answers begin and end."""
    experts: NDArray[np.int16] | None = None
    """Of the tokens of prompt and row that the last request computed."""
    _asked_with: int = 0
    """Tokens of the row that the prompt of the present request has."""

    def hear(self, turn: Sampled, version: int) -> None:
        """Take in what these weights drew."""
        self.token_ids += turn.token_ids
        self.log_probs += turn.log_probs
        self.versions += [version] * len(turn.token_ids)
        self.kept += turn.kept or []
        self.experts = self.experts if turn.experts is None else turn.experts

    def turn(self) -> list[int]:
        """The policy's words since the partner spoke last."""
        return self.token_ids[self.told[-1][1] if self.told else 0 :]

    def room(self) -> int:
        """Most tokens that can still come."""
        return self.draw.most - (len(self.token_ids) - self._asked_with)

    def tell(self, answer: Sequence[int], version: int) -> None:
        """Take an answer in, after which the next turn is asked for."""
        begin = len(self.token_ids)
        said = self.token_ids[self._asked_with :]
        self.token_ids += answer
        self.log_probs += [0.0] * len(answer)
        self.versions += [version] * len(answer)
        self.kept += [[] for _ in answer] if self.draw.records else []
        self.told.append((begin, len(self.token_ids)))
        self._ask([*said, *answer], len(self.told))

    def go_on(self) -> None:
        """Ask for the rest of a turn that was broken off; nothing changes where it had not begun."""
        if said := self.token_ids[self._asked_with :]:
            self._ask(said, len(self.told), len(self.token_ids))

    def _ask(self, more: list[int], *number: int) -> None:
        most = self.draw.most - len(more)
        assert most > 0, "no room is left"
        seed = seed_of(self.key.seed, self.key.step, self.purpose, self.sample, *number)
        self.draw = replace(self.draw, prompt=[*self.draw.prompt, *more], most=most, seed=seed)
        self._asked_with = len(self.token_ids)
