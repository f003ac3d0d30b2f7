"""Runs a transformers model over packed sequences, and verifies at load time that it keeps them separate.

If a model class does not use transformers' attention functions, packed sequences would attend to each other, and
sampled tokens might depend only on the token before, without any error: rewards would merely improve less. So every
model is tested once when it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.kernels import AttentionSpec, kernels_for
from tether.text.models.layers import Packed, context_length, use_tether_attention
from tether.text.models.output import hidden_states, lm_head_of, logits_of

SELF_TEST_LENGTHS = (7, 12)
SELF_TEST_WINDOW = 4
"""Size of attention windows and chunks during the test, so that both sequences are longer."""
DECODED = 2
"""Number of last tokens of each sequence that the test also runs one at a time over cached keys, as the sampler
does."""
SELF_TEST_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative error that rounding may cause, averaged over the tokens of a sequence (transformers' eager softmax computes
in float32 even in a float64 model). SmolLM2-135M has 1e-6 in float32 and 0.02 in bfloat16; a leak causes 0.3, or 1
in random models."""


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout to 0, because PPO compares the log-probs of two forward passes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):  # attention modules store their own rate
                setattr(module, name, 0.0)


class PackingDiffers(ValueError):
    """Packed or decoded sequences differ from separate ones by more than `SELF_TEST_TOLERANCE`."""


def prepare_for_packing(model: PreTrainedModel) -> None:
    """Check that all weights are finite, and run `compare_packing`, again in float32 if 16-bit results differ too
    much."""
    _check_finite(model)
    try:
        compare_packing(model, model.dtype)
    except PackingDiffers:  # a leak, or rounding in a model with large activations
        if model.dtype not in (torch.bfloat16, torch.float16):
            raise
        with _in_float32(model):
            compare_packing(model, torch.float32)


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Convert a model to float32 within the context; the conversion back is exact."""
    tensors = [*model.parameters(), *model.buffers()]
    dtypes = [tensor.dtype for tensor in tensors]
    model.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


def compare_packing(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Enable tether's attention and compare it with transformers' own, on two short sequences with short windows.

    Three results are compared: the packed hidden states, the logits of a causal LM by `lm_head_of`, and the hidden
    states of the last tokens when they run one at a time over the cached keys of the tokens before them.

    Raises:
        PackingDiffers: they differ.
        ValueError: weights or outputs are not finite, or the class does not support a layout.
    """
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__}: has no backbone separate from its output head, which tether needs.")
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(sum(SELF_TEST_LENGTHS), device=model.device) * 7919 + 101) % vocabulary
    is_causal_lm = model.get_output_embeddings() is not None
    was_training = model.training
    model.eval()
    layout = _Caching(Packed(SELF_TEST_LENGTHS))
    with torch.no_grad(), _short_windows(model):
        expected = _run_separately(model, ids, with_logits=is_causal_lm)
        packed_outputs = _run_packed(model, ids, layout, with_logits=is_causal_lm)
        decoded = _run_decoded(model, ids, layout) if is_causal_lm and layout.cache else None
    model.train(was_training)
    tolerance = SELF_TEST_TOLERANCE[dtype]
    for what, separate, packed in zip(("hidden states", "logits"), expected, packed_outputs, strict=False):
        if not (torch.isfinite(separate).all() and torch.isfinite(packed).all()):
            raise ValueError(
                f"{_name(model)}: its {what} have NaN or infinity, although its weights are finite: they overflow "
                f"{dtype}. Load it in another format (fsdp_config.dtype), or take an earlier checkpoint."
            )
        error = _relative_error(packed, separate)
        if not error <= tolerance:
            raise PackingDiffers(
                f"{type(model).__name__}: packed sequences have different {what} than separate ones (relative error "
                f"{error:.2g}, allowed {tolerance:g} in {dtype}), so tether cannot train this model class. "
                "Its attention or output head does something that tether's does not know, such as a window or chunks "
                "that only transformers' mask has."
            )
    if is_causal_lm:
        _check_decoded(model, decoded, expected[0], tolerance)


def _check_decoded(model: PreTrainedModel, decoded: Tensor | None, expected: Tensor, tolerance: float) -> None:
    name = type(model).__name__
    if decoded is None:
        raise ValueError(
            f"{name}: its attention does not go through transformers' attention functions, so that tether would sample "
            "each token without its context. Choose a model of another class."
        )
    wanted = torch.cat([part[-DECODED:] for part in expected.split(SELF_TEST_LENGTHS)])
    error = ((decoded - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1)).mean().item()
    if not error <= tolerance:
        raise PackingDiffers(
            f"{name}: tokens that are run one at a time over cached keys give other hidden states than the whole "
            f"sequence (relative error {error:.2g}, allowed {tolerance:g}), so tether cannot sample from this class. "
            "Choose a model of another class."
        )


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, shorten the attention windows and chunks that a model's sequences can exceed."""
    longest = context_length(model.config) or sys.maxsize
    configs: dict[object, object] = {
        id(module.config): module.config for module in model.modules() if "config" in vars(module)
    }
    holders: dict[object, object] = {**configs, **dict(model.named_modules())}
    before = [
        (key, name, value)
        for key, holder in holders.items()
        for name, value in vars(holder).items()
        if ("window" in name or "chunk" in name) and "layer" not in name
        if type(value) is int and SELF_TEST_WINDOW < value < longest
    ]
    try:
        for key, name, _ in before:
            vars(holders[key])[name] = SELF_TEST_WINDOW  # not by setattr, which a config validates
        yield
    finally:
        holders |= dict(model.named_modules())  # some were replaced meanwhile
        for key, name, value in before:
            vars(holders[key])[name] = value


def _check_finite(model: PreTrainedModel) -> None:
    refuse_non_finite(model, [name for name, weight in model.named_parameters() if not is_finite(weight)])


def is_finite(weight: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity; minimum and maximum avoid a second tensor of its size."""
    return not weight.numel() or all(bound.isfinite().item() for bound in weight.detach().aminmax())


def refuse_non_finite(model: PreTrainedModel, broken: Sequence[str]) -> None:
    """Refuse a model with NaN or infinity in these weights.

    Raises:
        ValueError: the list is not empty.
    """
    if broken:
        raise ValueError(
            f"{_name(model)}: {len(broken)} of its weights have NaN or infinity, first "
            f"{broken[0]}. The training that saved them diverged, or they do not fit the format {model.dtype}: take an "
            "earlier checkpoint, or load them in another format (fsdp_config.dtype)."
        )


def _name(model: PreTrainedModel) -> str:
    """Return the file or folder from which the model was loaded, otherwise its class."""
    return str(model.name_or_path or type(model).__name__)


def _run_separately(model: PreTrainedModel, ids: Tensor, *, with_logits: bool) -> list[Tensor]:
    """Return hidden states [N, E] (and logits [N, V]) of each sequence separately, with transformers' eager
    attention."""
    model.set_attn_implementation("eager")
    hidden: list[Tensor] = []
    hook = model.base_model.register_forward_hook(lambda module, inputs, out: hidden.append(out.last_hidden_state[0]))
    run = model if with_logits else model.base_model  # a scalar head may have a wider dtype than the backbone
    try:
        outputs = [run(sequence[None], use_cache=False) for sequence in ids.split(SELF_TEST_LENGTHS)]
    finally:
        hook.remove()
    if not hidden:
        raise ValueError(
            f"{type(model).__name__}: its forward pass does not run its backbone {type(model.base_model).__name__}, so "
            "tether cannot tell which hidden states its output head reads, and cannot train this model class."
        )
    return [torch.cat(hidden), torch.cat([out.logits[0] for out in outputs])] if with_logits else [torch.cat(hidden)]


@dataclass(frozen=True)
class _Caching:
    """A layout that also stores the keys and values of each layer."""

    packed: Packed
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Layer -> keys [1, K, N, D] and values [1, K, N, E]."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend within each sequence."""
        self.cache[spec.layer] = (key, value)
        return self.packed.attend(query, key, value, spec)


@dataclass(frozen=True)
class _Decoding:
    """A layout of one new token for each sequence, over cached keys."""

    cache: dict[int, tuple[Tensor, Tensor]]
    """Layer -> keys [R, K, L, D] and values [R, K, L, E]."""
    position: Tensor
    """[R] position of each new token."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend to the keys up to each token's position; query, key and value have one token per row."""
        keys, values = self.cache[spec.layer]
        rows = torch.arange(len(query), device=query.device)
        keys[rows, :, self.position], values[rows, :, self.position] = key[:, :, 0], value[:, :, 0]
        return kernels_for(query, keys, values).continued_attention(query, keys, values, self.position[:, None], spec)


def _run_decoded(model: PreTrainedModel, ids: Tensor, layout: _Caching) -> Tensor:
    """Return hidden states [R * DECODED, E] of the last tokens of each sequence, run one at a time; a sequence is a
    row."""
    cache = {layer: (_in_rows(keys), _in_rows(values)) for layer, (keys, values) in layout.cache.items()}
    rows = ids.split(SELF_TEST_LENGTHS)
    hidden = []
    for index in range(-DECODED, 0):
        position = torch.tensor(SELF_TEST_LENGTHS, device=ids.device) + index
        tokens = torch.stack([row[index] for row in rows])
        hidden.append(hidden_states(model, tokens[:, None], position[:, None], _Decoding(cache, position)))
    return torch.stack(hidden, dim=1).flatten(0, 1)


def _in_rows(packed: Tensor) -> Tensor:
    """Convert [1, K, N, D] to [R, K, L, D], padded with zeros on the right."""
    parts = [part.transpose(0, 1) for part in packed[0].split(SELF_TEST_LENGTHS, dim=1)]
    return nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2).contiguous()


def _run_packed(model: PreTrainedModel, ids: Tensor, layout: _Caching, *, with_logits: bool) -> list[Tensor]:
    try:
        use_tether_attention(model)
        hidden = hidden_states(model, ids[None], layout.packed.position_ids(ids.device), layout)
    except (TypeError, ValueError) as error:  # the class supports no attention function, or no extra argument
        raise ValueError(
            f"{type(model).__name__}: does not run on transformers' attention functions, which packing needs ({error})."
        ) from error
    if not with_logits:
        return [hidden]
    head = lm_head_of(model)
    if head.weight.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{type(model).__name__}: its output head does not read the hidden states of its backbone, so tether "
            "cannot train this model class."
        )
    return [hidden, logits_of(hidden, head)]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the error of the worst sequence, averaged over its tokens."""
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    return max(sequence.mean().item() for sequence in difference.split(SELF_TEST_LENGTHS))
