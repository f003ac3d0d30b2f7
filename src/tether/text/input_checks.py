"""Checks that the files, models and functions named in a configuration exist, before anything is loaded.

This module does not import torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tether.config import Problem, RunConfig, local_references, reads_weights, reference_models, stored_weights
from tether.config.schema import BackboneConfig
from tether.config.support.live_keys import is_own_function
from tether.runtime.cache import cache_dir
from tether.runtime.disk import COPY_AGAIN, read_json, reading
from tether.runtime.http import check_address
from tether.runtime.install import pip_install
from tether.runtime.objects import is_object
from tether.runtime.program import environment_of
from tether.runtime.user_files import missing_file
from tether.spelling import did_you_mean
from tether.text.data.chats import load_chats
from tether.text.data.config import DataConfig
from tether.text.data.location import expand, has_tasksets, locate
from tether.text.data.rows import SINGLE_TURN, TOOL_AGENT, Row, RowAgent, Rows, agent_of
from tether.text.learning.config_distillation import (
    TEACHERS,
    check_has_teacher,
    read_teachers,
    teacher_of_source,
    teacher_problems,
)
from tether.text.models.model_path import resolve_model_path
from tether.text.models.saved_adapter import check_adapter
from tether.text.rewards.config import CustomRewardFunctionConfig, RewardModelConfig
from tether.text.rewards.config_parts import FunctionPart, JudgePart, check_has_part, part_problems, read_parts
from tether.text.rewards.custom import ARGUMENTS, LISTS, check_call
from tether.text.rewards.judge import NUMBER, Judge
from tether.text.rewards.router import check_source, check_truth, has_tests
from tether.text.rewards.sandbox import ProgramOptions, Server
from tether.text.sampling.config import SERVERS, RolloutConfig
from tether.text.turns.config import (
    AGENT,
    ENDPOINT,
    ENDPOINT_PROGRAM,
    ENDPOINT_REWARD,
    VERIFIERS,
    AgentConfig,
    MultiTurnConfig,
)
from tether.text.turns.tools import (
    AGENTS_KEY,
    LIBRARY,
    EnvironmentSpec,
    ToolSpec,
    class_problem,
    read_agents,
    read_environments,
    read_tools,
)

if TYPE_CHECKING:
    from tether.batch import Prompt

TEMPLATES = (".txt", ".md")
"""Suffixes by which a prompt is recognised as the name of a file."""


def judge_of(key: str, section: JudgePart) -> Judge:
    """Return the template and parser of a judge's section.

    Raises:
        ValueError: they are invalid, or the file cannot be read; the message begins with `key`.
    """
    judge = Judge(_text(key, section.prompt), section.system, section.parser or NUMBER, section.scores, section.range)
    judge.check(key)
    return judge


def _text(key: str, prompt: str) -> str:
    """Return a prompt, or the content of the file that it names."""
    if not prompt.endswith(TEMPLATES) or "\n" in prompt:
        return prompt
    try:
        return Path(prompt).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"{key}.prompt: {prompt} cannot be read ({why})") from error


TURNS = "actor_rollout_ref.rollout.multi_turn"
NEEDS_TURNS = f"answers in turns. Set {TURNS}.enable=True"
_AGENT_REGEX = rf".+\.py:\w+|{LIBRARY}.+"


def row_agent(agent: AgentConfig, row: Row | Prompt) -> RowAgent:
    """Return the agent of a row."""
    return agent_of(row.agent_name or agent.default_agent_loop, row.extra_info)


def interactions_of(turns: MultiTurnConfig) -> Sequence[str]:
    """Return the valid names in `extra_info.interaction_kwargs.name` of rows of `tool_agent`.

    Raises:
        ValueError: the file of `interaction_config_path` cannot be read.
    """
    path = turns.interaction_config_path
    return list(read_environments(path)) if path else []


def agents_of(agent: AgentConfig) -> Sequence[str]:
    """Return the names of the agents in `agent_loop_config_path`.

    Raises:
        ValueError: the file cannot be read, or does not have the default agent.
    """
    path, default = agent.agent_loop_config_path, agent.default_agent_loop
    names = list(read_agents(path)) if path else []
    if path and default not in (SINGLE_TURN, TOOL_AGENT, ENDPOINT, *names) and not re.fullmatch(_AGENT_REGEX, default):
        raise ValueError(f"{path}: has no agent {default}, which {AGENT} names.{did_you_mean(default, names)}")
    return names


def agent_problem(
    rollout: RolloutConfig, row: Row, interactions: Sequence[str] | None, agents: Sequence[str] | None
) -> str:
    """Return the problem with the agent that a row names, or an empty string; None for the names accepts any."""
    name = row.agent_name
    if rollout.agent.plays_endpoint and rollout.agent.endpoint.program == VERIFIERS:
        what = f"has no environment, which {ENDPOINT_PROGRAM}={VERIFIERS} plays. Name one in data: verifiers:NAME"
        return "" if "verifiers" in row.extra_info else what
    if name is not None and rollout.agent.plays_endpoint:
        return f"`agent_name` is {name!r}, but a program plays every row ({AGENT}={ENDPOINT}). Drop the column"
    known = agents is None or name in (None, SINGLE_TURN, TOOL_AGENT, *agents)
    if not known and not re.fullmatch(_AGENT_REGEX, str(name)):
        own_class = "or your own class: FILE.py:CLASS"
        choices = ", ".join((SINGLE_TURN, TOOL_AGENT, *(agents or ())))
        return f"`agent_name` is {name!r}; it may be {choices}, {LIBRARY}ENVIRONMENT, {own_class}"
    if not rollout.multi_turn.enable:
        return "" if name in (None, SINGLE_TURN) else f"`agent_name` is {name!r}, which {NEEDS_TURNS}"
    if (name or rollout.agent.default_agent_loop) != TOOL_AGENT:
        return ""
    of_tools, of_interaction = (row.extra_info.get(key) or {} for key in ("tools_kwargs", "interaction_kwargs"))
    objects = {"tools_kwargs": of_tools, "interaction_kwargs": of_interaction}
    if isinstance(of_tools, Mapping):
        objects |= {f"tools_kwargs.{tool}": kwargs or {} for tool, kwargs in of_tools.items()}
    for key, settings in objects.items():
        if not isinstance(settings, Mapping):
            return f"`extra_info.{key}` is {str(settings)[:80]!r}, not an object with keys"
    wanted = of_interaction.get("name")
    if wanted is not None and interactions is not None and wanted not in interactions:
        available = (
            f"{TURNS}.interaction_config_path has {', '.join(interactions) or 'none: give interaction_config_path'}"
        )
        return f"`extra_info.interaction_kwargs.name` is {wanted!r}; {available}"
    return ""


def environment_problem(rollout: RolloutConfig) -> str:
    """Return why a run cannot use environments of the installed verifiers, or an empty text."""
    is_played = rollout.agent.plays_endpoint and rollout.agent.endpoint.program == VERIFIERS
    if has_tasksets():
        program = f"{AGENT}={ENDPOINT}, {ENDPOINT_PROGRAM}={VERIFIERS} and {ENDPOINT_REWARD}=program"
        return "" if is_played else f"an environment of verifiers 0.4 or later, which a program plays. Set {program}"
    if rollout.agent.plays_endpoint:
        return f"an environment of verifiers before 0.4, which {NEEDS_TURNS}, and leave {AGENT}={ENDPOINT} out"
    return "" if rollout.multi_turn.enable else f"an environment, which {NEEDS_TURNS}"


def check_turns_are_used(turns: MultiTurnConfig, agents: set[tuple[RowAgent, RowAgent]]) -> None:
    """Refuse configured turns, tools and interactions that no row of a run uses.

    Args:
        turns: the `multi_turn` section.
        agents: pairs, for each row, of its agent and the agent that it would have as a row of `tool_agent`.

    Raises:
        ValueError: the message names the setting, and what a row needs to use it.
    """
    default = "actor_rollout_ref.rollout.agent.default_agent_loop"
    if not turns.enable:
        return
    of_tools = [agent.environment for agent, _ in agents if agent.has_tools]
    if not of_tools and not any(agent.environment for agent, _ in agents):
        advice = f"Set {default}, or give the rows an `agent_name`"
        if any(would.environment for _, would in agents):
            named = "the interaction that rows name in `extra_info.interaction_kwargs.name`"
            advice = f"Set {default}={TOOL_AGENT}, by which {named} acts"
        raise ValueError(f"{TURNS}.enable=True: no row has several turns. {advice}")
    of_agent = f"is of {TOOL_AGENT} ({default})"
    if turns.tool_config_path and not of_tools:
        what, path, needed = "tool_config_path", turns.tool_config_path, of_agent
    elif turns.function_tool_path and not of_tools:
        what, path, needed = "function_tool_path", turns.function_tool_path, of_agent
    elif turns.interaction_config_path and not any(of_tools):
        what, path = "interaction_config_path", turns.interaction_config_path
        needed = f"is of {TOOL_AGENT} ({default}) and names one in `extra_info.interaction_kwargs.name`"
    else:
        return
    raise ValueError(f"{TURNS}.{what}={path}: has no effect, as no row {needed}. Leave it out, or change the rows")


_MISSING = 3
_FIND_SPEC = f"import importlib.util, sys; sys.exit({_MISSING} if importlib.util.find_spec(sys.argv[1]) is None else 0)"


FIRST_ROWS = 100
"""Number of rows to check per file if the run reads all rows soon afterwards."""


def missing_inputs(
    config: RunConfig, sections: tuple[str, ...] = ("",), rows: int | None = FIRST_ROWS
) -> list[Problem]:
    """Return a problem for everything that a configuration names and that does not exist.

    User files are parsed, not run.

    Args:
        config: configuration of a run.
        sections: prefixes of the keys to check.
        rows: number of rows to check per file; None: all.
    """
    if config.sft.enable:
        named = _fine_tuning_inputs(config, rows)
    else:
        named = _control_inputs(config) if config.env.train.id is not None else _text_inputs(config, rows)
    problems: dict[str, Problem] = {}
    for key, value, look in named:
        # A path under several keys is reported once, for the first key; querying a hub again would take time.
        if is_object(value) or value in problems or not key.startswith(sections):
            continue
        try:
            look(value)
        except ValueError as error:
            named_there, _, what = str(error).partition(": ")
            match = re.fullmatch(rf"({re.escape(key)}(?:\.\w+)?)(?:=(.*))?", named_there)
            where = match[1] if match else key
            if not match or match[2]:
                what = str(error).removeprefix(f"{where}=")
            problems[value] = Problem(where, what, "")
    return list(problems.values())


def missing_anywhere(config: RunConfig, say: Callable[[str], None]) -> list[Problem]:
    """Return `missing_inputs` for all rows, but pass problems of this machine only to `say`: another one may train."""
    problems = missing_inputs(config, rows=None)
    local = [item for item in problems if item.path == PROGRAMS and config.reward_model.sandbox_fusion.url is None]
    for item in local:
        say(f"this machine cannot train it: {item}")
    return [item for item in problems if item not in local]


def missing_reward_inputs(config: RunConfig) -> list[Problem]:
    """Return `missing_inputs` of a reward trial without sampling; it needs no policy if the reward reads only texts."""
    reward = ("data.train_files", "custom_reward_function.", "reward_model.")
    return missing_inputs(config, reward if scoring_reads_only_texts(config) else ("",))


def scoring_reads_only_texts(config: RunConfig) -> bool:
    """Whether neither the reward nor the rows need a tokenizer."""
    turns, custom = config.actor_rollout_ref.rollout.multi_turn, config.data.custom_cls
    return not is_scored_by_models(config.reward_model) and not custom.path and not turns.enable


def is_scored_by_models(reward: RewardModelConfig) -> bool:
    """Whether a reward model or a judge scores responses."""
    sections = reward.parts
    judges = not part_problems(sections) and any(
        isinstance(section, JudgePart) for section in read_parts(sections).values()
    )
    return reward.enable or judges


PROGRAMS = "reward_model.sandbox"
NO_TEMPLATE = (
    "its tokenizer has no chat template, so responses cannot be written for it. Add one to tokenizer_config.json, or "
    "set reward_model.model.input_tokenizer=null where it has the policy's tokenizer."
)
InputsToCheck = Iterator[tuple[str, str, Callable[[str], object]]]
"""(key, value, function that raises a ValueError if what the value names does not exist)"""


def _text_inputs(config: RunConfig, first: int | None) -> InputsToCheck:
    model, data, custom = config.actor_rollout_ref.model, config.data, config.custom_reward_function
    policy = partial(_model, weights=reads_weights(config, "actor", "reference"))
    yield "actor_rollout_ref.model.path", model.path, policy
    yield "actor_rollout_ref.model.tokenizer_path", model.tokenizer_path, partial(_model, weights=False)
    if config.critic.enable:
        yield "critic.model.path", config.critic.model.path, partial(_model, weights=reads_weights(config, "critic"))
    if config.distillation.enabled and not teacher_problems(config.distillation.teacher_models):
        for name, (key, named) in reference_models(config).items():
            yield key, named, partial(_model, weights=name in local_references(config))
        for name, teacher in read_teachers(config.distillation.teacher_models).items():
            if teacher.server_url is not None:
                key = f"{TEACHERS}.{name}.server_url"
                yield key, teacher.server_url, partial(check_address, key=key)
    for section, settings in trained_sections(config).items():
        if settings.lora_adapter_path is not None:
            check = partial(_adapter, section, settings)
            yield f"{section}.lora_adapter_path", settings.lora_adapter_path, check
    yield from ((key, str(folder), _path) for key, folder in stored_weights(config).values())
    if config.reward_model.enable and config.reward_model.model.path:
        writes = config.reward_model.model.input_tokenizer is not None
        yield "reward_model.model.path", config.reward_model.model.path, partial(_reward_model, writes=writes)
    if config.reward_model.enable and config.reward_model.server.url:
        key = "reward_model.server.url"
        yield key, config.reward_model.server.url, partial(check_address, key=key)
    rollout, reward = config.actor_rollout_ref.rollout, config.reward_model
    turns = rollout.multi_turn
    sources, agents = set[str](), dict[str, set[tuple[RowAgent, RowAgent]]]()
    if data.custom_cls.path:
        yield "data.custom_cls.path", f"{data.custom_cls.path}:{data.custom_cls.name}", _definition
    else:
        rows = partial(_rows, config, first, sources, agents)
        yield from (("data.train_files", name, rows) for name in data.train_files)
        yield from (("data.val_files", name, rows) for name in data.val_files)
        is_complete = first is None and agents.keys() == {*data.train_files, *data.val_files}
        if is_complete and not rollout.agent.plays_endpoint:  # a rule refuses turns of the run with an endpoint
            yield TURNS, TURNS, lambda _: check_turns_are_used(turns, set().union(*agents.values()))
    if any(map(has_tests, sources)):
        yield PROGRAMS, str(config.reward_model.sandbox), partial(_programs, reward)
    if custom.path:
        named = f"{custom.path}:{custom.name}"
        yield "custom_reward_function.path", named, _definition
        yield (
            "custom_reward_function.name",
            named,
            partial(
                _reward,
                reward_kwargs=custom.reward_kwargs,
                arguments=LISTS if config.reward_model.reward_manager == "batch" else ARGUMENTS,
            ),
        )
    yield from _reward_part_inputs(reward)
    if rollout.name in SERVERS and not rollout.server_urls:
        yield "actor_rollout_ref.rollout.name", rollout.name, server_python
    elif rollout.name in SERVERS:
        yield from (("actor_rollout_ref.rollout.server_urls", url, server_address) for url in rollout.server_urls)
    if turns.tool_config_path:
        yield f"{TURNS}.tool_config_path", turns.tool_config_path, _tools
    if turns.function_tool_path:
        yield f"{TURNS}.function_tool_path", turns.function_tool_path, _functions
    if turns.interaction_config_path:
        yield f"{TURNS}.interaction_config_path", turns.interaction_config_path, _interactions
    if path := rollout.agent.agent_loop_config_path:
        yield AGENTS_KEY, path, partial(_agents, rollout.agent)
    if is_own_function(rollout.agent.default_agent_loop):
        yield "actor_rollout_ref.rollout.agent.default_agent_loop", rollout.agent.default_agent_loop, _environment_class
    program = rollout.agent.endpoint.program
    if rollout.agent.plays_endpoint and program and program != VERIFIERS:
        yield ENDPOINT_PROGRAM, program, _definition if is_own_function(program) else _command
    yield from _common_inputs(config)


def _fine_tuning_inputs(config: RunConfig, first: int | None) -> InputsToCheck:
    model, data = config.actor_rollout_ref.model, config.data
    yield "actor_rollout_ref.model.path", model.path, _model
    yield "actor_rollout_ref.model.tokenizer_path", model.tokenizer_path, partial(_model, weights=False)
    if model.lora_adapter_path is not None:
        section = "actor_rollout_ref.model"
        yield f"{section}.lora_adapter_path", model.lora_adapter_path, partial(_adapter, section, model)
    for key, names in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        yield from ((key, name, partial(_chats, data, first)) for name in names)
    yield from _common_inputs(config)


def _chats(data: DataConfig, first: int | None, name: str) -> None:
    """Check the rows of a file; those of a hub are checked when the run is built."""
    if locate(expand(name)[0]).kind != "hub":
        load_chats(data, [name], first)


def trained_sections(config: RunConfig) -> dict[str, BackboneConfig]:
    """Return the sections of the models that are trained."""
    sections: dict[str, BackboneConfig] = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    return sections | ({"critic.model": config.critic.model} if config.critic.enable else {})


def _adapter(section: str, settings: BackboneConfig, _: str) -> None:
    check_adapter(section, settings)


def _reward_part_inputs(reward: RewardModelConfig) -> InputsToCheck:
    if part_problems(reward.parts):  # those are reported separately
        return
    for name, section in read_parts(reward.parts).items():
        if isinstance(section, FunctionPart):
            named, key = f"{section.path}:{section.name}", f"reward_model.parts.{name}"
            yield f"{key}.path", named, _definition
            yield f"{key}.name", named, partial(_reward, reward_kwargs=section.reward_kwargs, key=key)
        elif isinstance(section, JudgePart):
            key = f"reward_model.parts.{name}"
            yield key, key, partial(judge_of, section=section)
            if section.path is not None:
                yield f"{key}.path", section.path, _model
            if section.base_url is not None:
                yield f"{key}.base_url", section.base_url, partial(check_address, key=f"{key}.base_url")


def _control_inputs(config: RunConfig) -> InputsToCheck:
    if config.actor_rollout_ref.model.path:
        yield "actor_rollout_ref.model.path", config.actor_rollout_ref.model.path, _path
    for role, env in (("env.train", config.env.train), ("env.eval", config.env.eval)):
        yield f"{role}.id", env.id or "", _environment
        yield from ((f"{role}.wrappers", name.partition("?")[0], _wrapper) for name in env.wrappers)
    if is_own_function(config.policy.model_type):
        yield "policy.model_type", config.policy.model_type, _definition
    if config.policy.features_extractor:
        yield "policy.features_extractor", config.policy.features_extractor, _definition
    yield from _common_inputs(config)


def _common_inputs(config: RunConfig) -> InputsToCheck:
    functions = {
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "actor_rollout_ref.actor.policy_loss.loss_mode": config.actor_rollout_ref.actor.policy_loss.loss_mode,
    }
    yield from ((key, name, _definition) for key, name in functions.items() if is_own_function(name))
    yield from (("trainer.logger", name, _definition) for name in config.trainer.logger if is_own_function(name))
    if config.trainer.resume_mode == "resume_path" and config.trainer.resume_from_path:
        yield "trainer.resume_from_path", config.trainer.resume_from_path, _path
    yield from ((key, package, partial(_package, extra=extra)) for key, package, extra in _packages(config))


LOGGER_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
SIMULATOR_PACKAGES = {"envpool": "envpool", "metaworld": "metaworld", "maniskill": "mani_skill", "libero": "libero"}


def _packages(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each optional package that the configuration requires: (key, import name, extra of tether)."""
    if config.trainer.devices > 1:
        yield "trainer.n_gpus_per_node", "ray", "ray"
    if config.actor_rollout_ref.rollout.agent.plays_endpoint:
        yield from ((AGENT, package, "endpoint") for package in ("starlette", "uvicorn"))
        if config.actor_rollout_ref.rollout.agent.endpoint.program == VERIFIERS:
            yield ENDPOINT_PROGRAM, VERIFIERS, VERIFIERS
    yield from (("trainer.logger", name, name) for name in config.trainer.logger if name in LOGGER_PACKAGES)
    adapted = [section for section, settings in trained_sections(config).items() if settings.lora_rank > 0]
    yield from ((f"{section}.lora_rank", "peft", "lora") for section in adapted)
    if config.env.train.id is not None:
        yield "env.train.id", "gymnasium", "gymnasium"
        if (simulator := config.env.train.env_type) in SIMULATOR_PACKAGES:
            yield "env.train.env_type", SIMULATOR_PACKAGES[simulator], simulator


def _package(name: str, extra: str) -> None:
    if find_spec(name) is None:
        raise ValueError(f"needs the package {name}, which is not installed. Run: {pip_install(extra)}")


def _rows(
    config: RunConfig,
    first: int | None,
    sources: set[str],
    agents: dict[str, set[tuple[RowAgent, RowAgent]]],
    name: str,
) -> None:
    """Check a source of rows; for a file, check the first rows, their agents and the rules that score them.

    Adds the data sources that rules score to `sources`, and the known agents of each source of rows to `agents`, for
    `check_turns_are_used`.
    """
    kind, rollout = locate(expand(name)[0]).kind, config.actor_rollout_ref.rollout
    if kind == "environment" and (problem := environment_problem(rollout)):
        raise ValueError(f"{name}: {problem}")
    if kind == "environment":
        agents[name] = {(RowAgent(False, name), RowAgent(False, name))}
    if kind != "file":
        return
    rows, defined = rows_of(config.data, name, first), set[str]()
    rules = _rules_score(rollout, config.reward_model, config.custom_reward_function)
    interactions: Sequence[str] | None = None
    named: Sequence[str] | None = None
    with suppress(ValueError):  # reported under its own key
        interactions = interactions_of(rollout.multi_turn)
    with suppress(ValueError):
        named = agents_of(rollout.agent)
    configured = config.reward_model.parts
    sections = {} if part_problems(configured) else read_parts(configured)
    distillation, taught = config.distillation, dict[str, int]()
    if distillation.enabled and name in config.data.train_files and not teacher_problems(distillation.teacher_models):
        taught = teacher_of_source(distillation.teacher_models)
    problems, row_agents = list[str](), set[tuple[RowAgent, RowAgent]]()
    for row in (rows[index] for index in range(len(rows))):
        agent = row.agent_name
        row_agents.add((row_agent(rollout.agent, row), agent_of(TOOL_AGENT, row.extra_info)))
        try:
            if problem := agent_problem(rollout, row, interactions, named):
                raise ValueError(problem)
            if agent is not None and is_own_function(agent) and agent not in defined:
                _class(EnvironmentSpec(agent))
                defined.add(agent)
            if sections:
                check_has_part(sections, row.data_source)
            check_has_teacher(taught, row.data_source)
            if agent is None and rules:  # otherwise an environment may score the row
                check_source(row.data_source)
                sources.add(row.data_source)
                check_truth(row.data_source, row.ground_truth, row.extra_info, from_columns=row.from_columns)
        except ValueError as error:
            problems.append(f"{row.place}: {error}")
    agents[name] = row_agents
    if problems:
        more = f" ({len(problems) - 1} more of these rows have problems)" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)


def _programs(reward: RewardModelConfig, _: str) -> None:
    """Check that this machine can run programs; a server that runs them is checked later."""
    sandbox, remote = reward.sandbox, reward.sandbox_fusion.url
    server = None if remote is None else Server(remote)
    try:
        ProgramOptions(sandbox.languages, unconfined=sandbox.unconfined, server=server).check_machine()
    except ValueError as error:
        raise ValueError(str(error).removeprefix(PROGRAMS).lstrip(".: ")) from None


def _command(command: str) -> None:
    """Check that the program of a command exists."""
    words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        what = f"{command!r}: there is no program {words[0] if words else ''!r} to run"
        if words and words[0].endswith(".py") and Path(words[0]).is_file():
            what += f". Give python {command}, or a function of the file: {words[0]}:NAME"
        raise ValueError(what)


def _rules_score(rollout: RolloutConfig, reward: RewardModelConfig, custom: CustomRewardFunctionConfig) -> bool:
    """Whether only rules score the responses."""
    others = reward.enable or reward.parts or custom.path or rollout.agent.program_scores
    return not (others or rollout.multi_turn.enable or is_own_function(rollout.agent.default_agent_loop))


def rows_of(data: DataConfig, files: str | Sequence[str], first: int | None = None) -> Rows:
    """Read sources with the columns of the `data` section, by `load_rows`."""
    from tether.text.data.sources import load_rows  # imported here, because it takes a moment

    return load_rows(
        files,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        answer_key=data.answer_key,
        data_source=data.data_source,
        first=first,
    )


def _model(path: str, *, weights: bool = True) -> object:
    return resolve_model_path(path, cache_dir(), fetch=False, weights=weights)


def _reward_model(path: str, *, writes: bool) -> None:
    """Check that a reward model exists and fits the run; `writes`: it generates text, so it needs a chat template."""
    folder = _model(path)
    if not isinstance(folder, Path) or not folder.is_dir():
        return  # a hub's model is checked after the download
    with reading(folder / "config.json", COPY_AGAIN):
        settings = read_json(folder / "config.json", dict, COPY_AGAIN)
        outputs = settings.get("num_labels", len(settings.get("id2label", "01")))
    if outputs != 1:
        raise ValueError(f"{path}: its head has {outputs} outputs, and a reward model has 1")
    tokenizer = folder / "tokenizer_config.json"
    in_file = tokenizer.is_file() and "chat_template" in read_json(tokenizer, dict, COPY_AGAIN)
    if writes and tokenizer.is_file() and not in_file and not any(folder.glob("*chat_template*")):
        raise ValueError(f"{path}: {NO_TEMPLATE}")


def server_address(url: str) -> str:
    """Check the address of an external server, and return it unchanged.

    Raises:
        ValueError: the address is not http://HOST:PORT or http://HOST.
    """
    try:
        address = urlsplit(url)
        is_complete = (
            address.scheme == "http" and address.hostname and address.port != 0 and not address.path.strip("/")
        )
    except ValueError:  # the port is not a number
        is_complete = False
    if not is_complete:
        key = "actor_rollout_ref.rollout.server_urls"
        raise ValueError(f"{key}={url}: is no address of a server; give http://HOST:PORT, without a path")
    return url


def server_python(name: str) -> Path:
    """Return the Python interpreter of the environment of a server, vLLM or SGLang.

    Raises:
        ValueError: there is no such environment, or it lacks the package.
    """
    try:
        python = environment_of(name, f"TETHER_{name.upper()}")
        looked = subprocess.run([python, "-I", "-c", _FIND_SPEC, name], capture_output=True, check=False)
        if looked.returncode == _MISSING:
            raise ValueError(f"{name} runs in an environment of its own, and that of {python} does not have it")
        return python
    except ValueError as error:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={error}. Run tether setup {name}, which makes one, or say in "
            f"TETHER_{name.upper()} where it is; name servers that run in actor_rollout_ref.rollout.server_urls; or "
            "set actor_rollout_ref.rollout.name=native"
        ) from None


def _tools(path: str) -> None:
    _classes(tool for tool in read_tools(path) if isinstance(tool, ToolSpec))


def _functions(path: str) -> None:
    if not any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in _parsed(path).body):
        raise ValueError(f"{path}: defines no function")


def _interactions(path: str) -> None:
    _classes(read_environments(path).values())


def _agents(agent: AgentConfig, path: str) -> None:
    agents_of(agent)
    _classes(read_agents(path).values())


def _environment_class(name: str) -> None:
    _class(EnvironmentSpec(name))


def _classes(named: Iterable[ToolSpec | EnvironmentSpec]) -> None:
    """Check every ``FILE.py:Class``, and the top-level package of each ``package.module.Class`` without importing
    it."""
    for spec in named:
        try:
            if ":" in spec.class_name:
                _class(spec)
            elif not _is_module(package := spec.class_name.partition(".")[0]):
                raise ValueError(f"{spec.class_name}: there is no module {package}")
        except ValueError as error:
            raise ValueError(f"{spec.place}.{spec.class_key}={error}") from None


def _class(spec: ToolSpec | EnvironmentSpec) -> None:
    """Check a ``FILE.py:Class``, and its methods and arguments if the file defines all of them."""
    _definition(spec.class_name)
    file, _, name = spec.class_name.rpartition(":")
    classes = {node.name: node for node in _parsed(file).body if isinstance(node, ast.ClassDef)}
    names, takes, waiting = set[str](), inspect.Signature(), [name]
    while waiting:
        definition = classes.get(waiting.pop())
        if definition is None or definition.decorator_list or definition.keywords:
            return
        defined = {*_top_level(definition)}
        if "__new__" in defined:
            return
        if "__init__" in defined - names:
            made = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
            if not made or made[-1].decorator_list:
                return
            del (made[-1].args.posonlyargs or made[-1].args.args)[:1]
            takes = _signature(made[-1].args)
        names |= defined
        waiting += [base.id if isinstance(base, ast.Name) else "" for base in reversed(definition.bases)]
    if problem := class_problem(spec, names, takes):
        raise ValueError(f"{spec.class_name} {problem}")


def _is_module(name: str) -> bool:
    return find_spec(name) is not None or Path(name).is_dir() or Path(f"{name}.py").is_file()


def _path(name: str) -> None:
    if not Path(name).expanduser().exists():
        raise ValueError(missing_file(Path(name).expanduser()))


def _environment(named: str) -> None:
    """Check the file of ``FILE.py:FUNCTION`` or ``FILE.py:ID``; whether an id is registered is checked later."""
    module, _, name = named.rpartition(":")
    if named.endswith(".py") or not name:
        file = named.removesuffix(":")
        raise ValueError(f"{named}: names no environment. Of a file give {file}:FUNCTION or {file}:ID.")
    if module.endswith(".py"):
        _parsed(module)


def _wrapper(named: str) -> None:
    """Check ``FILE.py:Class``; ``module:Class`` is checked later."""
    module, _, name = named.rpartition(":")
    if not (module and name):
        raise ValueError(f"{named}: names no class. Give module:Class or FILE.py:Class.")
    if module.endswith(".py"):
        _definition(named)


def _definition(named: str) -> None:
    """Check that a file defines or imports the name in ``file.py:name``."""
    file, _, name = named.rpartition(":")
    names = list(_top_level(_parsed(file)))
    if name not in names and "*" not in names:
        raise ValueError(f"{file}: defines no {name}.{did_you_mean(name, names)}")


def _reward(
    named: str,
    reward_kwargs: Mapping[str, object],
    key: str = "custom_reward_function",
    arguments: Sequence[str] = ARGUMENTS,
) -> None:
    """Check the arguments of a reward function, if it is a plain ``def`` in the file."""
    file, _, name = named.rpartition(":")
    functions = [node for node in _parsed(file).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if functions and not functions[-1].decorator_list:
        check_call(_signature(functions[-1].args), Path(file), name, reward_kwargs, key, arguments)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of these arguments, without annotations and with defaults as source text."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(ast.unparse(default)) for default in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(ast.unparse(default)) for default in arguments.kw_defaults]
    function = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    parameters = inspect.signature(eval(compile(function, "arguments", "eval"))).parameters.values()
    defaults = {p.name: p.default if p.default is p.empty else _Written(p.default) for p in parameters}
    return inspect.Signature([p.replace(default=defaults[p.name]) for p in parameters])


class _Written(str):
    """Source text of an expression, which messages show without quotes."""

    __repr__ = str.__str__


def _parsed(file: str) -> ast.Module:
    _path(file)
    path = Path(file).expanduser()
    if path.suffix != ".py" or path.is_dir():
        raise ValueError(f"{file}: is not a Python file; its name must end in .py")
    try:
        return ast.parse(path.read_bytes(), filename=file)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: is not Python ({error})") from error


def _top_level(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the names that a module or class defines, including those in an `if` or `try`."""
    open_nodes: list[ast.AST] = [tree]
    while open_nodes:
        for node in ast.iter_child_nodes(open_nodes.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.alias):
                yield node.asname or node.name.split(".")[0]
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            else:
                open_nodes.append(node)
