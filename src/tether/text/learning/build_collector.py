"""Builds the collector of a run, which samples and scores: single turns, conversations, or episodes of programs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from tether.config import RunConfig
from tether.text.data.prompts import PromptDataset
from tether.text.learning.collector import Collector
from tether.text.learning.episodes import EpisodeCollector
from tether.text.rewards.service import Rewards
from tether.text.sampling.protocol import RolloutEngine
from tether.text.turns.build import build_conversations, build_endpoint, scored_by_environments
from tether.text.turns.tools import ToolPool


def build_collector(
    config: RunConfig,
    engine: RolloutEngine,
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    datasets: Sequence[PromptDataset],
    tools: ToolPool | None,
    resources: ExitStack,
) -> Collector:
    """Build the collector of a configuration.

    Args:
        config: configuration of the run.
        engine: samples from the policy.
        rewards: scores responses.
        tokenizer: tokenizer of the policy.
        datasets: all prompts.
        tools: processes of tools and environments.
        resources: closes what this function starts.

    Raises:
        ValueError: the chat template does not support several turns, or a program cannot be loaded.
    """
    rollout, data, rate = config.actor_rollout_ref.rollout, config.data, config.reward_model.max_error_rate
    if endpoint := build_endpoint(rollout, data, tokenizer, engine.eos_token_ids):
        resources.callback(endpoint.close)
        longest = rollout.max_model_len or data.max_prompt_length + data.max_response_length
        max_length = min(longest, engine.context or longest)
        return EpisodeCollector(engine, rewards, tokenizer, rate, endpoint=endpoint, max_length=max_length)
    conversations = build_conversations(
        rollout,
        data,
        tools,
        tokenizer,
        engine.eos_token_ids,
        datasets,
        environments_score_alone=scored_by_environments(config.custom_reward_function, config.reward_model),
    )
    return Collector(engine, rewards, tokenizer, rate, conversations)
