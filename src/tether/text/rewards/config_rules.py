"""Rules for rewards: functions, a learned reward model, judges, and combinations of them."""

from __future__ import annotations

from tether.config.integrations import integration_problems
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, at_most
from tether.config.schema.root import RunConfig
from tether.text.rewards.config_parts import IntegrationPart, JudgePart, part_problems, read_parts


def reward_model_is_named(cfg: RunConfig) -> Problem | None:
    """The model must be set, since verl's default, a model of the hub, is never intended."""
    if not cfg.reward_model.enable or cfg.reward_model.model.path is not None:
        return None
    key = "reward_model.model.path"
    return Problem(key, "missing with reward_model.enable=True", "give a sequence classifier with one output")


def reward_parts_are_valid(cfg: RunConfig) -> Problem | None:
    """Each part is valid; only this rule checks names and keys below reward_model.parts."""
    return next(iter(part_problems(cfg.reward_model.parts)), None)


def integrations_are_installed_and_used(cfg: RunConfig) -> Problem | None:
    """A section of an integration belongs to a part of the reward."""
    if part_problems(cfg.reward_model.parts):
        return None
    sections = read_parts(cfg.reward_model.parts).values()
    used = {section.kind for section in sections if isinstance(section, IntegrationPart)}
    return next(iter(integration_problems(cfg.integrations, used)), None)


def reward_parts_match_the_reward_settings(cfg: RunConfig) -> Problem | None:
    """Parts decide whether function and model are called; verl calls one of them, depending on its version."""
    model, path, key = cfg.reward_model, cfg.custom_reward_function.path, "reward_model.parts"
    if part_problems(model.parts):
        return None
    sections = read_parts(model.parts)
    kinds = [section.kind for section in sections.values()]
    if model.enable and path is not None and not sections:
        what = f"{path} is never called with reward_model.enable=True, and no {key} says what both are worth"
        fix = (
            f"add {key}='{{learned: {{kind: model}}, rule: {{kind: rules, weight: 1.0}}}}', or leave one of the two out"
        )
        return Problem("custom_reward_function.path", what, fix)
    if path is not None and sections and "rules" not in kinds:
        what = f"{path} is never called: {key} has no part of kind rules"
        return Problem("custom_reward_function.path", what, f"add one, or leave the function out of {key}")
    if sections and model.enable != ("model" in kinds):
        has = "has no part of kind model" if model.enable else "has a part of kind model"
        return Problem(key, f"{has}, and reward_model.enable={model.enable}", f"set it to {not model.enable}")
    for kind in ("rules", "model"):
        if kinds.count(kind) > 1:
            return Problem(key, f"{kinds.count(kind)} parts are of kind {kind}, of which there is one", "keep one")
    local_judges = [
        name for name, section in sections.items() if isinstance(section, JudgePart) and section.path is not None
    ]
    if local_judges and cfg.trainer.devices > 1:
        what = (
            f"the judge would be loaded by the process that was started, and not on the {cfg.trainer.devices} devices"
        )
        return Problem(
            f"{key}.{local_judges[0]}.path",
            what,
            "serve it (vLLM, SGLang) and give base_url and model, or use one device",
        )
    if sections and not any(section.weight for section in sections.values()):
        return Problem(key, "every weight is 0, so that nothing is learned from", "give one of them a weight")
    return None


def batches_are_scored_by_a_function(cfg: RunConfig) -> Problem | None:
    """Only a user's function has the signature of verl's BatchRewardManager."""
    if cfg.reward_model.reward_manager != "batch":
        return None
    key, takes = "reward_model.reward_manager", "fn(data_sources, solution_strs, ground_truths, extra_infos) -> list"
    if cfg.reward_model.parts:
        return Problem(key, "batch scores all responses by one function, and not by reward_model.parts", "leave it out")
    if cfg.custom_reward_function.path is None:
        return Problem(key, "batch needs custom_reward_function.path", f"name a file with {takes}, or leave it out")
    return None


def responses_are_decoded_by_the_policys_tokenizer(cfg: RunConfig) -> Problem | None:
    """Any other tokenizer would decode different text than the policy generated."""
    policy, tokenizer = cfg.actor_rollout_ref.model, cfg.reward_model.model.input_tokenizer
    if not cfg.reward_model.enable or tokenizer in (None, policy.path, policy.tokenizer_path):
        return None
    key = "reward_model.model.input_tokenizer"
    what = f"{tokenizer} is not the policy's tokenizer, by which its responses are decoded"
    return Problem(key, what, f"leave {key} out, or set it to null where both models have the same tokenizer")


def _has_a_server_for_programs(cfg: RunConfig) -> bool:
    return cfg.reward_model.sandbox_fusion.url is not None and cfg.reward_model.num_workers is not None


REWARD_RULES: tuple[Rule, ...] = (
    at_most("reward_model.num_workers", "reward_model.sandbox_fusion.max_concurrent", when=_has_a_server_for_programs),
    reward_model_is_named,
    reward_parts_are_valid,
    integrations_are_installed_and_used,
    reward_parts_match_the_reward_settings,
    batches_are_scored_by_a_function,
    responses_are_decoded_by_the_policys_tokenizer,
)
