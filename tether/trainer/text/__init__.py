"""Parts of the loop for language models: prompts and rollouts, preflight, evaluation, critic pretraining."""

from tether.trainer.text.critic_pretraining import EXPLAINED, CriticPretraining, split_by_prompt, value_batch
from tether.trainer.text.evaluation import Evaluation
from tether.trainer.text.rollout_files import RolloutFiles, read_rollouts
from tether.trainer.text.rollouts import PromptSource, TextRollouts
from tether.trainer.text.step_metrics import value_metrics

__all__ = [
    "EXPLAINED",
    "CriticPretraining",
    "Evaluation",
    "PromptSource",
    "RolloutFiles",
    "TextRollouts",
    "preflight",
    "read_rollouts",
    "split_by_prompt",
    "value_batch",
    "value_metrics",
]
