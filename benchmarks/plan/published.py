"""Rows that others published, and of this repository's own pages, beside the formulas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tether.config import load_config
from tether.plan.architecture import KNOWN
from tether.plan.assumptions import Assumptions
from tether.plan.devices import DEVICES, GIB, Device
from tether.plan.memory import Model, idle_memory, total, update
from tether.plan.planning import OVERHEAD, Plan, Planner
from tether.plan.timing import CPU, GPU, decode_step, forward_seconds

EPYC = Device("two cores of an EPYC", 23, 0.4, 52, 13, is_cpu=True)
"""As measured beside the rows of docs/evidence/performance.md."""

UPDATE_ALONE = 0.6 * GIB
"""Libraries and kernels of a process that only updates: neither data nor rewards nor a sampler."""


@dataclass(frozen=True)
class Row:
    """A published number beside the formula's."""

    source: str
    what: str
    published: float
    planned: float
    unit: str
    allowed: float
    reason: str = ""
    """Why it is missed, if it is."""

    @property
    def met(self) -> bool:
        """Whether the formula is within what is allowed."""
        return abs(self.planned / self.published - 1) <= self.allowed


def memory_rows() -> Iterator[Row]:
    """Yield peaks of memory."""
    prime = "prime-rl BENCHMARKS.md"
    adapters = "the formula has tether's adapters, which leave experts out; what else differs is not known"
    for name, ranks, tokens, rank, published in (
        ("qwen3-0.6b", 1, 16384, 0, 12.5),
        ("qwen3-0.6b", 1, 65536, 0, 19.6),
        ("qwen3-0.6b", 1, 16384, 16, 5.1),
        ("qwen3-0.6b", 1, 65536, 16, 11.5),
        ("qwen3-4b", 1, 16384, 16, 23.3),
        ("qwen3-4b", 1, 65536, 16, 42.0),
        ("qwen3-4b", 8, 16384, 0, 17.1),
        ("qwen3-4b", 8, 65536, 0, 36.1),
        ("qwen3-30b-a3b", 8, 16384, 0, 74.6),
        ("qwen3-30b-a3b", 8, 65536, 0, 105.4),
        ("qwen3-30b-a3b", 8, 16384, 16, 31.6),
        ("qwen3-30b-a3b", 8, 65536, 16, 63.7),
    ):
        kind = f"LoRA {rank}" if rank else "all weights"
        reason = adapters if rank else "not known: what its experts keep of each token is counted too low"
        what = f"{name}, {kind}, {tokens // 1024}k tokens, {ranks} GPU"
        yield Row(prime, what, published, _sharded(name, ranks, tokens, rank), "GiB", 0.1, reason)
    for tokens, published in ((8192, 31.7), (16384, 52.8)):
        planned = _sharded("qwen3-0.6b", 1, tokens, 0, whole_logits=True)
        what = f"qwen3-0.6b, SFT with all logits, {tokens // 1024}k tokens, 1 GPU"
        yield Row(prime, what, published, planned, "GiB", 0.1)
    for recompute, published in ((True, 3.23), (False, 6.17)):
        model = Model("actor", KNOWN["smollm2-135m"], fused=True, on_cpu=True, recompute=recompute)
        planned = (total(idle_memory(model)[0]) + total(update(model, 8192)) + UPDATE_ALONE) / GIB
        what = f"smollm2-135m, update of 8,192 tokens, checkpointing {'on' if recompute else 'off'}"
        yield Row("this repository: memory", what, published, planned, "GiB", 0.1)


def _sharded(name: str, ranks: int, tokens: int, rank: int, *, whole_logits: bool = False) -> float:
    sizes = KNOWN[name]
    adapter = sizes.adapter(rank) if rank else 0
    model = Model("actor", sizes, ranks, ranks, sharded=True, adapter=adapter, whole_logits=whole_logits)
    return (total(idle_memory(model)[0]) + total(update(model, tokens))) / GIB


def time_rows() -> Iterator[Row]:
    """Yield rates and seconds, without calibration."""
    for name, device, tokens, published in (
        ("qwen3-0.6b", "h100-80g", 16384, 11.9),
        ("qwen3-0.6b", "h100-80g", 65536, 10.15),
        ("qwen3-0.6b", "a6000-48g", 16384, 3.69),
    ):
        seconds = 4 * forward_seconds(KNOWN[name], tokens, tokens**2 / 2, tokens, DEVICES[device], GPU)
        what = f"{name}, {tokens // 1024}k tokens, {device}"
        yield Row("prime-rl BENCHMARKS.md", what, published, tokens / seconds / 1e3, "k tokens/s", 0.4)
    small = KNOWN["smollm2-135m"]
    step = decode_step(Model("actor", small, fused=True), EPYC, CPU)
    for rows, published in ((64, 605.0), (1, 73.0)):  # 64 tokens after prompts of 60
        seconds = 64 * step(rows, 92) + forward_seconds(small, 60 * rows, 60**2 / 2 * rows, 0, EPYC, CPU)
        what = f"decoding, smollm2-135m, rows: {rows}"
        yield Row("this repository: decoding", what, published, 64 * rows / seconds, "tokens/s", 0.4)
    for name, rows, published in (
        ("smollm2-135m", 64, 3.74),
        ("smollm2-135m", 512, 7.39),
        ("smollm2-1.7b", 64, 5.29),
        ("smollm2-1.7b", 256, 11.11),
    ):
        planned = 1e3 * decode_step(Model("actor", KNOWN[name]), DEVICES["h200-141g"], GPU)(rows, 300)
        yield Row("this repository: gpu", f"decoding, {name}, {rows} rows, H200", published, planned, "ms/token", 0.4)
    yield from _steps_of_this_repository()
    yield from _nemo_rl()


def _steps_of_this_repository() -> Iterator[Row]:
    batch = ("data.train_batch_size=4", "data.max_response_length=64", "actor_rollout_ref.rollout.n=8")
    batch += (
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    )
    assumptions = Assumptions(prompt=60, mean=64, tail=64)
    measured = {
        "grpo": {"gen": 3.38, "update_actor": 9.66},
        "gae": {"gen": 2.80, "old_log_prob": 2.41, "ref": 2.32, "values": 2.13, "update_critic": 6.42,
                "update_actor": 8.69},
    }  # fmt: skip
    for estimator, phases in measured.items():
        more = ("algorithm.use_kl_in_reward=True", "critic.model.use_remove_padding=True") if estimator == "gae" else ()
        plan = _plan(EPYC, assumptions, "smollm2-135m", f"algorithm.adv_estimator={estimator}", *batch, *more)
        for phase, published in phases.items():
            what = f"{'PPO' if more else 'GRPO'} step of 4 x 8 x 64 tokens: {phase}"
            yield Row("this repository: step", what, published, plan.times[phase].middle, "s", 0.4)
        whole = sum(phases.values())
        planned = plan.step.middle
        yield Row("this repository: step", f"{'PPO' if more else 'GRPO'} step", whole, planned, "s", 0.4)


def _nemo_rl() -> Iterator[Row]:
    reason = "that half of the devices sample is assumed; the page does not say how many do"
    for mode, published in (("off", 192.0), ("one_step_off", 152.0)):
        plan = _plan(
            DEVICES["h100-80g"],
            Assumptions(prompt=200, mean=3003, tail=8192),
            "qwen3-30b-a3b",
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=64",
            "data.max_response_length=8192",
            "actor_rollout_ref.rollout.n=32",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",  # as in its grpo_math_1B.yaml
            "trainer.n_gpus_per_node=8",
            "trainer.nnodes=4",
        )
        seconds = plan.step.middle
        if mode != "off":  # half of the devices sample
            learning = seconds - plan.times["gen"].middle
            seconds = max(2 * plan.times["gen"].middle, 2 * learning)
        what = f"qwen3-30b-a3b, 32 H100, 2,048 responses, {'in turn' if mode == 'off' else 'one step off'}"
        yield Row("NeMo-RL performance summary", what, published, seconds, "s", 0.4, reason)


def ratio_rows() -> Iterator[Row]:
    """Yield the phases of a PPO step of verl's on one GPU, as shares of the actor's update: the GPU is not named."""
    assumptions = Assumptions(prompt=100, mean=200, tail=400)
    plan = _plan(
        DEVICES["a100-80g"], assumptions, "qwen2.5-0.5b", "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "data.train_batch_size=256", "actor_rollout_ref.rollout.name=vllm", "critic.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    )  # fmt: skip
    actor = plan.times["update_actor"].middle
    slow = "the log names neither the GPU nor the sampler"
    for phase, published in (("gen", 18.6), ("update_critic", 16.2), ("ref", 5.4), ("values", 5.7)):
        planned = plan.times[phase].middle / actor
        yield Row("verl's log 0.567", f"{phase} / update_actor", published / 20.8, planned, "", 0.4, slow)


def _plan(device: Device, assumptions: Assumptions, model: str, *words: str) -> Plan:
    settings = [
        "data.train_files=[gsm8k.parquet]",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.device={'cpu' if device.is_cpu else 'cuda'}",
        *words,
    ]
    return Planner(load_config(None, settings).config, device, assumptions).plan()


@dataclass(frozen=True)
class Fit:
    """A published statement that something fits."""

    source: str
    model: str
    how: str
    device: str
    count: int
    need: float
    """GiB of a device, by the formula."""
    has: float

    @property
    def met(self) -> bool:
        """Whether the formula says so, too, or to try."""
        return self.need <= 1.1 * self.has


EASY_R1: Mapping[str, tuple[tuple[str, str, int], ...]] = {
    "bfloat16": (("qwen2.5-1.5b", "generic-24g", 1), ("qwen2.5-3b", "generic-40g", 1), ("qwen2.5-7b", "generic-40g", 4),
                 ("qwen2.5-32b", "generic-80g", 8), ("qwen2.5-72b", "generic-80g", 16)),
    "mixed": (("qwen2.5-1.5b", "generic-24g", 2), ("qwen2.5-3b", "generic-40g", 4), ("qwen2.5-7b", "generic-40g", 8),
              ("qwen2.5-32b", "generic-80g", 16), ("qwen2.5-72b", "generic-80g", 32)),
    "LoRA": (("qwen2.5-1.5b", "generic-12g", 1), ("qwen2.5-3b", "generic-24g", 1), ("qwen2.5-7b", "generic-32g", 2),
             ("qwen2.5-32b", "generic-80g", 2), ("qwen2.5-72b", "generic-80g", 4)),
}  # fmt: skip
VERL: tuple[tuple[str, str, str, int], ...] = (
    ("qwen2.5-0.5b", "LoRA", "h100-80g", 1), ("qwen2.5-1.5b", "LoRA", "h100-80g", 1),
    ("qwen2.5-3b", "LoRA", "h100-80g", 1), ("qwen2.5-7b", "LoRA", "h100-80g", 1),
    ("qwen2.5-14b", "LoRA", "h100-80g", 2), ("qwen2.5-32b", "LoRA", "h100-80g", 4),
    ("qwen2.5-72b", "LoRA", "h100-80g", 8), ("qwen2.5-7b", "mixed", "h800-80g", 2),
    ("qwen2.5-14b", "mixed", "h800-80g", 4), ("llama-3-70b", "mixed", "h800-80g", 32),
)  # fmt: skip
HELD = {"bfloat16": (2, 2, 4), "mixed": (4, 4, 8), "LoRA": (2, 4, 8)}
"""Bytes of a weight, its gradient and AdamW's moments in these engines."""
MICRO = 2048
"""Tokens of a micro-batch: one row, as their pages set it for the largest models."""


def fit_rows() -> Iterator[Fit]:
    """Yield what EasyR1's and verl's pages say fits. Sampler and trainer take turns there; the larger need counts."""
    for how, cases in EASY_R1.items():
        for name, device, count in cases:
            yield _fit("EasyR1 README", name, how, device, count)
    for name, how, device, count in VERL:
        yield _fit("verl device_tuning.rst", name, how, device, count)


def _fit(source: str, name: str, how: str, device: str, count: int) -> Fit:
    sizes, (weight, gradient, moments) = KNOWN[name], HELD[how]
    adapter = sizes.adapter(32) if how == "LoRA" else 0
    model = Model("actor", sizes, count, count, sharded=True, adapter=adapter, whole_logits=True)
    model = replace(model, on_cpu=False)
    passing = total(update(model, MICRO)) - total({k: v for k, v in update(model, MICRO).items() if "gradients" in k
                                                  and "whole" not in k})  # fmt: skip
    held = (weight * model.total_weights + (gradient + moments) * model.trained_weights) / count
    need = (held + passing) * 1.05 / GIB + OVERHEAD["gpu"] / GIB
    return Fit(source, name, how, device, count, need, DEVICES[device].memory)
