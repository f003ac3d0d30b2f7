"""The vision transformers of published OpenVLA policies, with the weight names of their files.

They are timm's (`vit_large_patch14_reg4_dinov2`: Oquab et al. 2023, "DINOv2"; Darcet et al. 2023, "Vision Transformers
Need Registers"; `vit_so400m_patch14_siglip`: Zhai et al. 2023, "SigLIP"). OpenVLA reads the patches after the last
block but one, so the last block is not built. LayerScale's weights are called `scale_factor`, as in these files.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HEADS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": 16,
    "vit_so400m_patch14_siglip_224": 16,
    "vit_so400m_patch14_siglip_384": 16,
}
"""timm's id of a network -> number of attention heads. Other sizes follow from the shapes of the weights."""
EPS = 1e-6


@dataclass(frozen=True)
class VitSpec:
    """Sizes of a vision transformer, and of the images that it expects."""

    timm_id: str
    """A key of `HEADS`."""
    image_size: int
    """Height and width of an image."""
    patch: int
    """Height and width of a patch."""
    width: int
    depth: int
    """Number of blocks that are built: all but the last."""
    mlp_width: int
    registers: int
    """Number of register tokens."""
    class_token: bool
    layer_scale: bool
    mean: tuple[float, float, float]
    """Mean of the colours, which are in [0, 1]."""
    std: tuple[float, float, float]

    @property
    def patches(self) -> int:
        """Return P, the number of patches of an image."""
        return (self.image_size // self.patch) ** 2


class Scale(nn.Module):
    """LayerScale: one factor per column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scale x [..., width]."""
        return x * self.scale_factor


class Attention(nn.Module):
    """Attention of all tokens to all tokens; `qkv` is one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output of x [B, S, width]."""
        query, key, value = self.qkv(x).unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return mixed


class VitBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        width = spec.width
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=EPS) for _ in range(2))
        self.attn = Attention(width, HEADS[spec.timm_id])
        layers = OrderedDict(fc1=nn.Linear(width, spec.mlp_width), act=nn.GELU(), fc2=nn.Linear(spec.mlp_width, width))
        self.mlp = nn.Sequential(layers)
        self.ls1, self.ls2 = (Scale(width) if spec.layer_scale else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [B, S, width]."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class Vit(nn.Module):
    """A vision transformer without its last block.

    Args:
        spec: the spec.
    """

    def __init__(self, spec: VitSpec) -> None:
        super().__init__()
        width = spec.width
        convolution = nn.Conv2d(3, width, spec.patch, stride=spec.patch)
        self.patch_embed = nn.Sequential(OrderedDict(proj=convolution))
        self.pos_embed = nn.Parameter(torch.zeros(1, spec.patches, width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width)) if spec.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, spec.registers, width)) if spec.registers else None
        self.blocks = nn.Sequential(*(VitBlock(spec) for _ in range(spec.depth)))

    def forward(self, picture: Tensor) -> Tensor:
        """Encode normalised colours [B, 3, size, size] as patches [B, P, width]."""
        x = self.patch_embed(picture).flatten(2).transpose(1, 2) + self.pos_embed
        before = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        patches: Tensor = self.blocks(torch.cat([*before, x], dim=1))[:, -x.shape[1] :]
        return patches
