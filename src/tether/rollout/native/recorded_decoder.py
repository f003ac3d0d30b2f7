"""A decoder that runs the kernels of its last decoding step again, where the next is the same but for its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tether.kernels import FEW_ROWS, AttentionLayout, Recording, kernels_for
from tether.rollout.native.decoder import Decoder
from tether.rollout.native.kv_cache import Decode


@dataclass(frozen=True)
class _Step:
    """A recorded step, and where its numbers lie."""

    cache: tuple[int, ...]
    inputs: list[Tensor]
    product: Tensor
    recording: Recording


class ReplayedDecoder:
    """The forward of one generation. A decoding step that is made of kernels alone is recorded and replayed.

    The logits of a replayed step lie where those of the step before lay.

    Args:
        decoder: its weights stay what they are, and where.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.is_of_device_alone = not decoder.reads_positions()
        """Whether a decoding step neither waits for the device nor reads from it."""
        self._step: _Step | None = None
        self._has_only_kernels: dict[int, bool] = {}

    def __call__(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | None) -> Tensor:
        """See `Decoder.__call__`."""
        x, rotations = self._decoder.begin(ids, positions)

        def middle() -> Tensor:
            return self._decoder.middle(x, rotations, layout, ids.shape, keep)

        kind = min(len(x), FEW_ROWS + 1)  # rows more than these take the same ways
        cache = layout.memory() if isinstance(layout, Decode) and self._has_only_kernels.get(kind, True) else ()
        if not cache:
            return self._decoder.end(middle())
        inputs = [x, *(part for pair in rotations.values() for part in pair)]
        if self._step is not None and self._step.cache == cache:
            for old, new in zip(self._step.inputs, inputs, strict=True):
                old.copy_(new)
            self._step.recording.run()
            return self._decoder.end(self._step.product)
        self._step = None  # first, so that the new one takes the memory of the old
        product, recording = kernels_for(x).record(middle, watched=kind not in self._has_only_kernels)
        self._has_only_kernels[kind] = recording is not None
        self._step = None if recording is None else _Step(cache, inputs, product, recording)
        return self._decoder.end(product)
