"""Promise 4 in a validation: a held-out response without a score is counted, and is no 0 in any mean."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerBase

from tests.tiny import tiny_tokenizer
from tether.batch import Prompt
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.evaluation import Evaluation
from tether.text.rewards.outcome import Abstention, RewardError, RewardOutcome, Score
from tether.text.sampling.protocol import NoiseKey, SamplingParams


@dataclass
class Scorer:
    """Gives these outcomes, one to each prompt, in the place of what samples and scores."""

    outcomes: list[RewardOutcome]
    tokenizer: PreTrainedTokenizerBase

    def collect(self, prompts, sampling, key, on_progress):
        rollout = SimpleNamespace(truncated=[False] * len(prompts))
        return ScoredResponses(prompts, rollout, ["?"] * len(prompts), self.outcomes, None, 0.0)


def test_what_failed_or_abstained_is_in_no_mean() -> None:
    outcomes = [Score(1.0), RewardError("no"), Score(0.5), Abstention()]
    prompts = [Prompt([5 + row], "held out", str(row), index=row) for row in range(4)]
    evaluation = Evaluation(prompts, SamplingParams(max_new_tokens=1))
    result = evaluation.run(Scorer(outcomes, tiny_tokenizer()), NoiseKey(seed=1, step=0))
    assert result.metrics["val-core/held out/reward/mean@1"] == pytest.approx((1 + 0.5) / 2)
    assert result.metrics["val-aux/held out/num_unscored"] == 2
    assert [sample.reward for sample in result.samples] == [1.0, None, 0.5, None]
    assert result.samples[1].note == "no"
