"""Builds a text run from its configuration. `build_run` calls the builders in this order:

1. `build_inputs` loads and checks model paths, tokenizer and prompts; `check_external_servers` checks external servers.
2. `build_groups` starts the processes of several devices; `build_rewards` builds the reward.
3. `build_roles` loads policy, critic, reference and sampler; `build_collector` builds what samples and scores.
4. `_rollouts` builds the source of each step's batch; `_build_async_sampling` makes it sample while the policy trains.
5. The `Trainer` shapes rewards, estimates advantages, corrects and filters the batch, and updates the models.
6. `preflight` is what the run checks before its first step.

Each component is built by a function, or its `from_config`, that takes only the configuration sections it needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.batch import KeptTokens, Prompt, RolloutBatch, TrainBatch
from tether.checkpoints import sha256_of
from tether.config import (
    DRAW,
    NO_DRAW,
    LoadedConfig,
    RunConfig,
    changes_since,
    local_references,
    reference_models,
    stored_weights,
    uses_megatron,
)
from tether.config.schema import AlgorithmConfig
from tether.distributed.groups import RankGroups, build_groups
from tether.integrations import integration
from tether.loop.ahead import SamplingAhead, SourceAhead
from tether.loop.alarms import MismatchAlarm, mismatch_tolerance
from tether.loop.checkpoint import check_identity, model_fingerprint, object_fingerprint
from tether.loop.config import TrainerConfig
from tether.loop.engine import AnyLearner
from tether.loop.loop import Schedule, Trainer
from tether.loop.preflight import preflight
from tether.loop.run import Run, begin_run, build_profiler, build_recorder, checkpoint_line, ranks_line
from tether.runtime.disk import ANOTHER_CHECKPOINT, read_json
from tether.runtime.objects import is_object, registered_object
from tether.text.data.config import DataConfig
from tether.text.data.prompts import PromptDataset, PromptSampler, dated_template
from tether.text.input_checks import TURNS
from tether.text.inputs import Inputs, build_inputs, check_adapters
from tether.text.learning.advantages import (
    build_advantage_estimator,
    build_greedy_baseline,
    build_kl_reward,
    build_reward_components,
    build_reward_shaping,
    check_own_functions,
)
from tether.text.learning.build import check_router_replay
from tether.text.learning.build_collector import build_collector
from tether.text.learning.collector import Collector, ScoredResponses
from tether.text.learning.config_distillation import TEACHERS, teacher_of_source
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.evaluation import Evaluation
from tether.text.learning.off_policy import (
    build_dynamic_sampling,
    build_policy_filtration,
    build_rollout_correction,
    build_rollout_files,
    old_log_probs_from,
)
from tether.text.learning.preflight import ChatFormat, sample_responses
from tether.text.learning.recording import SampleRecorder
from tether.text.learning.rollouts import PromptSource, TextRollouts
from tether.text.loading import DTYPES, formats_line
from tether.text.rewards.build import build_rewards, reward_model_path
from tether.text.rewards.config import CustomRewardFunctionConfig
from tether.text.rewards.outcome import (
    Abstention,
    Dialogue,
    ErrorSample,
    RewardError,
    RewardReport,
    RewardRequest,
    Score,
)
from tether.text.roles import build_roles
from tether.text.sampling.config import RolloutConfig
from tether.text.sampling.config_rules import staleness_problem
from tether.text.sampling.parity import MORE_ROWS, ParityProbe
from tether.text.sampling.protocol import NoiseKey, RolloutEngine, SamplingParams
from tether.text.servers.build import check_external_servers
from tether.text.sources import ModelSpecs
from tether.text.start import start_run
from tether.text.turns.build import build_tool_pool
from tether.text.turns.tools import (
    AGENTS_KEY,
    EnvironmentSpec,
    ToolPool,
    ToolSpec,
    read_agents,
    read_environments,
    read_tools,
)

STORED_CLASSES = (
    TrainBatch, RolloutBatch, KeptTokens, ScoredResponses, Prompt, Score, Abstention, RewardError, RewardReport,
    ErrorSample, RewardRequest, Dialogue,
)  # fmt: skip
"""Classes that may occur in stored batches of asynchronous sampling."""


def build_run(loaded: LoadedConfig, begin: Callable[[str], None] = lambda activity: None) -> Run:
    """Build everything that a run needs, and resume from a checkpoint according to ``trainer.resume_mode``.

    `begin` is called with a description of each activity when it starts.

    Raises:
        ValueError: the inputs are invalid.
    """
    config = loaded.config
    check_own_functions(config.algorithm, config.actor_rollout_ref.actor, has_critic=config.critic.enable)
    with ExitStack() as resources:
        start = start_run(loaded, resources)
        loaded, device, store, checkpoint = start.loaded, start.device, start.store, start.checkpoint
        config, directory = loaded.config, store.root
        algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
        tools = build_tool_pool(rollout, config.data)
        if tools:
            resources.callback(tools.close)
        inputs = _inputs(config, tools, checkpoint, begin)
        check_external_servers(config.actor_rollout_ref, inputs.model_path, device)
        identity = _identity(config, inputs)
        if checkpoint:
            check_identity(checkpoint, identity)
        saved_identity = identity | _scoring_files(rollout, config.custom_reward_function)
        groups = build_groups(config, device, directory / "ranks", resources)
        rewards = build_rewards(config, groups)
        resources.callback(rewards.close)
        sampler = _sampler(config.data, algorithm, len(inputs.train))
        schedule = _schedule(config, len(inputs.train))
        profiler = build_profiler(config.trainer, schedule, groups.all_ranks if groups else None)
        steps, incidents = schedule.total_steps, directory / "incidents"
        paths = (inputs.model_path, inputs.critic_path, inputs.reference_paths)
        model_specs = ModelSpecs(*paths, inputs.tokenizer, checkpoint, device, steps, incidents)
        roles = build_roles(config, model_specs, SamplingParams.from_config(rollout), directory, resources, groups)
        datasets = list(filter(None, (inputs.train, inputs.validation)))
        collector = build_collector(config, roles.sampler, rewards, inputs.tokenizer, datasets, tools, resources)
        parts = begin_run(loaded, store, saved_identity, schedule, checkpoint, resources)
        warn = parts["loggers"].warn
        source = PromptSource(inputs.train, sampler)
        rollouts = _rollouts(config, inputs, collector, sampler, groups, warn)
        ahead = _build_async_sampling(loaded, source, rollouts, roles.actor, schedule, warn)
        if ahead:
            resources.callback(ahead.close)
        shaping = build_reward_shaping(algorithm, config.reward_model, config.data.max_response_length)
        filtration = build_policy_filtration(algorithm, config.trainer.seed)
        trainer = Trainer(
            source=SourceAhead(ahead) if ahead else source,
            rollouts=ahead or rollouts,
            actor=roles.actor,
            critic=roles.critic,
            reference=roles.reference,
            reward_transforms=list(filter(None, (shaping, build_kl_reward(algorithm)))),
            estimate_advantages=build_advantage_estimator(algorithm),
            rollout_correction=build_rollout_correction(algorithm.rollout_correction),
            select_rows=filtration.draw if filtration else None,
            profiler=profiler,
            recorder=SampleRecorder(build_recorder(config.trainer, checkpoint), inputs.tokenizer),
            mismatch=_mismatch_alarm(config.trainer, rollout.dtype, config.actor_rollout_ref.actor.fsdp_config.dtype),
            old_log_probs=old_log_probs_from(config),
            **parts,
        )
        if checkpoint:
            trainer.resume(checkpoint)
        learners: list[AnyLearner] = [roles.actor, *([roles.critic] if roles.critic else [])]
        chat_format = _chat_format(config.data, inputs.tokenizer)
        check = partial(preflight, partial(sample_responses, source, rollouts, chat_format), learners)
        about = [*_summary_lines(config, inputs, groups, learners), *formats_line(config, start.formats)]
        return Run(loaded, trainer, directory, checkpoint, resources.pop_all(), tuple(about), check)


def _rollouts(
    config: RunConfig,
    inputs: Inputs,
    collector: Collector,
    prompts: PromptSampler,
    groups: RankGroups | None,
    warn: Callable[[str], None],
) -> TextRollouts:
    """Build the component that makes the batch of each step and evaluates the policy."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    filter_groups, sampler, evaluation = config.algorithm.filter_groups, collector.engine, None
    if inputs.validation is not None:
        evaluation = Evaluation(inputs.validation, SamplingParams.for_validation(rollout), data.val_batch_size)
    return TextRollouts(
        collector=collector,
        sampling=SamplingParams.from_config(rollout),
        dynamic_sampling=build_dynamic_sampling(
            filter_groups, data.train_batch_size, collector, inputs.train, prompts, warn
        ),
        greedy_baseline=build_greedy_baseline(config.algorithm, rollout, config.reward_model, data.max_response_length),
        reward_components=build_reward_components(config.algorithm),
        teacher_of_source=teacher_of_source(config.distillation.teacher_models) if config.distillation.enabled else {},
        rollout_files=build_rollout_files(config.trainer, inputs.tokenizer),
        evaluation=evaluation,
        max_prompt_length=inputs.train.report.max_prompt_length,
        seed=config.trainer.seed,
        transfers=groups.all_ranks.transfers.take if groups else dict,
        weight_transfers=sampler.transfer_metrics if isinstance(sampler, ParityProbe) else dict,
        check_parity=_parity_check(config.trainer, sampler, inputs.train),
    )


def _chat_format(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    template = dated_template(tokenizer, data.chat_template, data.chat_template_date)
    return ChatFormat(template, data.apply_chat_template_kwargs)


def _summary_lines(
    config: RunConfig, inputs: Inputs, groups: RankGroups | None, learners: Sequence[AnyLearner]
) -> Iterator[str]:
    """Return lines for the user about prompts, devices and the size of checkpoints."""
    yield f"training prompts: {inputs.train.report}"
    if inputs.validation is not None:
        yield f"validation prompts: {inputs.validation.report}"
    if groups:
        yield ranks_line(config)
        if uses_megatron(config):
            yield from integration("megatron", "build").megatron_line(config, groups)
    if models := [learner.engine.model for learner in learners if isinstance(learner.engine, LocalEngine)]:
        yield from checkpoint_line(config, models)


def _build_async_sampling(
    loaded: LoadedConfig,
    source: PromptSource,
    rollouts: TextRollouts,
    actor: AnyLearner,
    schedule: Schedule,
    warn: Callable[[str], None],
) -> SamplingAhead[Any, Any] | None:
    """Return the component that samples asynchronously; None if sampling and training alternate."""
    config, mode = loaded.config, loaded.config.trainer.async_mode
    return SamplingAhead.from_async_mode(
        mode,
        config.actor_rollout_ref.rollout.max_staleness,
        source,
        rollouts,
        actor.engine.export,
        total_steps=schedule.total_steps,
        partial=mode == "fully_async" and config.actor_rollout_ref.rollout.partial_rollout,
        is_compatible=partial(_stored_batches_fit, loaded, warn),
        classes=STORED_CLASSES,
    )


def _stored_batches_fit(loaded: LoadedConfig, warn: Callable[[str], None], checkpoint: Path) -> bool:
    """Whether the stored batches of a checkpoint fit this configuration; warns if not."""
    changes = changes_since(checkpoint / "run.yaml", loaded, among=DRAW, without=NO_DRAW)
    before, now = (
        read_json(checkpoint / "identity.json", dict, ANOTHER_CHECKPOINT),
        _scoring_files(loaded.config.actor_rollout_ref.rollout, loaded.config.custom_reward_function),
    )
    changes += [f"{key}: its files have changed" for key in now if before.get(key, now[key]) != now[key]]
    if changes:
        what = f"the batches that wait in {checkpoint} are sampled again, as they were drawn with other settings"
        warn(f"{what}: {'; '.join(changes)}")
    return not changes


def _parity_check(trainer: TrainerConfig, sampler: RolloutEngine, prompts: PromptDataset) -> Callable[[], None] | None:
    """Return the function that compares sampler and trainer before the first step; None if a step does this itself."""
    if trainer.async_mode == "off" or not isinstance(sampler, ParityProbe):
        return None
    few = [prompts[row].token_ids for row in range(min(MORE_ROWS, len(prompts)))]
    return partial(sampler.verify, few, NoiseKey(trainer.seed, 0))


def _inputs(config: RunConfig, tools: ToolPool | None, checkpoint: Path | None, begin: Callable[[str], None]) -> Inputs:
    """Build the inputs of a run and check them against the training engine."""
    begin("reading the data")
    inputs = build_inputs(config, tools)
    if checkpoint is None:
        check_adapters(config, inputs)
    begin(f"loading {inputs.model_path.name if isinstance(inputs.model_path, Path) else 'the models'}")
    if uses_megatron(config):
        integration("megatron", "build").check_megatron(config, inputs.model_path, inputs.critic_path, checkpoint)
    check_router_replay(config, inputs.model_path)
    return inputs


def _identity(config: RunConfig, inputs: Inputs) -> dict[str, str]:
    identity = {"data.train_files": inputs.train.fingerprint()}
    if is_object(inputs.model_path):
        identity["actor_rollout_ref.model.path"] = object_fingerprint(registered_object(str(inputs.model_path)))
    if isinstance(inputs.model_path, Path):
        identity["actor_rollout_ref.model.path"] = model_fingerprint(inputs.model_path)
    if config.distillation.enabled:
        settings = config.distillation.teacher_models
        identity[TEACHERS] = json.dumps(teacher_of_source(settings))
        for name in local_references(config):
            if isinstance(path := inputs.reference_paths[name], Path):
                identity[reference_models(config)[name][0]] = model_fingerprint(path)
    if isinstance(inputs.critic_path, Path):
        identity["critic.model.path"] = model_fingerprint(inputs.critic_path)
    if reference := stored_weights(config).get("reference"):  # a resumed run also reads it
        identity[reference[0]] = model_fingerprint(reference[1])
    if isinstance(scores := reward_model_path(config.reward_model), Path):
        identity["reward_model.model.path"] = model_fingerprint(scores)
    return identity


def _scoring_files(rollout: RolloutConfig, custom: CustomRewardFunctionConfig) -> dict[str, str]:
    """Return key -> fingerprint of user files that score or reply; a resumed run may have different ones."""
    named, turns = {"custom_reward_function.path": [custom.path or ""]}, rollout.multi_turn
    if path := turns.tool_config_path:
        tools = [tool.class_name for tool in read_tools(path) if isinstance(tool, ToolSpec)]
        named[f"{TURNS}.tool_config_path"] = [path, *tools]
    if path := turns.function_tool_path:
        named[f"{TURNS}.function_tool_path"] = [path]
    if path := turns.interaction_config_path:
        named[f"{TURNS}.interaction_config_path"] = [path, *_classes(read_environments(path))]
    if path := rollout.agent.agent_loop_config_path:
        named[AGENTS_KEY] = [path, *_classes(read_agents(path))]
    files = {key: [Path(name.partition(":")[0]).expanduser() for name in names] for key, names in named.items()}
    return {key: " ".join(sha256_of([file for file in paths if file.is_file()])) for key, paths in files.items()}


def _classes(environments: Mapping[str, EnvironmentSpec]) -> list[str]:
    return [environment.class_name for environment in environments.values()]


def _sampler(data: DataConfig, algorithm: AlgorithmConfig, num_prompts: int) -> PromptSampler:
    size = data.gen_batch_size if algorithm.filter_groups.enable else data.train_batch_size
    return PromptSampler(num_prompts, size, shuffle=data.shuffle, seed=data.seed)


def _schedule(config: RunConfig, num_prompts: int) -> Schedule:
    trainer = config.trainer
    # Does not account for groups that dynamic sampling drops.
    batches_per_epoch = math.ceil(num_prompts / config.data.train_batch_size)
    total_steps = trainer.total_training_steps or trainer.total_epochs * batches_per_epoch
    if problem := staleness_problem(config, total_steps):
        raise ValueError(str(problem))
    return Schedule.from_config(trainer, total_steps)


def _mismatch_alarm(trainer: TrainerConfig, *formats: str) -> MismatchAlarm:
    if trainer.async_mode != "off":  # rows of older weights: a large difference is expected
        return MismatchAlarm(math.inf)
    return MismatchAlarm(mismatch_tolerance(*(DTYPES[name] for name in formats)))
