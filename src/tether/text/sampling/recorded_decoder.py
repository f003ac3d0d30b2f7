"""A decoder that records the kernels of a decoding step and replays them for steps with the same memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tether.kernels import FEW_ROWS, AttentionLayout, RecordedKernels, kernels_for
from tether.text.sampling.decoder import Decoder
from tether.text.sampling.kv_cache import Decode


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded step, with its inputs and its output."""

    cache: tuple[int, ...]
    inputs: list[Tensor]
    product: Tensor
    recording: RecordedKernels


class ReplayedDecoder:
    """The forward pass of one generation. A decoding step that consists of kernels only is recorded and replayed.

    A replayed step overwrites the logits of the previous step.

    Args:
        decoder: the decoder, whose weights must not change or move.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.is_device_only = not decoder.reads_positions()
        """Whether a decoding step neither waits for the device nor reads from it."""
        self._step: _RecordedStep | None = None
        self._has_only_kernels: dict[int, bool] = {}

    def __call__(self, ids: Tensor, positions: Tensor, layout: AttentionLayout, keep: Tensor | None) -> Tensor:
        x, rotations = self._decoder.begin(ids, positions)

        def middle() -> Tensor:
            return self._decoder.middle(x, rotations, layout, ids.shape, keep)

        kind = min(len(x), FEW_ROWS + 1)  # larger numbers of rows use the same kernels
        cache = layout.memory() if isinstance(layout, Decode) and self._has_only_kernels.get(kind, True) else ()
        if not cache:
            return self._decoder.end(middle())
        inputs = [x, *(tensor for pair in rotations.values() for tensor in pair)]
        if self._step is not None and self._step.cache == cache:
            for old, new in zip(self._step.inputs, inputs, strict=True):
                old.copy_(new)
            self._step.recording.run()
            return self._decoder.end(self._step.product)
        self._step = None  # first, so that the new recording reuses the memory of the old one
        product, recording = kernels_for(x).record(middle, watched=kind not in self._has_only_kernels)
        self._has_only_kernels[kind] = recording is not None
        self._step = None if recording is None else _RecordedStep(cache, inputs, product, recording)
        return self._decoder.end(product)
