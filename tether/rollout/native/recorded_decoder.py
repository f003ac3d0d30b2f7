"""A decoder that runs the loops of its last decoding step again, where the next is the same but for its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tether.kernels.attention_spec import AttentionLayout
from tether.kernels.dispatch import replay_for
from tether.rollout.native.decoder import Decoder
from tether.rollout.native.kv_cache import Decode
from tether.rollout.native.packed_linear import FEW_ROWS


@dataclass(frozen=True)
class _Step:
    """A recorded step, and where its numbers lie."""

    cache: tuple[int, ...]
    inputs: list[Tensor]
    product: Tensor
    loops: Any


class ReplayedDecoder:
    """The forward of one generation. A decoding step that is made of loops alone is recorded and replayed.

    The logits of a replayed step lie where those of the step before lay.

    Args:
        decoder: its weights stay what they are, and where.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._step: _Step | None = None
        self._has_only_loops: dict[int, bool] = {}

    def __call__(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | None) -> Tensor:
        """See `Decoder.__call__`."""
        x, rotations = self._decoder.begin(ids, positions)

        def middle() -> Tensor:
            return self._decoder.middle(x, rotations, layout, ids.shape, keep)

        kind = min(len(x), FEW_ROWS + 1)  # rows more than these take the same ways
        cache = layout.memory() if isinstance(layout, Decode) and self._has_only_loops.get(kind, True) else ()
        replay = replay_for(x) if cache else None
        if replay is None:
            return self._decoder.end(middle())
        inputs = [x, *(part for pair in rotations.values() for part in pair)]
        if self._step is not None and self._step.cache == cache:
            for old, new in zip(self._step.inputs, inputs, strict=True):
                old.copy_(new)
            self._step.loops.run()
            return self._decoder.end(self._step.product)
        self._step = None  # first, so that the new one takes the memory of the old
        product, loops = replay.record(middle, watched=kind not in self._has_only_loops)
        self._has_only_loops[kind] = loops is not None
        self._step = None if loops is None else _Step(cache, inputs, product, loops)
        return self._decoder.end(product)
