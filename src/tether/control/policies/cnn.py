"""Convolutional networks over images of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tether.control.policies.mlp import ACTIVATIONS


@dataclass(frozen=True)
class Convolution:
    """One layer."""

    channels: int
    kernel: int
    stride: int
    padding: int = 0


CNNS: Mapping[str, tuple[Convolution, ...]] = {
    "nature": (Convolution(32, 8, 4), Convolution(64, 4, 2), Convolution(64, 3, 1)),
    "small": (Convolution(16, 3, 1, 1), Convolution(32, 3, 2, 1)),
}
"""Networks by name: "nature" of Mnih et al. 2015 (DQN); "small" for images of a few cells, each of which matters."""
SMALLEST = {"nature": 36, "small": 1}
"""Minimum height and width for each network."""


class Cnn(nn.Module):
    """Computes features of an image.

    Args:
        picture: channels, height and width of the image, at least `SMALLEST`.
        kind: a name in `CNNS`.
        activation: a name in ``ACTIVATIONS``, applied after each layer.
        pixel_scale: pixels are divided by this.
        generator: random generator of the orthogonal initialisation.
    """

    def __init__(
        self,
        picture: tuple[int, int, int],
        kind: str,
        activation: str,
        pixel_scale: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self._activation, self._scale = ACTIVATIONS[activation], pixel_scale
        channels, height, width = picture
        layers = []
        for spec in CNNS[kind]:
            layer = nn.Conv2d(channels, spec.channels, spec.kernel, spec.stride, spec.padding)
            nn.init.orthogonal_(layer.weight, self._activation.gain, generator=generator)
            nn.init.zeros_(layer.get_parameter("bias"))
            layers.append(layer)
            channels = spec.channels
            height, width = ((n + 2 * spec.padding - spec.kernel) // spec.stride + 1 for n in (height, width))
        assert height > 0, (picture, kind)
        assert width > 0, (picture, kind)
        self.layers = nn.ModuleList(layers)
        self.features = channels * height * width

    def forward(self, picture: Tensor) -> Tensor:
        """Return features [..., features] of bytes [..., C, H, W]."""
        x = picture.flatten(0, -4).to(self.layers[0].get_parameter("weight").dtype) / self._scale
        x = x.contiguous(memory_format=torch.channels_last)  # faster for few channels, forward and backward
        for layer in self.layers:
            x = self._activation.apply(layer(x))
        return x.reshape(*picture.shape[:-3], self.features)
