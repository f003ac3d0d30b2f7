"""The inputs of a run before any weights: model paths, tokenizer and prompts, all checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tether.config import (
    LoadedConfig,
    RunConfig,
    device_count,
    full_kl_in_loss,
    local_references,
    placed,
    reads_weights,
    reference_models,
    saved_values,
    values_of,
)
from tether.config.schema import ModelConfig
from tether.runtime.cache import cache_dir
from tether.runtime.objects import is_object
from tether.spelling import did_you_mean
from tether.text.data.columns import Columns
from tether.text.data.config import DataConfig
from tether.text.data.custom import load_custom_dataset, rows_of_object
from tether.text.data.examples import ExampleDataset
from tether.text.data.prompts import PromptDataset, PromptOptions, dated_template, today
from tether.text.data.rows import Row, RowAgent, Rows
from tether.text.input_checks import check_turns_are_used, rows_of, trained_sections
from tether.text.learning.config_distillation import (
    TEACHERS,
    DistillationConfig,
    check_has_teacher,
    read_teachers,
    teacher_of_source,
)
from tether.text.learning.served_teacher import build_served_teachers
from tether.text.models.load import load_config, load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.models.saved_adapter import check_adapter
from tether.text.rewards.build import check_reward_parts_are_used, check_rewards, check_scoring
from tether.text.turns.build import check_agents
from tether.text.turns.tools import ToolPool


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a run."""

    model_path: Path | str
    critic_path: Path | str
    reference_paths: Mapping[str, Path | str]
    """Locations of the reference models, under the names of `reference_models`."""
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    validation: PromptDataset | None


def build_inputs(config: RunConfig, tools: ToolPool | None = None) -> Inputs:
    """Locate the models, load the tokenizer, and read and tokenize the prompts.

    Raises:
        ValueError: paths, files, rows, the chat template or data sources are invalid.
    """
    model, data = config.actor_rollout_ref.model, config.data
    model_path = resolve_model_path(model.path, cache_dir(), weights=reads_weights(config, "actor", "reference"))
    critic_path = model_path
    reference_paths: dict[str, Path | str] = dict.fromkeys(reference_models(config), model_path)
    if config.critic.enable:
        of_files = reads_weights(config, "critic")
        critic_path = resolve_model_path(config.critic.model.path, cache_dir(), weights=of_files)
    if config.distillation.enabled:
        local = local_references(config)
        reference_paths = {
            name: resolve_model_path(path, cache_dir(), weights=name in local)
            for name, (_, path) in reference_models(config).items()
        }
    _check_heads(config, model_path, reference_paths.values(), critic_path)
    tokenizer = build_tokenizer(data, model, resolve_model_path(model.tokenizer_path, cache_dir(), weights=False))
    if config.distillation.enabled:
        build_served_teachers(config)  # checks that their servers respond
        for name, setting in reference_models(config).items():
            _check_teacher(config, tokenizer, model_path, reference_paths[name], "=".join(setting))
    agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
    train = build_dataset(
        data, agent, tokenizer, data.train_files, data.train_max_samples, shuffle=data.shuffle, tools=tools
    )
    if config.distillation.enabled and teacher_of_source(config.distillation.teacher_models):
        _check_teachers_are_used(data, config.distillation, train)
    validation = None
    if data.val_files:
        validation = build_dataset(
            data, agent, tokenizer, data.val_files, data.val_max_samples, shuffle=False, tools=tools
        )
        validation = validation.as_validation_for(train)
    agents = set[tuple[RowAgent, RowAgent]]()
    datasets = list(filter(None, (train, validation)))
    for prompts in datasets:
        agents |= check_agents(config.actor_rollout_ref.rollout, prompts, tools)
        check_rewards(config, prompts)
    check_turns_are_used(config.actor_rollout_ref.rollout.multi_turn, agents)
    check_reward_parts_are_used(data, config.reward_model, datasets)
    check_scoring(config.reward_model, tokenizer)
    for path in dict.fromkeys((model_path, critic_path)):
        for prompts in datasets:
            check_vocabulary(path, prompts, trust_remote_code=model.trust_remote_code)
    return Inputs(model_path, critic_path, reference_paths, tokenizer, train, validation)


def check_adapters(config: RunConfig, inputs: Inputs) -> None:
    """Refuse initial adapters that were made for other models.

    Raises:
        ValueError: the message names the adapter and the model.
    """
    for section, settings in trained_sections(config).items():
        if settings.lora_adapter_path is not None:
            path = inputs.critic_path if section == "critic.model" else inputs.model_path
            check_adapter(section, settings, path)


def _check_teachers_are_used(data: DataConfig, distillation: DistillationConfig, train: PromptDataset) -> None:
    """Refuse rows whose data source has no teacher, and, if all rows are read, a teacher whose data source no row has.

    Raises:
        ValueError: the message names the row, or the teacher.
    """
    taught, present = teacher_of_source(distillation.teacher_models), set[str]()

    def check(row: Row) -> None:
        check_has_teacher(taught, row.data_source)
        present.add(row.data_source)

    train.check_rows(check)
    for name, teacher in read_teachers(distillation.teacher_models).items():
        if data.train_max_samples == -1 and teacher.key not in present:
            similar = did_you_mean(str(teacher.key), sorted(present))
            raise ValueError(
                f"{TEACHERS}.{name}.key: no training row has {teacher.key!r} as its `data_source`, so this teacher "
                f"would score nothing. Correct it, or leave the teacher out.{similar}"
            )


def _check_heads(config: RunConfig, policy: Path | str, references: Iterable[Path | str], critic: Path | str) -> None:
    """Refuse a number of devices that does not divide the attention heads."""
    roles = (
        ("actor_rollout_ref.actor", "actor", policy),
        *(("actor_rollout_ref.ref", "reference", reference) for reference in references),
        ("critic", "critic", critic),
    )
    for role, model, path in roles:
        key = f"{role}.ulysses_sequence_parallel_size"
        ranks = values_of(config)[key]
        if ranks == 1 or device_count(config) == 1:
            continue
        trusted = config.actor_rollout_ref.model.trust_remote_code
        heads = load_config(path, trust_remote_code=trusted).get_text_config().num_attention_heads
        if heads % ranks:
            devices = len(placed(config).get(model, ()))
            fits = [str(n) for n in range(1, ranks) if heads % n == 0 and devices % n == 0]
            raise ValueError(
                f"{key}={ranks}: the {heads} attention heads of {path} cannot be split among {ranks} devices. "
                f"Set it to {' or '.join(fits)}."
            )


def _check_teacher(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, policy: Path | str, teacher: Path | str, named: str
) -> None:
    """Refuse a teacher whose token ids differ from the policy's; `named` is its setting.

    Raises:
        ValueError: the message names the teacher and the difference.
    """
    model = config.actor_rollout_ref.model
    mine, theirs = tokenizer.get_vocab(), build_tokenizer(config.data, model, teacher).get_vocab()
    if different := sorted({token for token, _ in mine.items() ^ theirs.items()}):
        raise ValueError(
            f"{named}: its tokenizer differs from the policy's in {len(different)} tokens, such as {different[0]!r}, "
            "and the teacher scores the policy's tokens. Take one with the same tokenizer."
        )
    own, other = (
        load_config(path, trust_remote_code=model.trust_remote_code).get_text_config().vocab_size
        for path in (policy, teacher)
    )
    if other < own or (other != own and full_kl_in_loss(config)):
        needs = "as many" if full_kl_in_loss(config) else "at least as many"
        mode = f"distillation.distillation_loss.loss_mode={config.distillation.distillation_loss.loss_mode}"
        raise ValueError(
            f"{named}: its vocabulary has {other} entries, and {mode} needs {needs} as the policy's {own}. Take "
            "another teacher."
        )


def check_vocabulary(path: Path | str, rows: PromptDataset | ExampleDataset, *, trust_remote_code: bool) -> None:
    """Check that a model's vocabulary has all tokens of its rows.

    Raises:
        ValueError: the message names a row and its token.
    """
    vocabulary = load_config(path, trust_remote_code=trust_remote_code).get_text_config().vocab_size
    if problem := rows.first_out_of_vocabulary(vocabulary):
        raise ValueError(
            f"{path}: its vocabulary has {vocabulary} tokens, but {problem}. The tokenizer knows "
            "more tokens than the model: use its own (actor_rollout_ref.model.tokenizer_path), or one whose embeddings "
            "were resized after tokens were added."
        )


def build_tokenizer(data: DataConfig, model: ModelConfig, path: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer; code of its repository may run if the data or the model section trusts it."""
    trusted = data.trust_remote_code or model.trust_remote_code
    return load_tokenizer(path, trust_remote_code=trusted)


def with_template_date(loaded: LoadedConfig, checkpoint: Path | None) -> LoadedConfig:
    """Return the configuration with a fixed date for the chat template: that of the resumed run, or today."""
    if loaded.config.data.chat_template_date is not None:
        return loaded
    key = "data.chat_template_date"
    day: object = today()
    if checkpoint is not None:  # null in runs without a stored date
        day = (saved_values(checkpoint / "run.yaml") or {}).get(key)
    return loaded.with_values({key: day}, "the first start of the run")


def _dated(tokenizer: PreTrainedTokenizerBase, day: str | None) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose template has this date; checkpoints store the original template."""
    template = dated_template(tokenizer, None, day)
    if template is None:
        return tokenizer
    dated = copy(tokenizer)
    dated.chat_template = template
    return dated


def build_dataset(
    data: DataConfig,
    default_agent: str,
    tokenizer: PreTrainedTokenizerBase | None,
    files: Sequence[str],
    max_samples: int,
    *,
    shuffle: bool,
    tools: ToolPool | None = None,
) -> PromptDataset:
    """Read `files` and make prompts of their rows, with `tools` if the row's agent has tools.

    Without a tokenizer, which only a custom dataset requires, prompts have no token ids.
    """
    rows, template = read_rows(data, tokenizer, files), _template(data, tokenizer)
    options = PromptOptions(
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        max_samples=max_samples,
        shuffle=shuffle,
        seed=data.seed,
        chat_template=template,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        control_tokens_as_text=data.control_tokens_as_text,
        default_agent=default_agent,
        tools=tools.schemas if tools else (),
    )
    return PromptDataset(rows, tokenizer, options)


def read_rows(data: DataConfig, tokenizer: PreTrainedTokenizerBase | None, files: Sequence[str]) -> Rows:
    """Read the rows of `files`; a custom dataset requires a tokenizer."""
    columns = Columns(data.prompt_key, data.reward_fn_key, data.answer_key, data.data_source)
    if is_object(files[0]):
        return rows_of_object(files[0], columns)
    if not data.custom_cls.path:
        return rows_of(data, files)
    assert tokenizer
    return load_custom_dataset(
        data.custom_cls.path,
        data.custom_cls.name or "",
        files=files,
        tokenizer=_dated(tokenizer, data.chat_template_date),
        config=data.model_dump() | {"chat_template": _template(data, tokenizer)},
        columns=columns,
    )


def _template(data: DataConfig, tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    return dated_template(tokenizer, data.chat_template, data.chat_template_date) if tokenizer else data.chat_template
