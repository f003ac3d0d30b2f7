"""Promise 1 across ranks: rows that were dealt out come back where they stood."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.text.learning.batches import make_batch, make_critic, make_engine, make_policy
from tether.distributed.handles import Replicas
from tether.distributed.transfers import Transfers
from tether.loop.engine import LossSpec, UpdatePlan
from tether.text.learning.losses import PolicyForward, PolicyLoss
from tether.text.sharded import ShardedEngine


class Ranks:
    """Two ranks in this process, each with the whole policy."""

    size = 2

    def __init__(self) -> None:
        self.transfers = Transfers()
        self._engines = [make_engine(make_policy()) for _ in range(self.size)]
        self.rows: list[int] = []
        self.arguments: Sequence[tuple[Any, ...]] = ()

    def call(self, component: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.rows, self.arguments = [len(batch) for batch, *_ in arguments], arguments
        return [getattr(engine, method)(*given) for engine, given in zip(self._engines, arguments, strict=True)]


def test_outputs_stand_at_their_rows() -> None:
    policy, ranks = make_policy(), Ranks()
    batch = make_batch(policy, make_critic())
    found = ShardedEngine(ranks, "actor", Replicas.contiguous(2, 1)).infer(batch, PolicyForward())
    assert len(ranks.rows) == 2
    assert sum(ranks.rows) == len(batch)
    expected = make_engine(policy).infer(batch, PolicyForward())
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-10)


def test_the_branches_of_an_episode_are_in_one_mini_batch() -> None:
    """One of six episodes has no score; the others form mini-batches of three and two, on whichever ranks."""
    batch, ranks = make_batch(make_policy(), make_critic()), Ranks()
    batch.episode = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 3])
    engine = ShardedEngine(ranks, "actor", Replicas.contiguous(2, 1))
    engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(mini_batch_rows=3), 0)
    episodes: list[list[int]] = [[], []]
    for rows, _, _, minis, _ in ranks.arguments:
        for number, mini in enumerate(minis):
            episodes[number] += rows.episode[mini.rows].tolist()
    assert [sorted(found) for found in episodes] == [[0, 0, 0, 1, 2], [3, 3, 4]]
