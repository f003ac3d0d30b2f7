"""Rewards of a run: rules and functions, a learned reward model, judges, or several of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from tether.assembly.groups import Groups
from tether.assembly.judge import build_judge, check_judge
from tether.assembly.reward_model import build_reward_model
from tether.assembly.row_agents import row_agent
from tether.config import FunctionPart, JudgePart, RewardPart, RulesPart, RunConfig, check_has_part, read_parts
from tether.data.prompts import PromptDataset
from tether.data.rows import Row
from tether.rewards import check_sources, check_truth
from tether.rewards.custom import CustomReward, load_reward_function
from tether.rewards.sandbox import Limits, ProgramOptions, Server
from tether.rewards.service import BatchedRewards, CombinedRewards, LocalRewards, Part, RewardPool, Rewards
from tether.runtime.objects import is_object
from tether.runtime.threads import usable_cores
from tether.spelling import did_you_mean

PARTS = "reward_model.parts"


def check_rewards(config: RunConfig, prompts: PromptDataset) -> None:
    """Refuse prompts whose responses nothing can score, and judges that cannot be asked.

    Raises:
        ValueError: a data source without a rule, or without a part of the reward; tests that cannot be read; programs
            that cannot be run; a judge's template, endpoint or key.
    """
    parts = read_parts(config.reward_model.parts)
    for name, part in parts.items():
        if isinstance(part, JudgePart):
            check_judge(f"{PARTS}.{name}", part)
    if parts:
        prompts.check_rows(lambda row: check_has_part(parts, row.data_source))
    rules = next((part for part in parts.values() if isinstance(part, RulesPart)), None)
    asks_rules = rules is not None if parts else not config.reward_model.enable
    if not asks_rules or config.custom_reward_function.path is not None:
        return
    sources: set[str] = set()

    def by_rule(row: Row) -> bool:
        in_part = rules is None or rules.data_sources is None or row.data_source in rules.data_sources
        return in_part and row_agent(config, row).environment is None  # which scores the row itself

    def look_at_truth(row: Row) -> None:
        if by_rule(row):
            sources.add(row.data_source)
            check_truth(row.data_source, row.ground_truth, row.extra_info, from_columns=row.from_columns)

    prompts.check_rows(look_at_truth)
    check_sources(sources, program_options(config))


def check_parts_act(config: RunConfig, datasets: Sequence[PromptDataset]) -> None:
    """Refuse parts of the reward that are for rows of a data source that no row has.

    A run on some of its rows (`data.train_max_samples`, `data.val_max_samples`) is left alone: the others may have it.

    Raises:
        ValueError: names the part and the source.
    """
    if config.data.train_max_samples != -1 or config.data.val_max_samples != -1:
        return
    parts = read_parts(config.reward_model.parts)
    if all(part.data_sources is None for part in parts.values()):
        return  # without looking at every row
    there: set[str] = set()
    for prompts in datasets:
        prompts.check_rows(lambda row: there.add(row.data_source))
    for name, part in parts.items():
        for source in part.data_sources or ():
            if source not in there:
                raise ValueError(
                    f"{PARTS}.{name}.data_sources: no row has {source!r} as its `data_source`, so nothing would be "
                    f"scored for it. Correct it, or leave it out.{did_you_mean(source, sorted(there))}"
                )


def program_options(config: RunConfig) -> ProgramOptions:
    """How programs in responses are run."""
    sandbox, fusion = config.reward_model.sandbox, config.reward_model.sandbox_fusion
    server = None
    if fusion.url is not None:
        server = Server(fusion.url, fusion.memory_limit_mb, fusion.max_concurrent // _num_workers(config))
    limits = Limits(sandbox.timeout, sandbox.memory_limit_mb, sandbox.max_processes)
    return ProgramOptions(sandbox.languages, sandbox.max_tests, limits, sandbox.unconfined, server)


def _num_workers(config: RunConfig) -> int:
    """Reward processes: one a core by default, and not more than a server for programs may have requests."""
    fusion = config.reward_model.sandbox_fusion
    most = fusion.max_concurrent if fusion.url is not None else usable_cores()
    return config.reward_model.num_workers or min(usable_cores(), most)


def build_rewards(config: RunConfig, groups: Groups | None = None) -> Rewards:
    """Start what scores responses.

    Args:
        config: of the run.
        groups: the processes of several devices, which share the reward model.

    Raises:
        ValueError: a function, a reward model or a judge that cannot be loaded.
    """
    parts = read_parts(config.reward_model.parts)
    if not parts:
        return build_reward_model(config, groups) if config.reward_model.enable else _build_rules(config)
    # Models first: what they refuse leaves no process behind.
    order = sorted(parts, key=lambda name: isinstance(parts[name], RulesPart | FunctionPart))
    with ExitStack() as stack:
        built = {name: stack.enter_context(_build_part(config, name, parts[name], groups)) for name in order}
        stack.pop_all()
    return CombinedRewards({name: _weighted(part, built[name]) for name, part in parts.items()})


def _weighted(part: RewardPart, rewards: Rewards) -> Part:
    sources = frozenset(part.data_sources) if part.data_sources is not None else None
    return Part(rewards, part.weight, part.optional, sources)


def _build_part(config: RunConfig, name: str, part: RewardPart, groups: Groups | None) -> Rewards:
    if isinstance(part, FunctionPart):
        return _pool(config, CustomReward(part.path, part.name, part.reward_kwargs, key=f"{PARTS}.{name}"))
    if isinstance(part, JudgePart):
        return build_judge(config, f"{PARTS}.{name}", part)
    return _build_rules(config) if isinstance(part, RulesPart) else build_reward_model(config, groups)


def _build_rules(config: RunConfig) -> RewardPool | LocalRewards | BatchedRewards:
    """A user's function is loaded and checked in the processes; one that is an object runs here."""
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
