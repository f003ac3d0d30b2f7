"""Rules of sampling: lengths, servers, and sampling ahead of the updates."""

from __future__ import annotations

import re

from tether.config.devices import device_count, misplaced, placed
from tether.config.problems import Problem
from tether.config.rules.shapes import Rule, same
from tether.config.schema.root import RunConfig
from tether.text.sampling.config import SERVERS

ROLLOUT = "actor_rollout_ref.rollout"
LARGEST_RANK = 512
"""Maximum of vLLM's --max-lora-rank."""


def longest_prompt_leaves_room(cfg: RunConfig) -> Problem | None:
    """The length limit of prompt and response must exceed the longest prompt."""
    limit, longest = cfg.actor_rollout_ref.rollout.max_model_len, cfg.data.max_prompt_length
    if limit is None or limit > longest:
        return None
    what = f"{limit} leaves a prompt of data.max_prompt_length={longest} tokens no room for a response"
    return Problem(f"{ROLLOUT}.max_model_len", what, f"set it above {longest}, or lower data.max_prompt_length")


def servers_can_report_kept_tokens(cfg: RunConfig) -> Problem | None:
    """Training replays the truncation of sampling, and servers list the kept tokens only up to a limit."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name not in SERVERS or rollout.top_p == 1 or rollout.top_k > 0:
        return None
    what = f"{rollout.top_p} alone: {rollout.name} tells which tokens it kept only together with {ROLLOUT}.top_k"
    return Problem(f"{ROLLOUT}.top_p", what, f"set {ROLLOUT}.top_k too, such as 50")


def servers_can_sleep(cfg: RunConfig) -> Problem | None:
    """Servers can release memory only if they were started with these options."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name not in SERVERS or not rollout.free_cache_engine:
        return None
    options = rollout.own_options
    for option in SERVERS[rollout.name].sleep:
        if options.get(option, True) is False:
            what = f"False takes from the servers what {ROLLOUT}.free_cache_engine=True needs"
            fix = f"set {ROLLOUT}.free_cache_engine=False, or leave {option} out"
            return Problem(f"{ROLLOUT}.engine_kwargs.{rollout.name}.{option}", what, fix)
    return None


def server_addresses_are_not_overridden(cfg: RunConfig) -> Problem | None:
    """A server with another address would never be reached, and the run would wait until the timeout."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name not in SERVERS:
        return None
    options = rollout.own_options
    for option in SERVERS[rollout.name].address:
        if option in options:
            what = f"{options[option]!r} moves a server away from where the run looks for it"
            fix = f"leave it out; servers of your own go into {ROLLOUT}.server_urls"
            return Problem(f"{ROLLOUT}.engine_kwargs.{rollout.name}.{option}", what, fix)
    return None


def server_urls_need_a_server_engine(cfg: RunConfig) -> Problem | None:
    """Addresses do not determine the kind of server, and native sampling would ignore them."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.name in SERVERS or not rollout.server_urls:
        return None
    what = f"{rollout.server_urls[0]} is given, while {ROLLOUT}.name={rollout.name} samples without servers"
    return Problem(f"{ROLLOUT}.server_urls", what, f"set {ROLLOUT}.name to {' or '.join(SERVERS)}, or leave it out")


def server_urls_are_unique(cfg: RunConfig) -> Problem | None:
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


def nccl_transfer_needs_one_device(cfg: RunConfig) -> Problem | None:
    """Weights of several devices reach servers that the run starts through host memory only."""
    rollout, devices = cfg.actor_rollout_ref.rollout, device_count(cfg)
    if rollout.name not in SERVERS or rollout.server_urls or devices == 1 or rollout.weight_transfer != "nccl":
        return None
    what = f"nccl broadcasts from one device, and the run has {devices}, with {rollout.name} beside them"
    return Problem(f"{ROLLOUT}.weight_transfer", what, f"set {ROLLOUT}.weight_transfer=auto")


def tensor_parallel_size_divides_devices(cfg: RunConfig) -> Problem | None:
    """All servers have the same number of GPUs of a machine, and no GPU is left over; a CPU has one server."""
    rollout, trainer = cfg.actor_rollout_ref.rollout, cfg.trainer
    split = rollout.tensor_model_parallel_size
    key, devices = ("trainer", trainer.n_gpus_per_node) if rollout.nnodes == 0 else (ROLLOUT, rollout.n_gpus_per_node)
    if rollout.name not in SERVERS or rollout.server_urls or trainer.device != "cuda" or devices % split == 0:
        return None
    what = f"{split} does not divide the {devices} devices of a machine ({key}.n_gpus_per_node)"
    return Problem(f"{ROLLOUT}.tensor_model_parallel_size", what, f"set it to a divisor of {devices}")


def vllm_accepts_batch_limits(cfg: RunConfig) -> Problem | None:
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


def vllm_supports_lora_rank(cfg: RunConfig) -> Problem | None:
    """vLLM limits the rank of adapters, unless they are merged into the weights."""
    model, name = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.name
    if name != "vllm" or model.lora.merge or model.lora_rank <= LARGEST_RANK:
        return None
    what = f"{model.lora_rank} is more than the {LARGEST_RANK} of adapters that vllm takes"
    return Problem("actor_rollout_ref.model.lora_rank", what, "set actor_rollout_ref.model.lora.merge=True")


def max_staleness_has_an_effect(cfg: RunConfig) -> Problem | None:
    """A bound as large as the number of steps has no effect."""
    steps = cfg.trainer.total_training_steps
    return None if steps is None else staleness_problem(cfg, steps)


def staleness_problem(cfg: RunConfig, steps: int) -> Problem | None:
    """Return the problem of `max_staleness_has_an_effect` for a known number of steps."""
    max_staleness = cfg.actor_rollout_ref.rollout.max_staleness
    if cfg.trainer.async_mode != "fully_async" or max_staleness == 1 or max_staleness < steps:
        return None
    what = f"{max_staleness} updates lie between no two of the {steps} steps of this run"
    return Problem(f"{ROLLOUT}.max_staleness", what, f"set it below {max(steps, 2)}, or train for more steps")


def async_sampling_has_separate_devices(cfg: RunConfig) -> Problem | None:
    """A rank does one thing at a time, so servers or other ranks must sample while it trains."""
    mode = cfg.trainer.async_mode
    if mode == "off" or device_count(cfg) == 1 or misplaced(cfg):
        return None
    name, devices = cfg.actor_rollout_ref.rollout.name, placed(cfg)
    trains, samples, scores = devices["actor"], devices.get("sampler"), devices.get("reward_model")
    others = [ranks for model, ranks in devices.items() if model not in ("sampler", "reward_model")]
    if samples in others and name not in SERVERS:
        what = (
            f"{name} samples on the {len(trains)} devices that train; trainer.async_mode={mode} asks for both at once"
        )
        return Problem(f"{ROLLOUT}.name", what, f"set it to vllm or sglang, or {ROLLOUT}.nnodes=1")
    if scores in others:
        what = f"none: the {len(trains)} devices that train score, too; trainer.async_mode={mode} asks for both at once"
        return Problem("reward_model.server.url", what, "name a server, or set reward_model.enable_resource_pool=True")
    return None


def partial_rollout_is_supported(cfg: RunConfig) -> Problem | None:
    """Ranks cannot change weights while they sample."""
    mode, rollout = cfg.trainer.async_mode, cfg.actor_rollout_ref.rollout
    if mode != "fully_async" or not rollout.partial_rollout or device_count(cfg) == 1 or rollout.name in SERVERS:
        return None
    what = "True changes weights within responses, which native does not on devices of its own"
    return Problem(f"{ROLLOUT}.partial_rollout", what, f"leave it out, or set {ROLLOUT}.name=vllm")


def greedy_validation_samples_once(cfg: RunConfig) -> Problem | None:
    """Greedy responses to the same prompt are identical."""
    sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    if sampling.n == 1 or sampling.temperature > 0:
        return None
    section = f"{ROLLOUT}.val_kwargs"
    what = f"{sampling.n} greedy answers to a prompt are all the same ({section}.temperature=0)"
    return Problem(f"{section}.n", what, f"set {section}.n=1, or {section}.do_sample=True and {section}.temperature")


SAMPLING_RULES: tuple[Rule, ...] = (
    same(f"{ROLLOUT}.prompt_length", "data.max_prompt_length"),
    same(f"{ROLLOUT}.response_length", "data.max_response_length"),
    longest_prompt_leaves_room,
    servers_can_report_kept_tokens,
    servers_can_sleep,
    server_addresses_are_not_overridden,
    server_urls_need_a_server_engine,
    server_urls_are_unique,
    nccl_transfer_needs_one_device,
    tensor_parallel_size_divides_devices,
    vllm_accepts_batch_limits,
    vllm_supports_lora_rank,
    max_staleness_has_an_effect,
    async_sampling_has_separate_devices,
    partial_rollout_is_supported,
    greedy_validation_samples_once,
)
