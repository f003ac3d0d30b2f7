"""The networks of a small vision-language-action policy, trained from scratch.

Its transformer reads, before the action tokens (`tether.integrations.robots.vla.decoder`)::

    [begin] [picture tokens] [numbers] [text bytes] [end]
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tether.control.policies.spec import NUMBERS, PICTURE, TEXT, FlatRow, ObservationBatch, Observations, Pictures
from tether.integrations.robots.vla.decoder import ActionDecoder, EncodedPrompt
from tether.integrations.robots.vla.spec import BEGIN, END, FIRST_BYTE, VlaSpec

CHANNELS = (32, 64, 128)
"""Channels of the encoder's first layers; later layers have as many as the last one."""
GRID = 4
"""Maximum number of image tokens per side."""
VALUE_SIZES = (512, 128)


class PictureEncoder(nn.Module):
    """Encodes a uint8 image as tokens: convolutions halve its size until it is at most `GRID` wide and high.

    The convolutions also read pixel coordinates (Liu et al. 2018, "CoordConv"), since a policy must know where things
    are.

    Args:
        picture: channels, height and width of the image.
        width: width of a token.
    """

    def __init__(self, picture: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, *sides = picture
        halvings = max(1, math.ceil(math.log2(max(sides) / GRID)))
        sizes = [channels + 2, *(CHANNELS[min(i, len(CHANNELS) - 1)] for i in range(halvings))]
        self.layers = nn.ModuleList([nn.Conv2d(i, o, 3, stride=2, padding=1) for i, o in pairwise(sizes)])
        self.to_tokens = nn.Linear(sizes[-1], width)
        self.positions = nn.Parameter(0.02 * torch.randn(math.prod(-(-side // 2**halvings) for side in sides), width))

    def forward(self, picture: Tensor) -> Tensor:
        """Encode bytes [B, C, H, W] as tokens [B, P, width]."""
        x = picture.to(self.positions.dtype) / 127.5 - 1
        rows, columns = (torch.linspace(-1, 1, side, dtype=x.dtype, device=x.device) for side in x.shape[2:])
        coordinates = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
        x = torch.cat([x, coordinates.expand(len(x), -1, -1, -1)], dim=1)
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return self.to_tokens(x.flatten(2).transpose(1, 2)) + self.positions


class ValueHead(nn.Module):
    """Computes values from the hidden state at the end of the prompt, with RLinf's sizes and initialisation.

    Args:
        hidden_dim: width of the hidden state.
        values: V.
    """

    def __init__(self, hidden_dim: int, values: int) -> None:
        super().__init__()
        hidden = [nn.Linear(i, o) for i, o in pairwise((hidden_dim, *VALUE_SIZES))]
        for layer in hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        last = nn.Linear(VALUE_SIZES[-1], values, bias=False)
        nn.init.normal_(last.weight, std=0.02)
        self.layers = nn.Sequential(hidden[0], nn.GELU(), hidden[1], nn.GELU(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [B, V] of hidden states [B, hidden_dim]."""
        return self.layers(hidden.to(next(self.parameters()).dtype))


class VlaModel(ActionDecoder):
    """Image encoder, embeddings and transformer, initialised from torch's global generator.

    Args:
        spec: the spec of the policy.
    """

    def __init__(self, spec: VlaSpec) -> None:
        super().__init__(spec)
        width = spec.hidden_dim
        config = LlamaConfig(
            vocab_size=spec.vocab_size,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=spec.num_layers,
            num_attention_heads=spec.num_heads,
            num_key_value_heads=spec.num_heads,
            initializer_range=width**-0.5,  # the usual 0.02 is for widths of thousands
            bos_token_id=BEGIN,
            eos_token_id=END,
            pad_token_id=None,
        )
        self.language = LlamaForCausalLM(config)
        self.row = FlatRow(spec.layout, without=[*spec.pictures, spec.text or ""])
        self.pictures = Pictures(spec.layout, spec.pictures) if spec.pictures else None
        self.encoder = None if self.pictures is None else PictureEncoder(self.pictures.shape, width)
        self.numbers = nn.Linear(self.row.width, width) if self.row.width else None
        # Initialised to zero, as in RLinf's OpenVLA-OFT, which does not train them.
        oft = spec.model_type == "openvla_oft"
        self.placeholders = nn.Parameter(torch.zeros(spec.action_tokens - 1, width)) if oft else None

    def inputs(self, obs: ObservationBatch) -> TensorDict:
        numbers = self.row(obs)
        tensors = {NUMBERS: numbers}
        if self.pictures is not None:
            tensors[PICTURE] = self.pictures(obs)
        if self.spec.text is not None:
            tensors[TEXT] = obs[self.spec.text]
        return TensorDict(tensors, batch_size=numbers.shape[:-1])

    def prompt(self, obs: Observations) -> EncodedPrompt:
        assert isinstance(obs, TensorDict)
        embed = self.language.get_input_embeddings()
        marks = embed(torch.tensor([[BEGIN, END]], device=obs[NUMBERS].device)).expand(len(obs), -1, -1)
        embedded = [marks[:, :1]]
        if self.encoder is not None:
            embedded.append(self.encoder(obs[PICTURE]))
        if self.numbers is not None:
            embedded.append(self.numbers(obs[NUMBERS].to(self.numbers.weight.dtype))[:, None])
        if self.spec.text is not None:
            embedded.append(embed(obs[TEXT].long() + FIRST_BYTE))
        return EncodedPrompt(torch.cat([*embedded, marks[:, 1:]], dim=1))
