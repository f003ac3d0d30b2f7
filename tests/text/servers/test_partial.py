"""Weights that change within responses: every token is drawn by the weights that its version names, and no others."""

from collections.abc import Callable

import pytest
import torch

from tests.text.servers.bench import EOS, KEY, PROMPTS, SAMPLING, log_probs_of, rows_of, tiny_policy
from tether.batch import WeightUpdate
from tether.text.sampling.concat import join_rollouts
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import SamplingParams

OLD, NEW = tiny_policy(0), tiny_policy(1)
MORE = SamplingParams(max_new_tokens=12, n=4, temperature=0.8)


def engine(**options: int) -> NativeEngine:
    made = NativeEngine(tiny_policy(0), eos_token_ids=EOS, **options)
    made.load_weights(update_of(OLD, 3))
    return made


def update_of(model: torch.nn.Module, version: int) -> WeightUpdate:
    return WeightUpdate(version, model.state_dict().items())


def changed_after(count: int, sampler: NativeEngine) -> Callable[[object], None]:
    """For `on_finished`: other weights after so many responses."""
    seen: list[object] = []

    def finished(response: object) -> None:
        seen.append(response)
        if len(seen) == count:
            sampler.load_weights(update_of(NEW, 5))

    return finished


@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 7}], ids=["at once", "in turns", "small prefills"]
)
def test_each_token_is_drawn_by_the_weights_that_its_version_names(options: dict[str, int]) -> None:
    sampler = engine(**options)
    rollout = sampler.generate(PROMPTS, MORE, KEY, changed_after(2, sampler))
    mask = rollout.response_mask
    versions = [set(rollout.token_versions[row][mask[row]].tolist()) for row in range(len(rollout))]
    assert {3, 5} in versions, "weights changed within a row"
    assert rollout.policy_version.tolist() == [min(of_row) for of_row in versions]
    right = (log_probs_of(rollout, {3: OLD, 5: NEW}) - rollout.rollout_log_probs)[mask].abs()
    assert right.max() < 1e-4
    wrong = (log_probs_of(rollout, {3: NEW, 5: OLD}) - rollout.rollout_log_probs)[mask].abs()
    assert wrong.max() > 0.1


def test_what_was_drawn_before_stays() -> None:
    sampler = engine()
    whole = rows_of(engine().generate(PROMPTS, MORE, KEY))
    rollout = sampler.generate(PROMPTS, MORE, KEY, changed_after(2, sampler))
    for row, ids in enumerate(rows_of(rollout)):
        before = int((rollout.token_versions[row, : len(ids)] == 3).sum())
        assert ids[:before] == whole[row][:before]
    assert rows_of(rollout) != whole


def test_the_same_weights_again_change_nothing_but_the_version() -> None:
    """The recomputed cache is the one that there was."""
    sampler, numbers = engine(), iter(range(10, 1000))
    again = lambda _: sampler.load_weights(update_of(OLD, next(numbers)))  # noqa: E731
    rollout = sampler.generate(PROMPTS, MORE, KEY, again)
    assert rows_of(rollout) == rows_of(engine().generate(PROMPTS, MORE, KEY))


def test_the_next_call_is_of_one_version_again() -> None:
    sampler = engine()
    sampler.generate(PROMPTS, MORE, KEY, changed_after(2, sampler))
    rollout = sampler.generate(PROMPTS, SAMPLING, KEY)
    assert rollout.token_versions is None
    assert set(rollout.policy_version.tolist()) == {5}


def test_rollouts_are_joined_with_their_versions() -> None:
    sampler = engine()
    first = sampler.generate(PROMPTS, MORE, KEY, changed_after(2, sampler))
    joined = join_rollouts([first, sampler.generate(PROMPTS, SAMPLING, KEY)], [0, 1])
    assert joined.policy_version.tolist() == [*first.policy_version.tolist(), *[5] * 6]
    assert joined.token_versions.shape == joined.response_ids.shape
    assert set(joined.token_versions[len(first) :][joined.response_mask[len(first) :]].tolist()) == {5}


class Answers:
    """Of one token to each of the first three turns; `changes` are made at the second answer."""

    def __init__(self, changes: Callable[[], None]) -> None:
        self.turns: dict[int, int] = {}
        self.changes, self.given = changes, 0

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        self.turns[row] = self.turns.get(row, 0) + 1

    def wait_reply(self, row: int, room: int) -> list[int] | None:
        self.given += 1
        if self.given == 2:
            self.changes()
        return [200] if self.turns[row] <= 3 and room >= 1 else None


def test_caches_of_rows_that_are_answered_are_not_kept_over_a_change() -> None:
    sampler = engine()
    talk = Answers(lambda: sampler.load_weights(update_of(NEW, 5)))
    rollout = sampler.generate(PROMPTS, SamplingParams(max_new_tokens=30, n=4, temperature=0.8), KEY, responder=talk)
    mask = rollout.response_mask
    assert (~mask & (rollout.response_ids == 200)).any()
    assert {3, 5} in [set(rollout.token_versions[row][mask[row]].tolist()) for row in range(len(rollout))]
    difference = (log_probs_of(rollout, {3: OLD, 5: NEW}) - rollout.rollout_log_probs)[mask].abs()
    assert difference.max() < 1e-4
