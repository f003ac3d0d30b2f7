"""Rules between keys, each of which reports one contradiction in a config.

Every message has the full paths of the keys that it mentions, so that a rule is skipped if one of them is invalid by
itself.
"""

from __future__ import annotations

import re
from functools import reduce

from tether.config.devices import device_count, misplaced, placed
from tether.config.problems import Problem
from tether.config.rules.advantages import ADVANTAGE_RULES
from tether.config.rules.control import RULES as TASK_RULES
from tether.config.rules.megatron import MEGATRON_RULES
from tether.config.rules.networks import NETWORK_RULES
from tether.config.rules.off_policy import OFF_POLICY_RULES
from tether.config.rules.rewards import REWARD_RULES
from tether.config.rules.router_replay import ROUTER_REPLAY_RULES
from tether.config.rules.shapes import Condition, Rule, at_most, divides_devices, needs, same, set_once, together
from tether.config.schema.rollout import SERVERS
from tether.config.schema.root import RunConfig
from tether.loss_requirements import REQUIRED_AGGREGATION

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL_OF = {ACTOR: "actor", "actor_rollout_ref.ref": "reference", "critic": "critic"}
SHARDED = {
    ACTOR: "actor", "actor_rollout_ref.ref": "reference", "critic.model": "critic", "reward_model.model": "reward_model"
}  # fmt: skip
AGENTS = ("single_turn_agent", "tool_agent")
OWN_CLASS = r".+\.py:\w+"


def training_data_is_named(cfg: RunConfig) -> Problem | None:
    """There must be at least one training file."""
    if cfg.data.train_files and all(cfg.data.train_files):
        return None
    return Problem("data.train_files", "names no file", "give at least one file")


def policy_loss_is_aggregated_as_defined(cfg: RunConfig) -> Problem | None:
    """A loss with ratios of responses requires its own aggregation."""
    actor = cfg.actor_rollout_ref.actor
    mode, aggregation = actor.policy_loss.loss_mode, actor.loss_agg_mode
    demanded = REQUIRED_AGGREGATION.get(mode, aggregation)
    if aggregation in (None, demanded):
        return None
    key = f"{ACTOR}.loss_agg_mode"
    what = f"{aggregation} contradicts {ACTOR}.policy_loss.loss_mode={mode}, which is defined for {demanded}"
    return Problem(key, what, f"leave {key} out")


def clip_cov_bounds_enclose_something(cfg: RunConfig) -> Problem | None:
    """clip_cov drops tokens whose covariance lies between the bounds."""
    loss = cfg.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode != "clip_cov" or loss.clip_cov_lb < loss.clip_cov_ub:
        return None
    section = f"{ACTOR}.policy_loss"
    what = f"{loss.clip_cov_lb} is not below {section}.clip_cov_ub={loss.clip_cov_ub}, so clip_cov drops no token"
    return Problem(f"{section}.clip_cov_lb", what, f"set it below {loss.clip_cov_ub}")


def adaptive_kl_moves(cfg: RunConfig) -> Problem | None:
    """The adaptive controller divides by its horizon and its target."""
    control = cfg.algorithm.kl_ctrl
    if control.type != "adaptive" or (control.horizon > 0 and control.target_kl > 0):
        return None
    name = "horizon" if control.horizon <= 0 else "target_kl"
    what = f"{getattr(control, name)} cannot be divided by, as algorithm.kl_ctrl.type=adaptive does"
    return Problem(f"algorithm.kl_ctrl.{name}", what, "set it above 0, or use algorithm.kl_ctrl.type=fixed")


def critic_warmup_has_a_critic(cfg: RunConfig) -> Problem | None:
    """The warm-up trains only a critic."""
    if cfg.trainer.critic_warmup <= 1 or cfg.critic.enable:
        return None
    what = f"{cfg.trainer.critic_warmup - 1} steps train a critic alone, and critic.enable is False"
    return Problem("trainer.critic_warmup", what, "set trainer.critic_warmup=0")


def critic_warmup_ends(cfg: RunConfig) -> Problem | None:
    """The actor must start to learn during the run."""
    steps = cfg.trainer.total_training_steps
    if steps is None or cfg.trainer.critic_warmup <= steps or not cfg.critic.enable:
        return None
    what = f"{cfg.trainer.critic_warmup} leaves the actor untrained in trainer.total_training_steps={steps}"
    return Problem("trainer.critic_warmup", what, f"set it to at most {steps}: from this step on the actor learns")


def longest_prompt_leaves_room(cfg: RunConfig) -> Problem | None:
    """The length limit of prompt and response must exceed the longest prompt."""
    limit, longest = cfg.actor_rollout_ref.rollout.max_model_len, cfg.data.max_prompt_length
    if limit is None or limit > longest:
        return None
    what = f"{limit} leaves a prompt of data.max_prompt_length={longest} tokens no room for a response"
    return Problem(f"{ROLLOUT}.max_model_len", what, f"set it above {longest}, or lower data.max_prompt_length")


def shared_rows_are_packed(role: str, padding: str, when: Condition) -> Rule:
    """Devices can only share rows of packed tokens."""
    key = f"{role}.ulysses_sequence_parallel_size"

    def rule(cfg: RunConfig) -> Problem | None:
        ranks, packed = (reduce(getattr, path.split("."), cfg) for path in (key, padding))
        if device_count(cfg) == 1 or ranks == 1 or packed or not when(cfg):
            return None
        return Problem(key, f"{ranks} devices share packed rows only, and {padding} is False", f"set {padding}=True")

    return rule


def servers_tell_what_they_kept(cfg: RunConfig) -> Problem | None:
    """Training replays the cut of sampling, and servers list the kept tokens only up to a limit."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name not in SERVERS or rollout.top_p == 1 or rollout.top_k > 0:
        return None
    what = f"{rollout.top_p} alone: {rollout.name} tells which tokens it kept only together with {ROLLOUT}.top_k"
    return Problem(f"{ROLLOUT}.top_p", what, f"set {ROLLOUT}.top_k too, such as 50")


LARGEST_RANK = 512
"""Maximum of vLLM's --max-lora-rank."""
SLEEP_OPTIONS = {"vllm": ("enable_sleep_mode",), "sglang": ("enable_memory_saver", "enable_weights_cpu_backup")}
"""Options of servers that are required to release memory."""
ADDRESS_OPTIONS = {"vllm": ("host", "port", "served_model_name"), "sglang": ("host", "port")}
"""Options that determine the address of a server, which the run sets."""


def servers_sample_where_their_addresses_are(cfg: RunConfig) -> Problem | None:
    """Addresses do not determine the kind of server, and native sampling would ignore them."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name in SERVERS or not rollout.server_urls:
        return None
    what = f"{rollout.server_urls[0]} is given, while {ROLLOUT}.name={rollout.name} samples without servers"
    return Problem(f"{ROLLOUT}.server_urls", what, f"set {ROLLOUT}.name to {' or '.join(SERVERS)}, or leave it out")


def servers_are_named_once(cfg: RunConfig) -> Problem | None:
    """A server named twice would get each update twice, the second time while it samples."""
    named = dict[str, str]()
    for url in cfg.actor_rollout_ref.rollout.server_urls:
        address = re.sub(r"//localhost(?=:|$)", "//127.0.0.1", url.rstrip("/").lower())
        address = address.removesuffix(":80")
        if address in named:
            earlier = f" (before as {named[address]})" if named[address] != url.rstrip("/") else ""
            what = f"{url.rstrip('/')} is named more than once{earlier}"
            return Problem(f"{ROLLOUT}.server_urls", what, "name each server once")
        named[address] = url.rstrip("/")
    return None


def vllm_starts(cfg: RunConfig) -> Problem | None:
    """vLLM itself refuses these values, but only after it has loaded the model."""
    rollout, data = cfg.actor_rollout_ref.rollout, cfg.data
    key, tokens = f"{ROLLOUT}.max_num_batched_tokens", rollout.max_num_batched_tokens
    sizes = {"max_num_batched_tokens", "max_num_seqs", "max_model_len", "enable_chunked_prefill"}
    overridden = sizes & rollout.own_options.keys()
    if rollout.name != "vllm" or rollout.server_urls or overridden:
        return None
    if tokens < rollout.max_num_seqs:
        other = f"{ROLLOUT}.max_num_seqs"
        what = f"{tokens} is less than {other}={rollout.max_num_seqs}, so that vllm would not start"
        return Problem(key, what, f"set it to {rollout.max_num_seqs} or above, or lower {other}")
    longest = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    if tokens < longest and not rollout.enable_chunked_prefill:
        other = f"{ROLLOUT}.enable_chunked_prefill"
        what = f"{tokens} is less than the {longest} tokens of a row, so that vllm would not start without {other}"
        return Problem(key, what, f"set it to {longest} or above, or {other}=True")
    return None


def servers_can_sleep(cfg: RunConfig) -> Problem | None:
    """Servers can only release memory if they are started with these options."""
    rollout = cfg.actor_rollout_ref.rollout
    options = rollout.own_options if rollout.free_cache_engine else {}
    for option in SLEEP_OPTIONS.get(rollout.name, ()):
        if options.get(option, True) is False:
            what = f"False takes from the servers what {ROLLOUT}.free_cache_engine=True needs"
            fix = f"set {ROLLOUT}.free_cache_engine=False, or leave {option} out"
            return Problem(f"{ROLLOUT}.engine_kwargs.{rollout.name}.{option}", what, fix)
    return None


def servers_are_where_they_are_looked_for(cfg: RunConfig) -> Problem | None:
    """The run would wait for a server at another address until the timeout."""
    rollout = cfg.actor_rollout_ref.rollout
    options = rollout.own_options
    for option in ADDRESS_OPTIONS.get(rollout.name, ()):
        if option in options:
            what = f"{options[option]!r} moves a server away from where the run looks for it"
            fix = f"leave it out; servers of your own go into {ROLLOUT}.server_urls"
            return Problem(f"{ROLLOUT}.engine_kwargs.{rollout.name}.{option}", what, fix)
    return None


def staleness_bounds_something(cfg: RunConfig) -> Problem | None:
    """A bound as large as the number of steps has no effect."""
    steps = cfg.trainer.total_training_steps
    return None if steps is None else staleness_problem(cfg, steps)


def staleness_problem(cfg: RunConfig, steps: int) -> Problem | None:
    """Return the problem of `staleness_bounds_something` for a known number of steps."""
    max_staleness = cfg.actor_rollout_ref.rollout.max_staleness
    if cfg.trainer.async_mode != "fully_async" or max_staleness == 1 or max_staleness < steps:
        return None
    what = f"{max_staleness} updates lie between no two of the {steps} steps of this run"
    return Problem(f"{ROLLOUT}.max_staleness", what, f"set it below {max(steps, 2)}, or train for more steps")


def vllm_takes_adapters_of_this_rank(cfg: RunConfig) -> Problem | None:
    """vLLM limits the rank of adapters, unless they are merged into the weights."""
    model, name = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.name
    if name != "vllm" or model.lora.merge or model.lora_rank <= LARGEST_RANK:
        return None
    what = f"{model.lora_rank} is more than the {LARGEST_RANK} of adapters that vllm takes"
    return Problem("actor_rollout_ref.model.lora_rank", what, "set actor_rollout_ref.model.lora.merge=True")


def agents_are_known(cfg: RunConfig) -> Problem | None:
    """The agent is a known one or a class of the user's, and has what it needs."""
    key, name = f"{ROLLOUT}.agent.default_agent_loop", cfg.actor_rollout_ref.rollout.agent.default_agent_loop
    if name not in AGENTS and not re.fullmatch(OWN_CLASS, name):
        choices = ", ".join(AGENTS)
        return Problem(key, f"{name} is no agent", f"set it to {choices}, or to a class of your own: FILE.py:CLASS")
    turns = cfg.actor_rollout_ref.rollout.multi_turn
    if name != AGENTS[0] and not turns.enable:
        what = f"{name} answers in turns, which {ROLLOUT}.multi_turn.enable=False switches off"
        return Problem(key, what, f"set {ROLLOUT}.multi_turn.enable=True, or leave {key} out")
    if name == AGENTS[1] and not turns.tool_config_path and not turns.interaction_config_path:
        what = f"{name} has neither tools ({ROLLOUT}.multi_turn.tool_config_path) nor an environment"
        return Problem(key, what, f"give {ROLLOUT}.multi_turn.tool_config_path")
    return None


def turns_end(cfg: RunConfig) -> Problem | None:
    """A turn ends with an end-of-sequence token."""
    rollout = cfg.actor_rollout_ref.rollout
    if not rollout.multi_turn.enable or not rollout.ignore_eos:
        return None
    what = f"True lets no turn end, and {ROLLOUT}.multi_turn.enable=True asks for several"
    return Problem(f"{ROLLOUT}.ignore_eos", what, f"leave {ROLLOUT}.ignore_eos out")


def ranks_sample_one_turn(cfg: RunConfig) -> Problem | None:
    """The driver process calls tools, so it samples with servers or, on one device, natively."""
    rollout, devices = cfg.actor_rollout_ref.rollout, device_count(cfg)
    if not rollout.multi_turn.enable or devices == 1 or rollout.name in SERVERS:
        return None
    what = f"{rollout.name} samples conversations ({ROLLOUT}.multi_turn.enable=True) on one device, not on {devices}"
    return Problem(f"{ROLLOUT}.name", what, f"set it to vllm or sglang, or {_devices_key(cfg)}=1")


def sampling_ahead_has_devices_of_its_own(cfg: RunConfig) -> Problem | None:
    """Ranks do one thing at a time, so servers or other ranks must sample while they train."""
    mode = cfg.trainer.async_mode
    if mode == "off" or device_count(cfg) == 1 or misplaced(cfg):
        return None
    name, devices = cfg.actor_rollout_ref.rollout.name, placed(cfg)
    trains, samples, scores = devices["actor"], devices.get("sampler"), devices.get("reward_model")
    others = [ranks for model, ranks in devices.items() if model not in ("sampler", "reward_model")]
    if samples in others:
        what = (
            f"{name} samples on the {len(trains)} devices that train; trainer.async_mode={mode} asks for both at once"
        )
        return Problem(f"{ROLLOUT}.name", what, f"set it to vllm or sglang, or {ROLLOUT}.nnodes=1")
    if scores in others:
        what = f"none: the {len(trains)} devices that train score, too; trainer.async_mode={mode} asks for both at once"
        return Problem("reward_model.server.url", what, "name a server, or set reward_model.enable_resource_pool=True")
    return None


def partial_responses_are_sampled_here(cfg: RunConfig) -> Problem | None:
    """Ranks cannot change weights while they sample."""
    mode, rollout = cfg.trainer.async_mode, cfg.actor_rollout_ref.rollout
    if mode != "fully_async" or not rollout.partial_rollout or device_count(cfg) == 1 or rollout.name in SERVERS:
        return None
    what = "True changes weights within responses, which native does not on devices of its own"
    return Problem(f"{ROLLOUT}.partial_rollout", what, f"leave it out, or set {ROLLOUT}.name=vllm")


def _devices_key(cfg: RunConfig) -> str:
    return "trainer.n_gpus_per_node" if cfg.trainer.n_gpus_per_node > 1 else "trainer.nnodes"


def greedy_validation_answers_once(cfg: RunConfig) -> Problem | None:
    """Greedy answers to one prompt are all the same."""
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    if sampling.n == 1 or sampling.temperature > 0:
        return None
    section = f"{ROLLOUT}.val_kwargs"
    what = f"{sampling.n} greedy answers to a prompt are all the same ({section}.temperature=0)"
    return Problem(f"{section}.n", what, f"set {section}.n=1, or {section}.do_sample=True and {section}.temperature")


def validation_has_data(cfg: RunConfig) -> Problem | None:
    """Validation needs held-out data."""
    asks = "trainer.val_only" if cfg.trainer.val_only else "trainer.test_freq" if cfg.trainer.test_freq > 0 else None
    if (cfg.data.val_files and all(cfg.data.val_files)) or asks is None:
        return None
    return Problem("data.val_files", f"empty, and {asks} asks for validation", "give data.val_files")


def a_rollback_has_checkpoints(cfg: RunConfig) -> Problem | None:
    """A rollback needs a checkpoint."""
    if cfg.trainer.on_collapse != "rollback" or cfg.trainer.save_freq > 0:
        return None
    what = f"rollback goes back to a checkpoint, and trainer.save_freq={cfg.trainer.save_freq} saves none"
    return Problem("trainer.on_collapse", what, "set trainer.save_freq above 0")


def resume_path_is_given(cfg: RunConfig) -> Problem | None:
    """Resuming by path needs the path."""
    if cfg.trainer.resume_mode != "resume_path" or cfg.trainer.resume_from_path is not None:
        return None
    return Problem("trainer.resume_from_path", "missing with trainer.resume_mode=resume_path", "give the checkpoint")


def adapters_have_a_scale(cfg: RunConfig) -> Problem | None:
    """Adapters of scale 0 learn nothing; without adapters there is nothing to scale."""
    model, key = cfg.actor_rollout_ref.model, "actor_rollout_ref.model.lora_alpha"
    if model.lora_rank == 0 or model.lora_alpha > 0:
        return None
    what = f"0 multiplies the adapters of actor_rollout_ref.model.lora_rank={model.lora_rank} by nothing"
    return Problem(key, what, f"set {key} above 0, such as 16")


def subsets_are_not_empty(cfg: RunConfig) -> Problem | None:
    """A limit of 0 rows would drop all rows."""
    for name in ("train_max_samples", "val_max_samples"):
        if getattr(cfg.data, name) == 0:
            return Problem(f"data.{name}", "0 leaves no row", "give a number above 0, or -1 for all rows")
    return None


def _critic_has_its_own_size(cfg: RunConfig) -> bool:
    """Whether the critic's size differs from the actor's, so that an inherited problem is reported once."""
    return cfg.critic.enable and cfg.critic.ppo_mini_batch_size != cfg.actor_rollout_ref.actor.ppo_mini_batch_size


def _reference_has_its_own_ranks(cfg: RunConfig) -> bool:
    """Whether the reference's ranks differ from the actor's, so that an inherited problem is reported once."""
    policy = cfg.actor_rollout_ref
    return policy.ref.ulysses_sequence_parallel_size != policy.actor.ulysses_sequence_parallel_size


ACTOR_WARMUP = set_once(f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio")
ROLES: tuple[tuple[str, str, Condition], ...] = (
    (ACTOR, "actor_rollout_ref.model", lambda cfg: True),
    ("actor_rollout_ref.ref", "actor_rollout_ref.model", _reference_has_its_own_ranks),
    ("critic", "critic.model", lambda cfg: cfg.critic.enable),
)
KEPT_TOGETHER = same("trainer.max_critic_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep")
"""Actor and critic are saved in one checkpoint."""

RULES: tuple[Rule, ...] = (
    training_data_is_named,
    at_most(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
    at_most("critic.ppo_mini_batch_size", "data.train_batch_size", when=_critic_has_its_own_size),
    policy_loss_is_aggregated_as_defined,
    clip_cov_bounds_enclose_something,
    adaptive_kl_moves,
    ACTOR_WARMUP,
    set_once("critic.optim.lr_warmup_steps", "critic.optim.lr_warmup_steps_ratio"),
    critic_warmup_has_a_critic,
    critic_warmup_ends,
    needs("trainer.critic_warmup_until_explained_variance", "critic.enable"),
    same(f"{ROLLOUT}.prompt_length", "data.max_prompt_length"),
    same(f"{ROLLOUT}.response_length", "data.max_response_length"),
    longest_prompt_leaves_room,
    *(
        rule
        for role, model, when in ROLES
        for rule in (
            divides_devices(f"{role}.ulysses_sequence_parallel_size", MODEL_OF[role], when),
            shared_rows_are_packed(role, f"{model}.use_remove_padding", when),
        )
    ),
    *(divides_devices(f"{section}.fsdp_config.fsdp_size", model) for section, model in SHARDED.items()),
    misplaced,
    servers_tell_what_they_kept,
    servers_can_sleep,
    servers_are_where_they_are_looked_for,
    servers_sample_where_their_addresses_are,
    servers_are_named_once,
    vllm_starts,
    staleness_bounds_something,
    vllm_takes_adapters_of_this_rank,
    adapters_have_a_scale,
    agents_are_known,
    needs(f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.enable"),
    needs(f"{ROLLOUT}.multi_turn.interaction_config_path", f"{ROLLOUT}.multi_turn.enable"),
    turns_end,
    ranks_sample_one_turn,
    sampling_ahead_has_devices_of_its_own,
    partial_responses_are_sampled_here,
    greedy_validation_answers_once,
    validation_has_data,
    resume_path_is_given,
    a_rollback_has_checkpoints,
    KEPT_TOGETHER,
    together("data.custom_cls.path", "data.custom_cls.name"),
    together("data.custom_cls.name", "data.custom_cls.path"),
    subsets_are_not_empty,
    *REWARD_RULES,
    *ADVANTAGE_RULES,
    *OFF_POLICY_RULES,
    *MEGATRON_RULES,
    *ROUTER_REPLAY_RULES,
)
EMBODIED_RULES: tuple[Rule, ...] = (
    ACTOR_WARMUP,
    critic_warmup_ends,
    adapters_have_a_scale,
    resume_path_is_given,
    a_rollback_has_checkpoints,
    KEPT_TOGETHER,
    policy_loss_is_aggregated_as_defined,
    clip_cov_bounds_enclose_something,
    *TASK_RULES,
    *NETWORK_RULES,
)


def contradictions(cfg: RunConfig) -> list[Problem]:
    """Return all contradictions of a config."""
    rules = RULES if cfg.env.train.id is None else EMBODIED_RULES
    return [problem for rule in rules if (problem := rule(cfg)) is not None]
