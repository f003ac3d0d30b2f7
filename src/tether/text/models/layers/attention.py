"""One attention function for every transformers model, with the layout of the tokens as an argument.

transformers lets a model call an attention function by name and passes it all keyword arguments of the model's forward.
tether registers one function, ``tether``, and passes it a *layout*: an object that decides which query sees which key.
Packed training (`Packed`) and cached decoding (`tether.text.sampling`) are two layouts over the same module, so both
use the very same weights, and no [rows, width] padding or [tokens, tokens] mask is built.

Legend: N = tokens of all sequences, concatenated, H = query heads, K = key/value heads (H = K * G), D = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.kernels import AttentionLayout, AttentionSpec, kernels_for
from tether.text.models.layers.fused_modules import replace_gated_mlps, replace_norms
from tether.text.models.layers.positions import limit_positions
from tether.text.models.layers.rotary_attention import replace_attentions

ATTENTION_NAME = "tether"


@dataclass(frozen=True)
class Packed:
    """Sequences concatenated in one row of N tokens; each attends causally to itself alone.

    Sequences may share a prefix, as the responses to one prompt do: `prefixes` defines which segment continues which
    one, and a segment that others continue is not a sequence of its own. The layers then process a shared prompt once.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each segment."""
    prefixes: tuple[int | None, ...] | None = None
    """For each segment the index of the segment that it continues, which itself has no prefix; None: no prefixes."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        attended = kernels_for(query, key, value).packed_attention(query, key, value, self.lengths, self.prefixes, spec)
        return attended.transpose(0, 1)[None]

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Return [1, N]: each token's position in its own sequence."""
        prefixes = self.prefixes or (None,) * len(self.lengths)
        first = [0 if prefix is None else self.lengths[prefix] for prefix in prefixes]
        segments = zip(first, self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length, device=device) for start, length in segments])[None]


@dataclass(frozen=True)
class Padded:
    """One sequence per row, padded on the right: a causal query never sees the padding after it."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return kernels_for(query, key, value).causal_attention(query, key, value, spec)


def _attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention_layout: AttentionLayout,
    **_: object,  # transformers also passes position ids, cache flags and so on
) -> tuple[Tensor, None]:
    if attention_mask is not None:
        raise TypeError(f"{type(module).__name__} creates its own mask in addition to the layout")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    spec = AttentionSpec(int(module.layer_idx), scale, sliding_window, softcap)  # type: ignore[arg-type]
    out = attention_layout.attend(query, key, value, spec)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_interface)


def use_tether_attention(model: PreTrainedModel) -> None:
    """Make a model use layouts, and replace its norms, rotations and gated MLPs.

    Its forward then requires a layout as ``attention_layout=``.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    replace_attentions(model)
    replace_norms(model)
    replace_gated_mlps(model)
    limit_positions(model)
