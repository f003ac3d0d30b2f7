"""tether's networks in front of an LSTM or a head, as features extractors of Stable-Baselines3."""

from __future__ import annotations

import torch
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn


class Features(BaseFeaturesExtractor):
    """Two convolutions and a hidden layer of 128 over MiniGrid's pictures, which actor and critic share."""

    def __init__(self, observation_space, pixel_scale: float) -> None:  # noqa: ANN001  # gymnasium's Dict
        super().__init__(observation_space, features_dim=128)
        self._scale = pixel_scale
        channels, height, width = observation_space["image"].shape  # VecTransposeImage puts channels first
        self.cnn = nn.Sequential(
            nn.Conv2d(channels, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        sees = 32 * ((height + 1) // 2) * ((width + 1) // 2) + int(observation_space["direction"].n)
        self.hidden = nn.Sequential(nn.Linear(sees, 128), nn.ReLU())

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        """Picture [B, C, H, W] and one-hot direction [B, 4] -> features [B, 128]."""
        seen = self.cnn(observations["image"].float() / self._scale)
        return self.hidden(torch.cat([seen, observations["direction"].flatten(1)], dim=1))


class Hidden(BaseFeaturesExtractor):
    """Two hidden layers of 64 over a row of numbers."""

    def __init__(self, observation_space) -> None:  # noqa: ANN001  # gymnasium's Box
        super().__init__(observation_space, features_dim=64)
        (numbers,) = observation_space.shape
        self.hidden = nn.Sequential(nn.Linear(numbers, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, observations: Tensor) -> Tensor:
        """[B, numbers] -> [B, 64]."""
        return self.hidden(observations)
