"""Runs a transformers model over packed sequences, and verifies at load time that it keeps them separate.

A model class whose attention does not use transformers' attention functions would let packed sequences attend to each
other without any error: rewards would only improve more slowly. So every loaded model is tested once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.kernels import AttentionLayout
from tether.models.language.expert_choice import ExpertChoice, check_choice, follow_choice
from tether.models.layers.attention import Packed, use_tether_attention
from tether.models.output.log_probs import lm_head_of, logits_of

SELF_TEST_LENGTHS = (7, 12)
SELF_TEST_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative error that rounding may cause, averaged over the tokens of a sequence (transformers' eager softmax computes
in float32 even in a float64 model). SmolLM2-135M has 1e-6 in float32 and 0.02 in bfloat16; a leak causes 0.3, or 1
in random models."""


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    layout: AttentionLayout,
    choice: ExpertChoice | None = None,
) -> Tensor:
    """Return the final hidden states [R*S, E], without the output head; packed tokens are one row, R = 1 and S = N.

    Args:
        model: a causal LM or critic with tether's attention enabled.
        input_ids: [R, S] token ids.
        position_ids: [R, S] positions in their sequences, as in `Packed.position_ids`.
        layout: which token sees which one.
        choice: records or replays the experts of the tokens.

    Raises:
        ValueError: `choice` is set for a model without a router that tether supports.
    """
    options: dict[str, object] = {} if choice is None else {"expert_choice": choice}
    if choice is not None:
        follow_choice(model)
    out = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, attention_layout=layout, **options
    )
    if choice is not None:
        check_choice(model, choice)
    hidden: Tensor = out.last_hidden_state.flatten(0, 1)
    return hidden


def disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout to 0, because PPO compares the log-probs of two forward passes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):  # attention modules store their own rate
                setattr(module, name, 0.0)


def prepare_for_packing(model: PreTrainedModel) -> None:
    """Check that all weights are finite, and run `compare_packing`."""
    _check_finite(model)
    compare_packing(model, model.dtype)


def compare_packing(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Enable tether's attention and compare it with transformers' own, on two short sequences.

    It compares the packed hidden states and, for a causal LM, the logits computed with `lm_head_of`.

    Args:
        model: a model with its weights, possibly sharded.
        dtype: dtype of its computation.

    Raises:
        ValueError: weights or outputs are not finite, the two differ by more than `SELF_TEST_TOLERANCE`, or the class
            does not support a layout.
    """
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__}: has no backbone separate from its output head, which tether needs.")
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(sum(SELF_TEST_LENGTHS), device=model.device) * 7919 + 101) % vocabulary
    is_causal_lm = model.get_output_embeddings() is not None
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = _run_separately(model, ids, with_logits=is_causal_lm)
        packed_outputs = _run_packed(model, ids, with_logits=is_causal_lm)
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
            raise ValueError(
                f"{type(model).__name__}: packed sequences have different {what} than separate ones (relative error "
                f"{error:.2g}, allowed {tolerance:g} in {dtype}), so tether cannot train this model class. "
                "Its attention or output head does something that tether does not support."
            )


def _check_finite(model: PreTrainedModel) -> None:
    refuse_broken(model, [name for name, weight in model.named_parameters() if not is_finite(weight)])


def is_finite(weight: Tensor) -> bool:
    """Return whether a tensor has no NaN and no infinity, using its minimum and maximum to avoid a second tensor."""
    return not weight.numel() or all(bound.isfinite().item() for bound in weight.detach().aminmax())


def refuse_broken(model: PreTrainedModel, broken: Sequence[str]) -> None:
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
    """Return the file or folder from which the model was loaded, or else its class."""
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


def _run_packed(model: PreTrainedModel, ids: Tensor, *, with_logits: bool) -> list[Tensor]:
    layout = Packed(SELF_TEST_LENGTHS)
    try:
        use_tether_attention(model)
        hidden = hidden_states(model, ids[None], layout.position_ids(ids.device), layout)
    except (TypeError, ValueError) as error:  # the class supports no attention function, or no extra argument
        raise ValueError(
            f"{type(model).__name__}: does not run on transformers' attention functions, which packing needs ({error})."
        ) from error
    return [hidden, logits_of(hidden, lm_head_of(model))] if with_logits else [hidden]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the error of the worst sequence, averaged over its tokens."""
    difference = (actual - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    return max(sequence.mean().item() for sequence in difference.split(SELF_TEST_LENGTHS))
