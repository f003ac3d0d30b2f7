"""Dynamic sampling: which groups a step learns from, what it costs, and that a stopped run goes on exactly."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runs.resume import assert_same_end
from tests.runs.steps import first_step
from tests.runs.tiny_run import GRPO, LIGHT, base_overrides, measured, same, train
from tether.batch import Prompt, RolloutBatch
from tether.metrics.keys import describe
from tether.runtime.objects import register_objects
from tether.text.data.prompts import PromptSampler
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.dynamic_sampling import DynamicSampling, NothingToLearn
from tether.text.rewards.outcome import Abstention, RewardOutcome, RewardReport, Score
from tether.text.sampling.concat import join_rollouts
from tether.text.sampling.protocol import NoiseKey, SamplingParams

PROMPTS = [Prompt((number + 1,), "tiny", None, index=number) for number in range(6)]
SAMPLING = SamplingParams(max_new_tokens=4, n=2)
NAN = math.nan


class Recorded:
    """Stands where the collector does: the scores of each prompt are known beforehand."""

    def __init__(self, scores: dict[int, tuple[float, float]]) -> None:
        self.scores = scores
        self.keys: list[NoiseKey] = []

    def collect(self, prompts, sampling, key, on_progress=None) -> ScoredResponses:
        self.keys.append(key)
        scores = [score for prompt in prompts for score in self.scores[prompt.index]]
        outcomes: list[RewardOutcome] = [
            Abstention() if math.isnan(s) else Score(s, {"acc": float(s > 0.4)}) for s in scores
        ]
        length = torch.tensor([prompt.index + 1 for prompt in prompts]).repeat_interleave(2).clamp(max=4)
        width = int(length.max())
        rollout = RolloutBatch(
            uid=torch.arange(len(prompts)).repeat_interleave(2),
            prompt_ids=torch.tensor([p.token_ids.tolist() for p in prompts]).repeat_interleave(2, dim=0),
            prompt_length=torch.ones(len(scores), dtype=torch.long),
            response_ids=length[:, None].expand(-1, width).clone(),
            response_length=length,
            response_mask=torch.arange(width) < length[:, None],
            rollout_log_probs=torch.zeros(len(scores), width),
            truncated=torch.zeros(len(scores), dtype=torch.bool),
            kept=None,
            batch_size=[len(scores)],
        )
        failed = sum(map(math.isnan, scores))
        report = RewardReport(scores, len(scores) - failed, failed, 0, (), {"reward/error_rate": 0.0})
        branches = {row: rollout[row : row + 1] for row in range(len(scores))}
        texts = [str(s) for s in scores]
        return ScoredResponses(prompts, rollout, texts, outcomes, report, reward_seconds=0.0, branches=branches)


def sample(scores: dict[int, tuple[float, float]], **options) -> tuple[ScoredResponses, Recorded]:
    """From batches of two prompts, in the order of the data."""
    recorded, sampler = Recorded(scores), PromptSampler(6, 2, shuffle=False, seed=0)
    first = [PROMPTS[row] for row in sampler.next_batch()]
    settings = {"metric": "score", "num_groups": 2, "max_batches": 3, "warn": pytest.fail, **options}
    dynamic = DynamicSampling(recorded, PROMPTS, sampler, **settings)
    return dynamic.collect(first, SAMPLING, NoiseKey(7, 3)), recorded


def test_groups_of_one_score_are_replaced() -> None:
    # prompts 1, 3 and 5 differ within; 3 is the second one that does, so 5 is never sampled
    scores = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (NAN, 0.5), 3: (0.25, 0.5), 4: (0.0, 0.0), 5: (1.0, 0.0)}
    found, recorded = sample(scores)
    assert [prompt.index for prompt in found.prompts] == [1, 3]
    assert found.rollout.uid.tolist() == [0, 0, 1, 1]
    assert found.scores.tolist() == [0, 1, 0.25, 0.5]
    assert found.texts == ["0.0", "1.0", "0.25", "0.5"]
    assert {row: branch.response_length.tolist() for row, branch in found.branches.items()} == {
        row: [length] for row, length in enumerate(found.rollout.response_length.tolist())
    }
    assert [found.prompt_of(row).index for row in range(4)] == [1, 1, 3, 3]
    assert recorded.keys == [NoiseKey(7, 3, 0), NoiseKey(7, 3, 4)]
    metrics = found.report.metrics
    assert metrics["train/num_gen_batches"] == 2
    assert metrics["dynamic_sampling/wasted_fraction"] == 0.5
    assert metrics["dynamic_sampling/uninformative_fraction"] == 0.5
    assert metrics["dynamic_sampling/missing_groups"] == 0
    assert metrics["dynamic_sampling/sampled_score_mean"] == pytest.approx((1 + 1 + 0 + 1 + 0.5 + 0.25 + 0.5) / 7)
    assert found.report.num_abstained == 1


def test_rows_of_different_widths_are_joined() -> None:
    scores = {0: (1.0, 0.0), 1: (0.0, 0.0), 2: (1.0, 1.0), 3: (0.25, 0.5), 4: (0.0, 0.0), 5: (1.0, 0.0)}
    rollout = sample(scores)[0].rollout
    assert rollout.response_ids.tolist() == [[1, 1, 0, 0]] * 2 + [[4, 4, 4, 4]] * 2  # as wide as their batch was
    assert rollout.response_mask.sum(dim=-1).tolist() == [1, 1, 4, 4]
    narrow = join_rollouts([rollout[:2]], [5])
    assert narrow.response_ids.tolist() == [[1], [1]]
    assert narrow.uid.tolist() == [5, 5]


def test_more_than_a_batch_is_wasted() -> None:
    found, _ = sample({0: (1.0, 0.0), 1: (0.0, 1.0)}, num_groups=1)
    assert [prompt.index for prompt in found.prompts] == [0]
    assert found.report.metrics["dynamic_sampling/wasted_fraction"] == 0.5
    assert found.report.metrics["dynamic_sampling/uninformative_fraction"] == 0


def test_the_cap_is_said_and_the_step_takes_what_there_is() -> None:
    scores = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (1.0, 1.0), 3: (1.0, 1.0)}
    said: list[str] = []
    found, recorded = sample(scores, max_batches=2, warn=said.append)
    assert len(recorded.keys) == 2
    assert [prompt.index for prompt in found.prompts] == [1]
    assert found.report.metrics["dynamic_sampling/missing_groups"] == 1
    (message,) = said
    assert message.startswith("step 3: within algorithm.filter_groups.max_num_gen_batches=2 only 1 of 2 prompts had")


def test_nothing_to_learn_stops_the_run() -> None:
    scores = dict.fromkeys(range(6), (1.0, 1.0))
    with pytest.raises(NothingToLearn, match=r"step 3: within .*max_num_gen_batches=3 no prompt had responses"):
        sample(scores)


def test_another_metric() -> None:
    scores = {0: (1.0, 0.5), 1: (0.0, 1.0), 2: (1.0, 1.0), 3: (0.3, 0.5), 4: (0.0, 0.0), 5: (1.0, 0.0)}
    found, _ = sample(scores, metric="acc")  # prompt 0: both above 0.4
    assert [prompt.index for prompt in found.prompts] == [1, 3]
    with pytest.raises(ValueError, match=r"metric=accuracy: the reward returns no such number, only score, acc"):
        sample(scores, metric="accuracy")


# --- whole runs ---------------------------------------------------------------------------------------------------

TOTAL = 4


def varied(data_source, solution_str, ground_truth, extra_info=None):
    any_letters = any(c.isalpha() for c in solution_str)
    return {"score": 3.0 * (int(ground_truth) >= 10) + any_letters, "acc": float(any_letters)}


SETTINGS = [
    *GRPO,
    *LIGHT,
    "actor_rollout_ref.rollout.n=2",
    "custom_reward_function.path=object:varied",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "data.gen_batch_size=3",
    "data.seed=4",
    "critic.enable=True",
    "critic.optim.lr=3e-3",
    "critic.ppo_epochs=3",
    "trainer.critic_warmup_until_explained_variance=0.05",
    f"trainer.total_training_steps={TOTAL}",
]
"""Some groups differ; a critic, which the policy waits for, can tell the prompts with higher scores."""


@pytest.fixture(scope="module", autouse=True)
def _varied() -> Iterator[None]:
    with register_objects({"varied": varied}):
        yield


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return train([*base_overrides(inputs, folder), *SETTINGS, "trainer.save_freq=2"])


def test_a_run_learns_from_full_batches_of_groups_that_differ(whole: Path) -> None:
    metrics = measured(whole)
    assert list(metrics) == list(range(1, TOTAL + 1))
    for found in metrics.values():
        assert found["dynamic_sampling/missing_groups"] == 0
        assert found["train/num_gen_batches"] >= 2  # 3 prompts a batch, and 4 are needed
        assert not [key for key in found if describe(key) is None]
    assert 0 < sum(found["dynamic_sampling/uninformative_fraction"] for found in metrics.values()) < TOTAL
    assert metrics[TOTAL]["training/epoch"] >= 1
    waiting = [step for step in metrics if "actor/pg_loss" not in metrics[step]]
    assert 0 < len(waiting) < TOTAL


def test_a_resumed_run_is_the_uninterrupted_one(whole: Path, base: list[str]) -> None:
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole / 'global_step_2'}"]
    rest = train([*base, *SETTINGS, *resume, f"trainer.save_freq={TOTAL}"])
    assert_same_end(whole / f"global_step_{TOTAL}", rest / f"global_step_{TOTAL}")
    assert same({n: found for n, found in measured(whole).items() if n > 2}, measured(rest))


def test_the_greedy_baseline_answers_the_prompts_that_were_kept(base: list[str]) -> None:
    """3 prompts begin the step, and 4 others may end it."""
    cut = ["actor_rollout_ref.rollout.top_k=20", "actor_rollout_ref.rollout.top_p=0.9"]  # whose record is joined, too
    remax = ["algorithm.adv_estimator=remax", "critic.enable=False", "trainer.total_training_steps=1"]
    waits = ["trainer.critic_warmup_until_explained_variance=null"]
    metrics = first_step([*base, *SETTINGS, *remax, *waits, *cut])
    assert metrics["train/num_gen_batches"] >= 2
    assert metrics["baseline/unscored_prompts"] == 0
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
