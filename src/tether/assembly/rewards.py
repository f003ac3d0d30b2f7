"""Builds the rewards of a run: rules, functions, a learned reward model, judges, or a combination."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tether.assembly.groups import RankGroups
from tether.assembly.judge import build_judge, check_judge
from tether.assembly.reward_model import build_reward_model
from tether.assembly.row_agents import row_agent
from tether.config import FunctionPart, JudgePart, RewardPart, RulesPart, RunConfig, check_has_part, read_parts
from tether.data.prompts import PromptDataset
from tether.data.rows import Row
from tether.rewards import check_sources, check_truth
from tether.rewards.custom import CustomReward, load_reward_function
from tether.rewards.sandbox import Limits, ProgramOptions, Server
from tether.rewards.service import BatchedRewards, CombinedRewards, LocalRewards, RewardPool, Rewards, WeightedReward
from tether.runtime.objects import is_object
from tether.runtime.threads import usable_cores
from tether.spelling import did_you_mean

PARTS = "reward_model.parts"


def check_rewards(config: RunConfig, prompts: PromptDataset) -> None:
    """Refuse prompts whose responses cannot be scored, and unusable judges.

    Raises:
        ValueError: a data source has no rule or reward, tests cannot be read, programs cannot be run, or a judge's
            template, endpoint or key is invalid.
    """
    sections = read_parts(config.reward_model.parts)
    for name, section in sections.items():
        if isinstance(section, JudgePart):
            check_judge(f"{PARTS}.{name}", section)
    if sections:
        prompts.check_rows(lambda row: check_has_part(sections, row.data_source))
    rules = next((section for section in sections.values() if isinstance(section, RulesPart)), None)
    asks_rules = rules is not None if sections else not config.reward_model.enable
    if not asks_rules or config.custom_reward_function.path is not None:
        return
    sources: set[str] = set()

    def by_rule(row: Row) -> bool:
        in_part = rules is None or rules.data_sources is None or row.data_source in rules.data_sources
        return in_part and row_agent(config, row).environment is None  # an environment scores its rows itself

    def look_at_truth(row: Row) -> None:
        if by_rule(row):
            sources.add(row.data_source)
            check_truth(row.data_source, row.ground_truth, row.extra_info, from_columns=row.from_columns)

    prompts.check_rows(look_at_truth)
    check_sources(sources, program_options(config))


def check_parts_act(config: RunConfig, datasets: Sequence[PromptDataset]) -> None:
    """Refuse a reward for a data source that no row has.

    A run on a subset of the rows (`data.train_max_samples`, `data.val_max_samples`) is not checked: other rows may have
    it.

    Raises:
        ValueError: the message names the reward and the source.
    """
    if config.data.train_max_samples != -1 or config.data.val_max_samples != -1:
        return
    sections = read_parts(config.reward_model.parts)
    if all(section.data_sources is None for section in sections.values()):
        return  # saves reading every row
    present: set[str] = set()
    for prompts in datasets:
        prompts.check_rows(lambda row: present.add(row.data_source))
    for name, section in sections.items():
        for source in section.data_sources or ():
            if source not in present:
                raise ValueError(
                    f"{PARTS}.{name}.data_sources: no row has {source!r} as its `data_source`, so nothing would be "
                    f"scored for it. Correct it, or leave it out.{did_you_mean(source, sorted(present))}"
                )


def program_options(config: RunConfig) -> ProgramOptions:
    """Return the options for running programs in responses."""
    sandbox, fusion = config.reward_model.sandbox, config.reward_model.sandbox_fusion
    server = None
    if fusion.url is not None:
        server = Server(fusion.url, fusion.memory_limit_mb, fusion.max_concurrent // _num_workers(config))
    limits = Limits(sandbox.timeout, sandbox.memory_limit_mb, sandbox.max_processes)
    return ProgramOptions(sandbox.languages, sandbox.max_tests, limits, sandbox.unconfined, server)


def _num_workers(config: RunConfig) -> int:
    """Return the number of reward processes: by default one per core, or the maximum requests of a program server."""
    fusion = config.reward_model.sandbox_fusion
    limit = fusion.max_concurrent if fusion.url is not None else usable_cores()
    return config.reward_model.num_workers or min(usable_cores(), limit)


def build_rewards(config: RunConfig, groups: RankGroups | None = None) -> Rewards:
    """Build and start the rewards.

    Args:
        config: configuration of the run.
        groups: processes of several devices, which share the reward model.

    Raises:
        ValueError: a function, a reward model or a judge cannot be loaded.
    """
    sections = read_parts(config.reward_model.parts)
    if not sections:
        return build_reward_model(config, groups) if config.reward_model.enable else _build_rules(config)
    # Models first, so that their errors leave no process behind.
    order = sorted(sections, key=lambda name: isinstance(sections[name], RulesPart | FunctionPart))
    with ExitStack() as stack:
        built = {name: stack.enter_context(_build_part(config, name, sections[name], groups)) for name in order}
        stack.pop_all()
    return CombinedRewards({name: _weighted(section, built[name]) for name, section in sections.items()})


def _weighted(section: RewardPart, rewards: Rewards) -> WeightedReward:
    sources = frozenset(section.data_sources) if section.data_sources is not None else None
    return WeightedReward(rewards, section.weight, section.optional, sources)


def _build_part(config: RunConfig, name: str, section: RewardPart, groups: RankGroups | None) -> Rewards:
    if isinstance(section, FunctionPart):
        return _pool(config, CustomReward(section.path, section.name, section.reward_kwargs, key=f"{PARTS}.{name}"))
    if isinstance(section, JudgePart):
        return build_judge(config, f"{PARTS}.{name}", section)
    return _build_rules(config) if isinstance(section, RulesPart) else build_reward_model(config, groups)


def _build_rules(config: RunConfig) -> RewardPool | LocalRewards | BatchedRewards:
    """Build the rule or function reward. A function of a file runs in worker processes, an object in this process."""
    custom = config.custom_reward_function
    if config.reward_model.reward_manager == "batch":
        if is_object(custom.path):
            raise ValueError("reward_model.reward_manager=batch: its function has to be in a file, and not an object")
        named = CustomReward(str(custom.path), custom.name, custom.reward_kwargs)
        return BatchedRewards(named, timeout=config.reward_model.timeout)
    if is_object(custom.path):
        function = load_reward_function(str(custom.path), custom.name, custom.reward_kwargs)
        return LocalRewards(function, config.reward_model.timeout)
    return _pool(config, CustomReward(custom.path, custom.name, custom.reward_kwargs) if custom.path else None)


def _pool(config: RunConfig, function: CustomReward | None) -> RewardPool:
    return RewardPool(
        function,
        num_workers=_num_workers(config),
        timeout=config.reward_model.timeout,
        programs=program_options(config),
    )
