"""Every rollout engine is held to the same: `native`, vLLM and SGLang.

Of vLLM that is a server that speaks its language, and the real one where it is installed; of SGLang the former only.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.text.servers.bench import EOS, EVERY, KEY, LONG, PROMPTS, SAMPLING, Bench, bench_of, log_probs_of, rows_of
from tether.batch import RolloutBatch
from tether.text.sampling.protocol import FinishedResponse, NoiseKey


@pytest.fixture(scope="module", params=EVERY)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = bench_of(request.param, tmp_path_factory.mktemp(request.param))
    yield bench
    bench.close()


def up_to_date(bench: Bench) -> Bench:
    bench.engine.load_weights(bench.export())
    return bench


def test_log_probs_are_those_of_the_policy_after_every_update(bench: Bench) -> None:
    for step in (1, 2):
        bench.learn()
        rollout = up_to_date(bench).engine.generate([*PROMPTS, *LONG], SAMPLING, NoiseKey(5, step))
        difference = (rollout.rollout_log_probs - bench.log_probs(rollout))[rollout.response_mask].abs().max()
        assert difference < 1e-4
        assert set(rollout.policy_version.tolist()) == {bench.version}


def test_an_update_changes_what_is_drawn(bench: Bench) -> None:
    before = up_to_date(bench).engine.generate(PROMPTS, SAMPLING, KEY)
    bench.learn()
    after = up_to_date(bench).engine.generate(PROMPTS, SAMPLING, KEY)
    assert rows_of(before) != rows_of(after)
    wrong = (before.rollout_log_probs - bench.log_probs(before))[before.response_mask].abs().max()
    assert wrong > 1e-3, "the comparison above would notice weights of before"


def test_rows_have_the_shape_that_the_protocol_promises(bench: Bench) -> None:
    finished: dict[int, list[int]] = {}
    told: list[int] = []
    rollout = up_to_date(bench).engine.generate(
        PROMPTS,
        SAMPLING,
        KEY,
        lambda one: finished.__setitem__(one.row, one.token_ids),
        lambda p: told.append(p.tokens),
    )
    assert rollout.uid.tolist() == [0, 0, 1, 1, 2, 2]
    assert [finished[row] for row in range(6)] == rows_of(rollout)
    assert told[-1] == sum(map(len, finished.values()))
    assert rollout.prompt_ids[2:4, :1].tolist() == [PROMPTS[1]] * 2
    assert rollout.response_mask.sum(-1).tolist() == rollout.response_length.tolist()
    assert all(device == "cpu" for device in (rollout.response_ids.device.type, rollout.rollout_log_probs.device.type))
    for row, ids in enumerate(rows_of(rollout)):
        assert not EOS & set(ids[:-1])
        assert bool(rollout.truncated[row]) == (ids[-1] not in EOS)
        assert len(ids) == 6 or ids[-1] in EOS
    assert len({len(ids) for ids in rows_of(rollout)}) > 1


def test_a_sample_depends_on_its_key_alone(bench: Bench) -> None:
    engine = up_to_date(bench).engine
    together = rows_of(engine.generate(PROMPTS, SAMPLING, KEY))
    assert rows_of(engine.generate(PROMPTS, SAMPLING, KEY)) == together
    alone = engine.generate(PROMPTS[2:], SAMPLING, replace(KEY, first_sample=4))
    assert rows_of(alone) == together[4:]
    named = engine.generate(PROMPTS[::-1], SAMPLING, replace(KEY, samples=(4, 5, 2, 3, 0, 1)))
    assert rows_of(named) == [*together[4:], *together[2:4], *together[:2]]
    assert rows_of(engine.generate(PROMPTS, SAMPLING, replace(KEY, step=2))) != together
    assert rows_of(engine.generate(PROMPTS, SAMPLING, replace(KEY, seed=6))) != together


def test_draws_follow_the_distribution(bench: Bench) -> None:
    """One token of 64 draws: their mean negative log-prob is the entropy, up to 4 standard errors."""
    sampling = replace(SAMPLING, n=64, max_new_tokens=1)
    rollout = up_to_date(bench).engine.generate(PROMPTS[:1], sampling, KEY)
    with torch.no_grad():
        logits = bench.model(torch.tensor(PROMPTS[:1])).logits[0, -1] / sampling.temperature
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    variance = (log_probs.exp() * (log_probs + entropy) ** 2).sum()
    assert abs(float(-rollout.rollout_log_probs.mean() - entropy)) < 4 * float((variance / 64).sqrt())


def test_a_cut_of_the_vocabulary_is_recorded(bench: Bench) -> None:
    rollout = up_to_date(bench).engine.generate(PROMPTS, replace(SAMPLING, top_k=5, top_p=0.7), KEY)
    counts = rollout.kept.count[rollout.response_mask]
    assert 1 <= counts.min() <= counts.max() <= 5
    assert counts.float().mean() < 5
    assert (rollout.rollout_log_probs - bench.log_probs(rollout))[rollout.response_mask].abs().max() < 1e-4


def test_greedy_is_the_argmax(bench: Bench) -> None:
    rollout = up_to_date(bench).engine.generate(PROMPTS, replace(SAMPLING, n=1, temperature=0.0), KEY)
    (ids,) = rows_of(rollout)[:1]
    with torch.no_grad():
        logits = bench.model(torch.tensor([PROMPTS[0] + ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    assert logits.argmax(-1).tolist() == ids


def test_lengths_are_limited_and_ends_ignored_on_demand(bench: Bench) -> None:
    engine = up_to_date(bench).engine
    rollout = engine.generate(PROMPTS, replace(SAMPLING, max_length=12, ignore_eos=True), KEY)
    assert rollout.response_length.tolist() == [6, 6, 6, 6, 3, 3]
    assert rollout.truncated.all(), "none of them ended by itself"


def test_weights_may_change_within_responses(bench: Bench) -> None:
    """A response that is incomplete when weights arrive continues with them; each token has its version."""
    engine, before = up_to_date(bench).engine, bench.model
    bench.model = copy.deepcopy(before)
    bench.learn()  # now, so that a server has no time to end its rows between the second one and the weights
    finished: list[FinishedResponse] = []

    def finish(one: FinishedResponse) -> None:
        finished.append(one)
        if len(finished) == 2:
            engine.load_weights(bench.export())

    # Rows of one prompt end together, those of the next prompts up to eight tokens later.
    sampling = replace(SAMPLING, max_new_tokens=100, max_length=100, n=4, ignore_eos=True)
    rollout = engine.generate(PROMPTS, sampling, KEY, finish)
    assert {one.row: one.token_ids for one in finished} == dict(enumerate(rows_of(rollout)))
    assert len(finished) == 12
    old, new, mask = bench.version - 1, bench.version, rollout.response_mask
    versions = [rollout.token_versions[row][mask[row]].tolist() for row in range(12)]
    assert {old, new} in map(set, versions), "weights changed within a row"
    assert all(row == sorted(row) for row in versions)
    assert rollout.policy_version.tolist() == [row[0] for row in versions]
    right = log_probs_of(rollout, {old: before, new: bench.model}) - rollout.rollout_log_probs
    assert right[mask].abs().max() < 1e-4
    wrong = log_probs_of(rollout, {old: bench.model, new: before}) - rollout.rollout_log_probs
    assert wrong[mask].abs().max() > 1e-2
    after = engine.generate(PROMPTS, SAMPLING, KEY)
    assert after.token_versions is None
    assert set(after.policy_version.tolist()) == {new}


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        (PROMPTS, {"max_length": 9}, r"prompts\[2\]: 9 prompt tokens leave no room"),
        ([[5], []], {}, r"prompts\[1\]"),
        ([], {}, "the list is empty"),
        ([[5, -1]], {}, r"prompts\[0\].*no flat list of token ids"),
        ([[7] * 510], {}, r"prompts\[0\].*512"),
    ],
)
def test_what_cannot_be_answered_is_refused(bench: Bench, prompts: list, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.engine.generate(prompts, replace(SAMPLING, **changes), KEY)


class Stop(Exception):
    pass


def test_an_interrupted_call_leaves_the_engine_as_it_was(bench: Bench) -> None:
    expected = rows_of(up_to_date(bench).engine.generate(PROMPTS, SAMPLING, KEY))

    def stop(_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        bench.engine.generate(PROMPTS, SAMPLING, KEY, stop)
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == expected


def test_the_weights_of_an_update_are_those_of_the_moment(bench: Bench) -> None:
    """A policy that learns on after an update does not change what is drawn until the next one."""
    expected = rows_of(up_to_date(bench).engine.generate(PROMPTS, SAMPLING, KEY))
    bench.learn()
    rollout: RolloutBatch = bench.engine.generate(PROMPTS, SAMPLING, KEY)
    assert rows_of(rollout) == expected
    assert set(rollout.policy_version.tolist()) == {bench.version - 1}
