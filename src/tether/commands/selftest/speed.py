"""Speed limits of this machine, and how close decoding and training come to them, compared with transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.batch import TrainBatch
from tether.commands.selftest.results import (
    CheckContext,
    CheckOutcome,
    not_applicable,
    passed,
    passes_if,
    random_model,
)
from tether.loop.engine import LossSpec, OptimizerOptions
from tether.runtime.core_clock import BUSY, CoreClock
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, PolicyLoss, PolicyOutputs
from tether.text.learning.packing import MicroBatching
from tether.text.models.layers import use_tether_attention
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

ROWS, PROMPT_TOKENS = 16, 24
MAX_SECONDS = 5.0
SLOWEST = 0.5
"""Share of transformers' speed below which something is probably broken, not merely slow."""


def limits(context: CheckContext) -> CheckOutcome:
    """Measure a large matrix product and reading a large tensor."""
    rate, bandwidth = _measured_limits(context)
    return passed(f"matrix product {rate / 1e9:.0f} GFLOP/s in {context.dtype}, memory {bandwidth / 1e9:.1f} GB/s")


def decoding(context: CheckContext) -> CheckOutcome:
    """Sample from a model of 20M weights with tether and with transformers' generate."""
    model, theirs = (_model(context) for _ in range(2))
    theirs.generation_config.eos_token_id = None
    new_tokens = 16 if context.quick else 48
    ids = _random_ids(ROWS, PROMPT_TOKENS, context)
    engine = NativeEngine(model, eos_token_ids=frozenset(), max_num_seqs=ROWS)

    def ours(step: int) -> object:
        return engine.generate(ids.tolist(), SamplingParams(max_new_tokens=new_tokens), NoiseKey(seed=0, step=step))

    def generate(step: int) -> object:
        # Its type allows for models of transformers without generate.
        sample = cast("Callable[..., object]", theirs.generate)
        lengths = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        return sample(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, pad_token_id=0, **lengths)

    entries = _linear_entries(theirs)

    def least(rate: float, bandwidth: float) -> float:
        step = max(2 * entries * ROWS / rate, entries * context.dtype.itemsize / bandwidth)
        return 2 * entries * ROWS * PROMPT_TOKENS / rate + (new_tokens - 1) * step

    return _compared(context, ours, generate, ROWS * new_tokens, least)


def training(context: CheckContext) -> CheckOutcome:
    """Compute the gradient of the policy loss with tether, and in a plain loop with transformers."""
    model, theirs = _model(context), _model(context)
    rows = ROWS // 2 if context.quick else ROWS
    length = 40 if context.quick else 120
    narrow = None if context.dtype == torch.float32 else context.dtype
    use_tether_attention(model.float())
    engine: LocalEngine[PolicyOutputs] = LocalEngine(
        model, MicroBatching(max_rows=rows), OptimizerOptions(lr=1e-3), compute_dtype=narrow
    )
    batch = _batch(context, rows, length)
    weights = torch.ones(rows, length, device=context.device)
    ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1).to(context.device)

    def ours(step: int) -> object:
        return engine.accumulate_gradients(batch, LossSpec(PolicyForward(), PolicyLoss()))

    def plain(step: int) -> object:
        theirs.zero_grad()
        logits = theirs(ids).logits[:, PROMPT_TOKENS - 1 : -1]
        log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, PROMPT_TOKENS:, None]).squeeze(-1)
        loss = -(torch.exp(log_probs - log_probs.detach()) * weights).mean()
        loss.backward()
        return loss

    tokens = rows * (PROMPT_TOKENS + length)
    return _compared(context, ours, plain, tokens, lambda rate, _: 6 * _linear_entries(theirs) * tokens / rate)


def _compared(
    context: CheckContext,
    ours: Callable[[int], object],
    theirs: Callable[[int], object],
    tokens: int,
    least: Callable[[float, float], float],
) -> CheckOutcome:
    """Compare the fastest of a few calls; `least` returns the minimum seconds for a FLOP/s and a bytes/s."""
    limits, clock = [_measured_limits(context)], CoreClock()
    seconds, plain = _fastest(context, ours, theirs)
    waited = clock.wait_fraction() or 0.0
    limits.append(_measured_limits(context))  # measured again, because other work on the machine varies
    share = least(*map(max, zip(*limits, strict=True))) / seconds
    detail = (
        f"{tokens / seconds:.0f} tokens/s, {plain / seconds:.1f} times transformers, "
        f"{share:.0%} of the limit that was measured beside it"
    )
    if plain / seconds < SLOWEST and waited > BUSY:
        return not_applicable(f"an idle machine; other programs had the cores for {waited:.0%} of the time ({detail})")
    return passes_if(plain / seconds >= SLOWEST, detail)


def _model(context: CheckContext) -> PreTrainedModel:
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 2}
    layers = 4 if context.quick else 8
    return random_model(dtype=context.dtype, vocab_size=8192, num_hidden_layers=layers, device=context.device, **sizes)


def _linear_entries(model: PreTrainedModel) -> int:
    """Return the number of weights in matrix products; a tied embedding counts as the output layer."""
    return sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)


def _random_ids(rows: int, length: int, context: CheckContext) -> Tensor:
    return torch.randint(300, 8192, (rows, length), generator=torch.Generator().manual_seed(0)).to(context.device)


def _batch(context: CheckContext, rows: int, length: int) -> TrainBatch:
    ids = _random_ids(rows, PROMPT_TOKENS + length, context).cpu()
    return TrainBatch(
        uid=torch.arange(rows),
        prompt_ids=ids[:, :PROMPT_TOKENS],
        prompt_length=torch.full((rows,), PROMPT_TOKENS),
        response_ids=ids[:, PROMPT_TOKENS:],
        response_length=torch.full((rows,), length),
        response_mask=torch.ones(rows, length, dtype=torch.bool),
        rollout_log_probs=torch.zeros(rows, length),
        truncated=torch.zeros(rows, dtype=torch.bool),
        advantages=torch.ones(rows, length),
        batch_size=[rows],
    )


def _measured_limits(context: CheckContext) -> tuple[float, float]:
    """Return the FLOP/s of a large matrix product in the dtype of runs, and the bytes/s of reading a large tensor."""
    size, large = (1024, 1 << 25) if context.quick or context.device.type == "cpu" else (8192, 1 << 28)
    first, second = (torch.randn(size, size, device=context.device).to(context.dtype) for _ in range(2))
    numbers = torch.ones(large, device=context.device)
    product = min(_seconds(context, lambda _: first @ second, step) for step in range(6))
    read = min(_seconds(context, lambda _: numbers.sum(), step) for step in range(4))
    return 2 * size**3 / product, numbers.nbytes / read


def _fastest(context: CheckContext, *calls: Callable[[int], object]) -> list[float]:
    """Return the seconds of the fastest execution of each call; calls alternate, at least three times."""
    spent = [[_seconds(context, call, 0)] for call in calls]
    for step in range(1, 3):
        if sum(map(sum, spent)) < MAX_SECONDS * len(calls):
            for call, seconds in zip(calls, spent, strict=True):
                seconds.append(_seconds(context, call, step))
    return [min(seconds) for seconds in spent]


def _seconds(context: CheckContext, call: Callable[[int], object], step: int) -> float:
    _wait(context)
    start = time.perf_counter()
    call(step)
    _wait(context)
    return time.perf_counter() - start


def _wait(context: CheckContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize()
