"""Compares every kernel that this machine uses, and a model that uses them, with plain PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.batch import RolloutBatch, TrainBatch
from tether.commands.selftest.results import (
    CheckContext,
    CheckOutcome,
    failed,
    passed,
    random_model,
    relative_distance,
)
from tether.kernels import AttentionSpec, Epilogue, Reference, backend
from tether.text.learning.losses import PolicyForward
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

PROMPTS = [[5, 6, 7, 80], [9], [70, 71, 72, 73, 74, 75, 76], [33, 200]]
EOS = frozenset(range(4, 90))
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 5e-3}
"""Maximum relative distance, for several roundings to 8 bits and TF32 products of a GPU."""
Draw = Callable[..., Tensor]
Operation = Callable[[Reference, Draw], list[Tensor]]


def kernels_agree(context: CheckContext) -> CheckOutcome:
    """Compare each operation and its gradients with the float64 reference on the same numbers."""
    kernels, dtype = backend(context.device.type, context.dtype), context.dtype
    distances = {name: _distance(operation, kernels, context.device, dtype) for name, operation in OPERATIONS.items()}
    wrong = [
        f"{name} is off by {distance:.2g}" for name, distance in distances.items() if not distance <= TOLERANCE[dtype]
    ]
    if wrong:
        return failed(f"{kernels.describe()}: {'; '.join(wrong)} of its size (rounding explains {TOLERANCE[dtype]:g})")
    worst = max(distances, key=distances.__getitem__)
    return passed(
        f"{len(distances)} operations of {kernels.describe()}, worst {worst} by {distances[worst]:.1g} of its size"
    )


def model_agrees(context: CheckContext) -> CheckOutcome:
    """Compare log-probs of packed rows with transformers' own attention for each row, in float64."""
    model = random_model()
    batch = sampled_batch(model)
    expected = _log_probs_by_transformers(random_model().double(), batch)
    nn.Module.to(model, context.device, context.dtype)
    with torch.no_grad():
        log_probs = PolicyForward()(model, batch.to(context.device)).log_probs.cpu()
    error = float((log_probs.double() - expected)[batch.response_mask].abs().mean())
    limit = 0.05 if context.dtype == torch.bfloat16 else 1e-3
    detail = f"log-probs differ from transformers' in float64 by {error:.2g} nats per token in {context.dtype}"
    return passed(detail) if error <= limit else failed(f"{detail} (rounding explains {limit:g})")


def sampled_batch(model: PreTrainedModel, max_new_tokens: int = 12, n: int = 3) -> TrainBatch:
    """Return responses of the model to four prompts, with scores."""
    rollout = sampled(model, max_new_tokens, n)
    return TrainBatch.assemble(rollout, torch.arange(len(rollout)) % 4.0)


def sampled(model: PreTrainedModel, max_new_tokens: int = 12, n: int = 3) -> RolloutBatch:
    """Return responses of the model to four prompts."""
    engine = NativeEngine(model, eos_token_ids=EOS, max_num_seqs=5)
    return engine.generate(PROMPTS, SamplingParams(max_new_tokens=max_new_tokens, n=n), NoiseKey(seed=1, step=1))


def _log_probs_by_transformers(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    log_probs = torch.zeros(batch.response_ids.shape, dtype=torch.float64)
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row, : int(batch.prompt_length[row])]
        response = batch.response_ids[row, : int(batch.response_length[row])]
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        log_probs[row, : len(response)] = logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
    return log_probs


def _distance(operation: Operation, kernels: Reference, device: torch.device, dtype: torch.dtype) -> float:
    """Return the maximum relative distance of the operation's outputs from those of the float64 reference."""

    def outputs(backend: Reference, device: torch.device, dtype_of_it: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            # Both sides get the same numbers, rounded to the narrower dtype.
            numbers = (scale * torch.randn(*shape, generator=generator)).to(dtype)
            return numbers.to(device, dtype_of_it).requires_grad_()

        return operation(backend, draw)

    computed = outputs(kernels, device, dtype)
    expected = outputs(Reference(), torch.device("cpu"), torch.float64)
    return max(map(relative_distance, computed, expected))


def _with_gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.device, out.dtype)
    return [out, *torch.autograd.grad(out, inputs, weights)]


def _rms_norm(kernels: Reference, draw: Draw) -> list[Tensor]:
    x, weight = draw(40, 64), draw(64)
    return _with_gradients(kernels.rms_norm(x, weight, 1e-6, 0.0), x, weight)


def _gated_mlp(kernels: Reference, draw: Draw) -> list[Tensor]:
    gate, up, weight = draw(40, 96), draw(40, 96), draw(64, 96, scale=0.1)
    down = nn.Linear(96, 64, bias=False, device=gate.device, dtype=gate.dtype)
    down.weight = nn.Parameter(weight.detach())
    return _with_gradients(kernels.gated_mlp(gate, up, down), gate, up)


def _rotate(kernels: Reference, draw: Draw) -> list[Tensor]:
    heads, angle = draw(40, 4, 16), draw(40, 8).detach()
    angles = torch.cat([angle, angle], dim=-1)
    return _with_gradients(kernels.rotate(heads, angles.cos(), angles.sin()), heads)


def _attention(window: int | None) -> Operation:
    def operation(kernels: Reference, draw: Draw) -> list[Tensor]:
        query, key, value = draw(30, 4, 16), draw(30, 2, 16), draw(30, 2, 16)
        spec = AttentionSpec(0, 0.25, sliding_window=window)
        return _with_gradients(kernels.packed_attention(query, key, value, (7, 12, 11), None, spec), query, key, value)

    return operation


@torch.no_grad()
def _decode_attention(kernels: Reference, draw: Draw) -> list[Tensor]:
    query, key, value = draw(5, 4, 16), draw(5, 2, 16), draw(5, 2, 16)
    keys, values = draw(6, 2, 32, 16).detach().clone(), draw(6, 2, 32, 16).detach().clone()
    position = torch.tensor([3, 17, 8, 0, 20], device=query.device)
    out = kernels.decode_attention(query, key, value, keys, values, position, 21, AttentionSpec(0, 0.25), {})
    return [out, keys, values]


@torch.no_grad()
def _linears(kernels: Reference, draw: Draw) -> list[Tensor]:
    x, weights = draw(20, 64), [draw(48, 64, scale=0.1), draw(32, 64, scale=0.1)]
    layers = [nn.Linear(64, len(weight), bias=False, device=x.device, dtype=x.dtype) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return [kernels.linears(x, layers, kernels.pack_linears(layers), Epilogue.NONE, None)]


@torch.no_grad()
def _sample(kernels: Reference, draw: Draw) -> list[Tensor]:
    logits = draw(8, 500)
    uniform = torch.linspace(0.05, 0.95, 8, dtype=torch.float64, device=logits.device)
    token, log_prob = kernels.sample(logits, uniform, 0.9)
    return [token, log_prob]


OPERATIONS: dict[str, Operation] = {
    "RMS norm": _rms_norm,
    "gated MLP": _gated_mlp,
    "rotary positions": _rotate,
    "packed attention": _attention(None),
    "windowed attention": _attention(4),
    "decoding attention": _decode_attention,
    "linear layers": _linears,
    "sampling": _sample,
}
