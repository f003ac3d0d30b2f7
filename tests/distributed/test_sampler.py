"""Prompts that are dealt to ranks in pieces: a rank that is done takes the next one."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tether.batch import RolloutBatch
from tether.distributed.transfers import Transfers
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.sharded import ShardedSampler, prompt_chunks

PROMPTS = [[number] for number in range(24)]
SAMPLING = SamplingParams(max_new_tokens=1, n=2)


class Ranks:
    """A group whose ranks answer each prompt with its first token, the number of the sample and themselves."""

    def __init__(self, seconds: Sequence[float], broken: int | None = None, first_waits_for: int = 0) -> None:
        self.size, self.transfers = len(seconds), Transfers()
        self._seconds, self._broken, self._first_waits_for = seconds, broken, first_waits_for
        self.prompts: Counter[int] = Counter()

    def call(self, component: str, method: str, arguments: Sequence[Any]) -> list[Any]:
        assert (component, method) == ("sampler", "generate")
        ((rank, asked),) = [(rank, asked) for rank, asked in enumerate(arguments) if asked is not None]
        prompts, sampling, key = asked
        if rank == self._broken:
            raise ValueError("a rank is lost")
        time.sleep(self._seconds[rank] * len(prompts))
        until = time.monotonic() + 60
        while rank == 0 and self.prompts[1] < self._first_waits_for and time.monotonic() < until:
            time.sleep(0.01)
        self.prompts[rank] += len(prompts)
        answers: list[Any] = [None] * self.size
        answers[rank] = drawn(prompts, sampling.n, key)
        return answers


def drawn(prompts: Sequence[Sequence[int]], n: int, key: NoiseKey) -> RolloutBatch:
    """Responses of two tokens: the prompt's, and the number of the sample."""
    rows = torch.arange(len(prompts) * n)
    ids = torch.tensor(prompts).repeat_interleave(n, dim=0)
    ones = torch.ones(len(rows), dtype=torch.int64)
    return RolloutBatch(
        uid=rows // n,
        prompt_ids=ids,
        prompt_length=ones,
        response_ids=torch.cat([ids, (key.first_sample + rows)[:, None]], dim=1),
        response_length=2 * ones,
        response_mask=torch.ones(len(rows), 2, dtype=torch.bool),
        rollout_log_probs=torch.zeros(len(rows), 2),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        kept=None,
        batch_size=[len(rows)],
    )


@given(prompts=st.integers(1, 300), ranks=st.integers(1, 9), fitting=st.integers(1, 50))
def test_pieces(prompts: int, ranks: int, fitting: int) -> None:
    """Every prompt is in one; none but the last is smaller than what a rank samples at a time, or a whole share."""
    dealt = prompt_chunks(prompts, ranks, fitting)
    assert [number for part in dealt for number in part] == list(range(prompts))
    assert all(map(len, dealt))
    share = -(-prompts // ranks)
    if share <= fitting:
        assert len(dealt) == min(ranks, prompts)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    else:
        assert all(len(part) >= fitting for part in dealt[:-1])
        assert len(dealt) > ranks
        assert [len(part) for part in dealt] == sorted(map(len, dealt), reverse=True)


@pytest.mark.parametrize("max_num_seqs", [2, 6, 1000])
def test_rows_are_those_of_one_rank(max_num_seqs: int) -> None:
    ranks = Ranks([0.001, 0.0, 0.002])
    rollout = ShardedSampler(ranks, "sampler", frozenset(), None, max_num_seqs).generate(
        PROMPTS, SAMPLING, NoiseKey(5, 1)
    )
    expected = drawn(PROMPTS, SAMPLING.n, NoiseKey(5, 1))
    assert torch.equal(rollout.response_ids, expected.response_ids)
    assert torch.equal(rollout.uid, expected.uid)
    assert ranks.prompts.total() == len(PROMPTS)


def test_a_rank_that_is_done_takes_what_is_left() -> None:
    """The other one has its first piece alone."""
    first = len(prompt_chunks(len(PROMPTS), 2, 1)[0])
    ranks = Ranks([0.0, 0.0], first_waits_for=len(PROMPTS) - first)
    ShardedSampler(ranks, "sampler", frozenset(), None, 2).generate(PROMPTS, SAMPLING, NoiseKey(5, 1))
    assert ranks.prompts == {0: first, 1: len(PROMPTS) - first}


def test_fewer_prompts_than_ranks() -> None:
    ranks = Ranks([0.0] * 4)
    rollout = ShardedSampler(ranks, "sampler", frozenset(), None, 8).generate(PROMPTS[:2], SAMPLING, NoiseKey(5, 1))
    assert len(rollout) == 4
    assert set(ranks.prompts) <= {0, 1}


def test_a_failure_ends_it_at_once() -> None:
    ranks = Ranks([0.1, 0.0], broken=1)
    with pytest.raises(ValueError, match="a rank is lost"):
        ShardedSampler(ranks, "sampler", frozenset(), None, 2).generate(PROMPTS, SAMPLING, NoiseKey(5, 1))
    assert ranks.prompts[0] <= len(prompt_chunks(len(PROMPTS), 2, 1)[0])
