"""The network of published OpenVLA and OpenVLA-OFT policies (Kim et al. 2024, 2025).

Its transformer reads, before the action tokens (`tether.integrations.robots.vla.decoder`)::

    [begin] [patches of the picture] [tokens of the prompt]

Two vision transformers read the image, each with its own normalisation. Their tokens are concatenated along the width,
and an MLP projects them to the width of the transformer, which is Llama 2. Prompts are padded to one length between the
patches and their first token; nothing attends to the padding, and it is not counted in positions.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from tether.control.policies.spec import PICTURE, ObservationBatch, Observations, Pictures
from tether.integrations.robots.vla.decoder import ActionDecoder, EncodedPrompt
from tether.integrations.robots.vla.prompts import PADDING, Prompts
from tether.integrations.robots.vla.spec import Network, Resize, VlaSpec
from tether.integrations.robots.vla.vit import Vit, VitSpec
from tether.observations import decode_text

CROPPED = 0.9
"""Fraction of an image's area that a centre crop keeps, for policies fine-tuned on random crops of this size."""
BEGIN = 1
"""Llama's id of the begin token, the default if a configuration has none."""
TOKENS = "tokens"
FEATURIZERS = ("featurizer", "fused_featurizer")


class PublishedModel(ActionDecoder):
    """Vision transformers, projector and Llama, with uninitialised weights.

    Args:
        spec: the spec of the policy.
        network: the sizes of its networks.

    Raises:
        ValueError: the tokenizer cannot be loaded.
    """

    def __init__(self, spec: VlaSpec, network: Network) -> None:
        super().__init__(spec)
        self._network = network
        self._pictures = Pictures(spec.layout, spec.pictures)
        self._prompts = Prompts(network.tokenizer, network.prompt_length)
        self.language, self.vision_backbone, self.projector = make_networks(network)
        self._begin = BEGIN if self.language.config.bos_token_id is None else self.language.config.bos_token_id
        zeros = torch.zeros(spec.action_tokens - 1, spec.hidden_dim) if spec.model_type == "openvla_oft" else None
        self.register_buffer("placeholders", zeros, persistent=False)

    def inputs(self, obs: ObservationBatch) -> TensorDict:
        """Return uint8 images [..., channels, height, width] and token ids of the prompt [..., L]."""
        pictures = self._pictures(obs)
        assert self.spec.text is not None
        codes = obs[self.spec.text]
        texts, which = np.unique(codes.flatten(0, -2).cpu().numpy(), axis=0, return_inverse=True)
        ids = self._prompts([decode_text(text) for text in texts])[torch.from_numpy(which.reshape(-1))]
        tokens = ids.unflatten(0, codes.shape[:-1]).to(pictures.device)
        return TensorDict({PICTURE: pictures, TOKENS: tokens}, batch_size=codes.shape[:-1])

    def prompt(self, obs: Observations) -> EncodedPrompt:
        assert isinstance(obs, TensorDict)
        embed, tokens = self.language.get_input_embeddings(), obs[TOKENS]
        begin = torch.full_like(tokens[:, :1], self._begin)
        patches = [self._patches(picture) for picture in obs[PICTURE].split(3, dim=1)]
        embedded = torch.cat([embed(begin), *patches, embed(tokens.clamp(min=0))], dim=1)
        mask = nn.functional.pad(tokens != PADDING, (embedded.shape[1] - tokens.shape[1], 0), value=True)
        return EncodedPrompt(embedded, mask)

    def _patches(self, picture: Tensor) -> Tensor:
        """Encode bytes [B, 3, height, width] as patches [B, P, E]."""
        dtype = self.language.dtype
        picture = picture.to(torch.promote_types(dtype, torch.float32))  # bfloat16 is too coarse for positions
        if self.spec.center_crop:
            picture = center_crop(picture)
        features = [
            vit(normalized(picture, shape, self._network.resize).to(dtype))
            for vit, shape in zip(self.vision_backbone.values(), self._network.vits, strict=True)
        ]
        projected: Tensor = self.projector(torch.cat(features, dim=2))
        return projected


def make_networks(network: Network) -> tuple[LlamaForCausalLM, nn.ModuleDict, nn.Sequential]:
    """Build transformer, vision transformers and projector, with uninitialised weights."""
    with no_init_weights():  # initialising 7 billion weights takes minutes
        language = LlamaForCausalLM(llama_config(network.text_config))
        vits = {name: Vit(vit) for name, vit in zip(FEATURIZERS, network.vits, strict=False)}
        width = sum(vit.width for vit in network.vits)
        return language, nn.ModuleDict(vits), _projector(width, language.config.hidden_size, len(vits))


def llama_config(text_config: Mapping[str, object]) -> LlamaConfig:
    """Return the transformer's configuration; missing fields are those of Llama 2 7B."""
    # A checkpoint stores lists as tuples, which the configuration rejects.
    config: LlamaConfig = LlamaConfig.from_dict(json.loads(json.dumps(dict(text_config))))
    return config


def _projector(width: int, out: int, vits: int) -> nn.Sequential:
    """Build OpenVLA's projector: two layers, and for two vision transformers a wider one before them."""
    widths = [width, out, out] if vits == 1 else [width, 4 * width, out, out]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(1, len(widths)):
        if number > 1:
            layers[f"act_fn{number - 1}"] = nn.GELU()
        layers[f"fc{number}"] = nn.Linear(widths[number - 1], widths[number])
    return nn.Sequential(layers)


def center_crop(picture: Tensor) -> Tensor:
    """Crop the centre of images [B, 3, H, W], `CROPPED` of their area, and resize it to the original size, rounded to
    bytes.

    Corners of the crop are mapped to corners of the result, as in TensorFlow's `crop_and_resize`, with which OpenVLA is
    evaluated.
    """
    side = math.sqrt(CROPPED)
    box = torch.tensor([[side, 0.0, 0.0], [0.0, side, 0.0]], dtype=picture.dtype, device=picture.device)
    grid = nn.functional.affine_grid(box.expand(len(picture), 2, 3), list(picture.shape), align_corners=True)
    return nn.functional.grid_sample(picture, grid, align_corners=True).clamp(0, 255).round()


def normalized(picture: Tensor, vit: VitSpec, resize: Resize) -> Tensor:
    """Convert uint8 images [B, 3, height, width] to the normalised colours [B, 3, size, size] of a vision
    transformer."""
    mean, std = (picture.new_tensor(column)[:, None, None] for column in (vit.mean, vit.std))
    if resize == "letterbox":
        picture = letterbox(picture, (mean * 255).int().to(picture))
    size = (vit.image_size, vit.image_size)
    if picture.shape[2:] != size:
        picture = nn.functional.interpolate(picture, size, mode="bicubic", antialias=True).clamp(0, 255).round()
    return (picture / 255 - mean) / std


def letterbox(picture: Tensor, colour: Tensor) -> Tensor:
    """Pad images [B, 3, H, W] to squares, up to one pixel, with a border of a colour [3, 1, 1]."""
    height, width = picture.shape[2:]
    vertical, horizontal = ((max(height, width) - side) // 2 for side in (height, width))
    return nn.functional.pad(picture - colour, (horizontal, horizontal, vertical, vertical)) + colour
