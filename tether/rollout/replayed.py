"""A decoder that runs the loops of its last decoding step again, where the next is the same but for its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tether.models.cpu import replay_for
from tether.models.layout import AttentionLayout
from tether.rollout.cache import Decode
from tether.rollout.decoder import Decoder
from tether.rollout.products import FEW_ROWS


@dataclass(frozen=True)
class _Step:
    """A recorded step, and where its numbers lie."""

    cache: tuple[int, ...]
    inputs: list[Tensor]
    product: Tensor
    loops: Any
    """None: it is not made of loops alone."""


class ReplayedDecoder:
    """The forward of one generation. A step of so few rows that all of it are loops is recorded and replayed.

    The logits of a replayed step lie where those of the step before lay.

    Args:
        decoder: its weights stay what they are, and where.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._step: _Step | None = None

    def __call__(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | None) -> Tensor:
        """See `Decoder.__call__`."""
        x, rotations = self._decoder.begin(ids, positions)

        def middle() -> Tensor:
            return self._decoder.middle(x, rotations, layout, ids.shape, keep)

        cache = layout.memory() if isinstance(layout, Decode) and len(x) <= FEW_ROWS else ()
        replay = replay_for(x) if cache else None
        if replay is None:
            return self._decoder.end(middle())
        inputs = [x, *(part for pair in rotations.values() for part in pair)]
        if self._step is None or self._step.cache != cache:
            product, loops = replay.record(middle)
            self._step = _Step(cache, inputs, product, loops)
        elif self._step.loops is None:
            product = middle()
        else:
            for old, new in zip(self._step.inputs, inputs, strict=True):
                old.copy_(new)
            self._step.loops.run()
            product = self._step.product
        return self._decoder.end(product)
