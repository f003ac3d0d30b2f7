"""Notes on a valid configuration, about effects that are not obvious from its keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tether.config import control_defaults
from tether.config.keys import Key, keys, show
from tether.config.loading.settings import Settings
from tether.config.schema.algorithm import WITHOUT_PEERS
from tether.config.support.live_keys import why_idle
from tether.loss_requirements import REQUIRED_AGGREGATION
from tether.text.learning.config_distillation import SERVER_SETTINGS, TEACHERS
from tether.text.sampling.config import SERVERS

ACTOR = "actor_rollout_ref.actor"
CLIPS_RATIOS = ("vanilla", "gspo", "clip_cov", "cispo", "bypass_mode", "decoupled")
"""Policy losses with a clip range around a ratio of 1; that of geo_mean is around a log-ratio of 0."""


def notes(settings: Settings, values: Mapping[str, object]) -> list[str]:
    """Return the notes on a config."""
    checks = (
        _engine,
        _no_peers,
        _validation,
        _bypass,
        _uncorrected_staleness,
        _both_kls,
        _own_aggregation,
        _no_lower_clip,
        _idle_critic,
        _key_of_one_teacher,
    )
    of_settings = (_clip_ratio, _parity, _teachers_are_no_servers)
    single_notes = [*(check(settings, values) for check in of_settings), *(check(values) for check in checks)]
    all_notes = (*single_notes, *_idle(settings, values))
    return [note for note in all_notes if note is not None]


def _engine(values: Mapping[str, object]) -> str | None:
    name = values["actor_rollout_ref.rollout.name"]
    if name != "hf":
        return None
    return f"actor_rollout_ref.rollout.name={name}: the native engine samples instead, also of a model of transformers"


def _clip_ratio(settings: Settings, values: Mapping[str, object]) -> str | None:
    both = f"{ACTOR}.clip_ratio_low" in settings and f"{ACTOR}.clip_ratio_high" in settings
    sides = {values[f"{ACTOR}.clip_ratio_low"], values[f"{ACTOR}.clip_ratio_high"]}
    if f"{ACTOR}.clip_ratio" not in settings or not both or sides == {values[f"{ACTOR}.clip_ratio"]}:
        return None
    return f"no effect: {ACTOR}.clip_ratio={values[f'{ACTOR}.clip_ratio']} (clip_ratio_low and clip_ratio_high are set)"


def _no_peers(values: Mapping[str, Any]) -> str | None:
    estimator, count = values["algorithm.adv_estimator"], values["actor_rollout_ref.rollout.n"]
    if count > 1 or estimator not in WITHOUT_PEERS or values[control_defaults.SWITCH] is not None:
        return None
    what = "with a single response per prompt the advantage is the score, without a baseline"
    return f"actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator={estimator}: {what}"


def _validation(values: Mapping[str, Any]) -> str | None:
    section = "actor_rollout_ref.rollout.val_kwargs"
    samples, temperature = values[f"{section}.do_sample"], values[f"{section}.temperature"]
    if samples == (temperature > 0):
        return None
    how = "samples" if temperature > 0 else "is greedy"
    return f"validation {how}: {section}.temperature={temperature} decides, not {section}.do_sample={samples}"


def _bypass(values: Mapping[str, object]) -> str | None:
    section = "algorithm.rollout_correction"
    level, normalize = values[f"{section}.rollout_is"], f"{section}.rollout_is_batch_normalize"
    clips = values[f"{section}.bypass_mode"] and values[f"{section}.loss_type"] == "ppo_clip"
    if level is None or not clips or not values[normalize]:
        return None
    return f"no effect: {normalize}=True (the clipped loss of bypass mode logs importance weights and uses none)"


def _uncorrected_staleness(values: Mapping[str, Any]) -> str | None:
    section, mode = "algorithm.rollout_correction", values["trainer.async_mode"]
    corrects = (values[f"{section}.rollout_is"], values[f"{section}.rollout_rs"], values[f"{section}.bypass_mode"])
    decoupled = values[f"{ACTOR}.policy_loss.loss_mode"] == "decoupled"
    if mode == "off" or any(corrects) or decoupled:
        return None
    if values[control_defaults.SWITCH] is not None:
        what = "actions come from older weights, and nothing corrects for that"
        return f"trainer.async_mode={mode}: {what}; {ACTOR}.policy_loss.loss_mode=decoupled weights them"
    what = "responses come from older weights, and nothing corrects for that"
    return f"trainer.async_mode={mode}: {what}; {section}.rollout_is=token weights them"


def _both_kls(values: Mapping[str, Any]) -> str | None:
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if not (values[in_reward] and values[in_loss]):
        return None
    weights = f"{values['algorithm.kl_ctrl.kl_coef']:g} in the reward, {values[f'{ACTOR}.kl_loss_coef']:g} in the loss"
    return (
        f"{in_reward}=True with {in_loss}=True: both penalties act ({weights}), where verl's pages describe one of them"
    )


def _own_aggregation(values: Mapping[str, Any]) -> str | None:
    mode, aggregation = values[f"{ACTOR}.policy_loss.loss_mode"], values[f"{ACTOR}.loss_agg_mode"]
    demanded = REQUIRED_AGGREGATION.get(mode, aggregation)
    if aggregation in (None, demanded):
        return None
    what = f"the policy loss is aggregated by {demanded}, as {mode} is defined; as in verl, only the entropy and the KL"
    return f"{ACTOR}.loss_agg_mode={aggregation} with {ACTOR}.policy_loss.loss_mode={mode}: {what} follow the key"


def _no_lower_clip(values: Mapping[str, Any]) -> str | None:
    low, mode = values[f"{ACTOR}.clip_ratio_low"], values[f"{ACTOR}.policy_loss.loss_mode"]
    if low <= 1 or mode not in CLIPS_RATIOS:
        return None
    return f"{ACTOR}.clip_ratio_low={low}: nothing is clipped below, as no ratio of probabilities is below 1 - {low:g}"


def _idle_critic(values: Mapping[str, Any]) -> str | None:
    rewards = "distillation.distillation_loss.use_task_rewards"
    if not values["critic.enable"] or not values["distillation.enabled"] or values[rewards]:
        return None
    estimator = f"algorithm.adv_estimator={values['algorithm.adv_estimator']}"
    return f"{rewards}=False: nothing learns from the critic that {estimator} trains; grpo has none"


def _key_of_one_teacher(values: Mapping[str, Any]) -> str | None:
    teachers = values[TEACHERS]
    if not values["distillation.enabled"] or len(teachers) != 1:
        return None
    ((name, entry),) = teachers.items()
    key = entry.get("key") if isinstance(entry, dict) else None
    return f"no effect: {TEACHERS}.{name}.key={show(key)} (all rows have the same teacher)" if key else None


def _teachers_are_no_servers(settings: Settings, values: Mapping[str, Any]) -> str | None:
    written = settings[TEACHERS].value if TEACHERS in settings else {}
    if not values["distillation.enabled"] or not isinstance(written, dict):
        return None
    idle = [
        f"{TEACHERS}.{name}.{setting}"
        for name, entry in written.items()
        for setting, default in SERVER_SETTINGS.items()
        if name in values[TEACHERS] and isinstance(entry, dict) and entry.get(setting) not in default
    ]
    what = "a teacher is no server: it runs as the reference does, on the policy's devices or on those of "
    return f"no effect: {', '.join(idle)} ({what}cluster.component_placement.inference)" if idle else None


def _parity(settings: Settings, values: Mapping[str, object]) -> str | None:
    key, mode = "actor_rollout_ref.rollout.parity_freq", values["trainer.async_mode"]
    if key not in settings or mode == "off" or values["actor_rollout_ref.rollout.name"] not in SERVERS:
        return None
    return f"no effect: {key}={values[key]} (trainer.async_mode={mode}: only the first weights are compared)"


def _idle(settings: Settings, values: Mapping[str, object]) -> list[str]:
    """Return a note for each reason, with all keys that have no effect because of it."""
    silenced: dict[str, list[str]] = defaultdict(list)
    for path, setting in settings.items():
        reason = why_idle(path, values)
        if reason is not None and setting.position >= 0 and _differs(keys()[path], values):
            silenced[reason].append(f"{path}={show(values[path])}")
    return [f"no effect: {', '.join(settings)} ({reason})" for reason, settings in silenced.items()]


def _differs(key: Key, values: Mapping[str, object]) -> bool:
    default = values[key.inherits.key] if key.inherits else key.default
    return bool(values[key.path] != default)
