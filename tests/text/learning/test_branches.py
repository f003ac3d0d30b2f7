"""Episodes of several branches: every sampled token is learned from once, and an episode is compared once."""

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.runs.turn_run import WORDS
from tests.text.learning.batches import gradients, make_engine
from tests.text.learning.test_episodes import episode_collector, played
from tests.text.sampling.test_native import packed_logits, responses
from tests.tiny import tiny_model
from tether.algorithms import ADVANTAGE_ESTIMATORS, RunningRewardNormalizer
from tether.batch import RolloutBatch, TrainBatch, filled
from tether.config import load_config
from tether.loop.engine import LossSpec, UpdatePlan
from tether.text.learning.advantages import RewardShaping, build_advantage_estimator
from tether.text.learning.branches import with_branches
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.episodes import EpisodeCollector
from tether.text.learning.losses import PolicyForward, PolicyLoss
from tether.text.learning.packing import MicroBatching, mini_batches
from tether.text.learning.pf_ppo import PolicyFiltration

LOSS = LossSpec(PolicyForward(), PolicyLoss())
SCORES = (0.0, 1.0, 3.0, 5.0, 2.0, 2.0)
ESTIMATORS = sorted(ADVANTAGE_ESTIMATORS)
SAME_IN_AN_EPISODE = {"grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "gpg"}


class CountingEngine:
    """An engine that counts the tokens that it samples, by id and log-probability."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.sampled = engine, Counter[tuple[int, float]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, *arguments: Any) -> RolloutBatch:
        rollout = self.engine.generate(*arguments)
        self.sampled += learned(rollout)
        return rollout


def learned(batch: RolloutBatch) -> Counter[tuple[int, float]]:
    mask = batch.response_mask
    return Counter(zip(batch.response_ids[mask].tolist(), batch.rollout_log_probs[mask].float().tolist(), strict=True))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=len(WORDS), dtype=torch.float64)


@pytest.fixture(scope="module")
def collector(model: PreTrainedModel) -> Iterator[EpisodeCollector]:
    with episode_collector(model) as collector:
        yield replace(collector, engine=CountingEngine(collector.engine))


@pytest.fixture(scope="module")
def forked(collector: EpisodeCollector) -> ScoredResponses:
    """Three groups of two episodes: with one branch each, with two, and with four of which one has another prompt."""
    found = played(collector, "good", "forks_once", "forks", n=2)
    return replace(found, report=replace(found.report, scores=[*SCORES]))


@pytest.fixture
def batch(forked: ScoredResponses) -> TrainBatch:
    return with_branches(without_branches(forked), forked)


def without_branches(forked: ScoredResponses) -> TrainBatch:
    batch = TrainBatch.assemble(forked.rollout, forked.scores)
    batch.reward_baselines = torch.linspace(-1, 1, len(batch))
    batch.reward_components = forked.scores[:, None]
    batch.teacher = torch.arange(len(batch)) // 2
    return batch


def estimated(batch: TrainBatch, estimator: str) -> TrainBatch:
    batch.token_level_rewards, batch.old_log_probs = batch.token_level_scores, batch.rollout_log_probs
    batch.values, batch.sum_pi_squared = torch.zeros_like(batch.old_log_probs), torch.zeros_like(batch.old_log_probs)
    settings = ["data.train_files=x", "actor_rollout_ref.model.path=x", "actor_rollout_ref.rollout.n=2"]
    settings += ["algorithm.gdpo_reward_keys=[score]"] if estimator == "gdpo" else []
    config = load_config(None, [*settings, f"algorithm.adv_estimator={estimator}"]).config
    build_advantage_estimator(config.algorithm)(batch)
    return batch


def test_a_fork_is_a_second_row_and_every_sampled_token_is_learned_from_once(
    collector: EpisodeCollector, model: PreTrainedModel
) -> None:
    engine = collector.engine
    assert isinstance(engine, CountingEngine)
    for player, rows in {"forks_once": [0, 0], "forks": [0, 0, 0, 0], "good": None}.items():
        engine.sampled.clear()
        found = played(collector, player)
        batch = TrainBatch.assemble(found.rollout, found.scores)
        batch = with_branches(batch, found) if found.branches else batch
        assert (None if batch.episode is None else batch.episode.tolist()) == rows
        assert learned(batch) == engine.sampled
        assert (learned(found.rollout) == engine.sampled) == (rows is None), "the main branch alone lacks some"
        assert batch.token_level_scores.sum(-1).tolist() == [float(found.scores[0])] * len(batch)
        logits = packed_logits(model, batch)
        for row, ids in enumerate(responses(batch)):
            mask = batch.response_mask[row, : len(ids)]
            log_probs = logits[row].log_softmax(-1)[torch.arange(len(ids)), ids].float()
            sampler = batch.rollout_log_probs[row, : len(ids)]
            torch.testing.assert_close(log_probs[mask], sampler[mask], atol=1e-6, rtol=0)


def test_the_tokens_that_a_cut_kept_stay_with_their_positions(collector: EpisodeCollector) -> None:
    found = played(collector, "forks_once", n=2, top_k=3)
    batch = with_branches(TrainBatch.assemble(found.rollout, found.scores), found)
    assert batch.kept is not None
    assert torch.equal(batch.kept.count > 0, batch.response_mask)


def test_branches_share_the_prompt_that_they_have(batch: TrainBatch) -> None:
    assert batch.episode is not None
    assert batch.uid[:6].tolist() == [0, 0, 1, 1, 2, 2]
    further, uids = batch.episode[6:].tolist(), batch.uid[6:].tolist()
    assert further == [2, 3, 4, 4, 4, 5, 5, 5]
    alone = [uid for uid in uids if uid > 2]
    assert len(alone) == len({*alone}) == 2, "a compressed history is another prompt"
    assert all(uid in (row // 2, *alone) for row, uid in zip(further, uids, strict=True))
    assert torch.equal(filled(batch.teacher), batch.episode // 2), "the teacher is that of the prompt of the episode"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_fork_changes_no_advantage_of_its_group(estimator: str, forked: ScoredResponses, batch: TrainBatch) -> None:
    plain = estimated(without_branches(forked), estimator)
    main, mask = estimated(batch, estimator).episodes(), plain.response_mask
    width = mask.shape[1]
    if estimator not in ("gae", "raw", "remax", "reinforce_plus_plus"):  # which compare no episodes
        assert torch.equal(filled(main.advantages)[:, :width][mask], filled(plain.advantages)[mask])
    assert batch.episode is not None
    advantages, first = filled(batch.advantages), batch.response_mask.int().argmax(-1)
    assert not advantages[~batch.response_mask].any()
    if estimator in SAME_IN_AN_EPISODE:
        of_episode = advantages[torch.arange(len(batch)), first][batch.episode]
        assert torch.equal(advantages, torch.where(batch.response_mask, of_episode[:, None], 0.0))
        assert of_episode.any()


def test_a_branch_whose_tokens_were_all_rejected_leaves_its_episode_in_the_group(batch: TrainBatch) -> None:
    assert batch.episode is not None
    expected = filled(estimated(batch, "grpo").advantages).clone()
    assert batch.episode[6:8].tolist() == [2, 3], "rows 6 and 7 are compared in the same call"
    batch.leave_out(torch.arange(len(batch)) == 6)
    expected[6] = 0
    assert torch.equal(filled(estimated(batch, "grpo").advantages), expected)


def test_a_group_with_all_rows_would_have_other_advantages(forked: ScoredResponses, batch: TrainBatch) -> None:
    """Without `estimate_by_branch`, an episode with branches would count several times in its group."""
    plain, mask = estimated(without_branches(forked), "grpo"), forked.rollout.response_mask
    rewards = filled(estimated(batch, "grpo").token_level_rewards)
    result = ADVANTAGE_ESTIMATORS["grpo"](rewards, batch.response_mask, uid=batch.uid)
    found = result.advantages[:6, : mask.shape[1]]
    assert not torch.allclose(found[mask], filled(plain.advantages)[mask])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_gradient_does_not_depend_on_micro_batches(mode: str, batch: TrainBatch, model: PreTrainedModel) -> None:
    estimated(batch, "grpo")
    loss = LossSpec(PolicyForward(), replace(PolicyLoss(), aggregation=replace(PolicyLoss().aggregation, mode=mode)))

    def gradient(micro: MicroBatching, rows: TrainBatch = batch) -> dict[str, torch.Tensor]:
        engine = make_engine(copy.deepcopy(model), micro)
        engine.accumulate_gradients(rows, loss)
        return gradients(engine.model)

    expected = gradient(MicroBatching(max_rows=len(batch)))
    for micro in (MicroBatching(max_rows=1), MicroBatching(max_tokens=70), MicroBatching(max_rows=4, packed=False)):
        for name, value in gradient(micro).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-13)
    main = gradient(MicroBatching(max_rows=1), batch.episodes())
    assert any((main[name] - value).abs().max() > 1e-6 for name, value in expected.items()), "branches are learned from"


def test_an_episode_is_in_one_mini_batch(batch: TrainBatch, model: PreTrainedModel) -> None:
    """So that branches add no optimizer step."""
    assert batch.episode is not None
    plan = UpdatePlan(mini_batch_rows=2, epochs=2, shuffle=True)
    minis = mini_batches(batch.response_mask, plan, 3, batch.episode)
    assert [mini.epoch for mini in minis] == [0, 0, 0, 1, 1, 1]
    for epoch in range(2):
        of_epoch = [mini for mini in minis if mini.epoch == epoch]
        assert sorted(row for mini in of_epoch for row in mini.rows.tolist()) == list(range(len(batch)))
        assert all(len(batch.episode[mini.rows].unique()) == 2 for mini in of_epoch)
        assert all(mini.sizes.num_tokens == batch.response_mask[mini.rows].sum() for mini in of_epoch)
    engine: LocalEngine = make_engine(copy.deepcopy(model))
    engine.update(estimated(batch, "grpo"), LOSS, plan, 3)
    assert engine.optimizer
    assert {int(state["step"]) for state in engine.optimizer.state.values()} == {6}


def test_pf_ppo_draws_episodes_with_their_branches(batch: TrainBatch) -> None:
    rows, metrics = PolicyFiltration("pow", 20.0, seed=1).draw(estimated(batch, "grpo"), 1)
    assert metrics["pf_ppo/score_mean"] == 5, "the best episode, which has two rows, six times"
    assert filled(rows.token_level_rewards).sum(-1).tolist() == [5.0] * 12
    assert rows.episode is not None
    assert rows.episode.tolist() == [number for number in range(6) for _ in range(2)]


def test_shaping_counts_an_episode_once(batch: TrainBatch) -> None:
    normalizer = RunningRewardNormalizer()
    RewardShaping(running=normalizer).apply(batch)
    assert (normalizer.count, normalizer.mean) == (6, pytest.approx(sum(SCORES) / 6))
    assert batch.episode is not None
    rewards = filled(batch.token_level_rewards).sum(-1)
    assert torch.equal(rewards, rewards[batch.episode])
    assert len(rewards.unique()) == len({*SCORES})


def test_an_episode_is_left_out_with_its_branches(forked: ScoredResponses, batch: TrainBatch) -> None:
    out = torch.arange(len(batch)) == 2
    batch.leave_out(out | (torch.arange(len(batch)) == 8))
    assert (~batch.scored).nonzero().flatten().tolist() == [2, 6, 8], "row 6 belongs to row 2, row 8 to row 4"
    plain = without_branches(forked)
    plain.leave_out(out[:6])
    joined = with_branches(plain, forked)
    assert (~joined.scored).nonzero().flatten().tolist() == [2, 6]
    assert joined.reward_baselines is not None
    assert joined.episode is not None
    assert torch.equal(joined.reward_baselines, filled(plain.reward_baselines)[joined.episode])
