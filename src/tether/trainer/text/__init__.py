"""Components of the loop for language models: prompts and rollouts, preflight, evaluation, pretraining."""

from tether.trainer.text.critic_pretraining import EXPLAINED, explained, split_by_prompt, value_batch
from tether.trainer.text.evaluation import Evaluation
from tether.trainer.text.pretraining import Pretraining
from tether.trainer.text.reward_training import (
    ACCURACY,
    beats_chance,
    preference_accuracy,
    preference_batch,
    split_pairs,
    until_unusable,
)
from tether.trainer.text.rollout_files import RolloutFiles, read_rollouts
from tether.trainer.text.rollouts import PromptSource, TextRollouts, value_metrics

__all__ = [
    "ACCURACY",
    "EXPLAINED",
    "Evaluation",
    "Pretraining",
    "PromptSource",
    "RolloutFiles",
    "TextRollouts",
    "beats_chance",
    "explained",
    "preference_accuracy",
    "preference_batch",
    "preflight",
    "read_rollouts",
    "split_by_prompt",
    "split_pairs",
    "until_unusable",
    "value_batch",
    "value_metrics",
]
