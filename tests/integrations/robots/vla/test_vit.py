"""The vision transformers compute what those of libraries do with the same weights."""

import pytest
import torch
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, SiglipVisionConfig, SiglipVisionModel

from tests.integrations.robots.vla.published import DINO, HEADS, PATCH, SHAPES, SIGLIP, SIZE, vit_weights
from tether.integrations.robots.vla.vit import Vit, VitSpec


def make(timm_id, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = vit_weights(
        timm_id, 3, lambda *shape: 0.25 * torch.randn(shape, generator=generator, dtype=torch.float64)
    )
    width, mlp = SHAPES[timm_id]
    spec = VitSpec(
        timm_id, SIZE, PATCH, width, 2, mlp, registers=4 * (timm_id == DINO), class_token=timm_id == DINO,
        layer_scale=timm_id == DINO, mean=(0.5,) * 3, std=(0.5,) * 3,
    )  # fmt: skip
    vit = Vit(spec).double()
    missing, _ = vit.load_state_dict(weights, strict=False)
    assert not missing
    return vit, weights


def picture():
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def transplant(weights, model, block, attention, layers, others):
    """Put weights into a model of transformers', whose query, key and value are layers of their own."""
    width, found = weights["patch_embed.proj.bias"].shape[0], dict(others)
    for number in range(2):
        start, own = f"{block}.{number}", f"blocks.{number}"
        for kind in ("weight", "bias"):
            found |= {f"{start}.{theirs}.{kind}": weights[f"{own}.{ours}.{kind}"] for theirs, ours in layers.items()}
            parts = weights[f"{own}.attn.qkv.{kind}"].split(width)
            names = (f"{start}.{attention}.{part}_proj.{kind}" for part in "qkv")
            found |= dict(zip(names, parts, strict=True))
        if f"{own}.ls1.scale_factor" in weights:
            scales = {one: weights[f"{own}.ls{one}.scale_factor"] for one in (1, 2)}
            found |= {f"{start}.layer_scale{one}.lambda1": value for one, value in scales.items()}
    own = model.state_dict()
    for name, value in found.items():
        (match,) = [key for key in own if key == name or key.endswith(f".{name}")]
        own[match].copy_(value)
    assert sum("encoder." in name for name in found) == sum("encoder." in name for name in own)


@torch.no_grad()
def test_dinov2_is_transformers():
    vit, weights = make(DINO)
    width, mlp = SHAPES[DINO]
    config = Dinov2WithRegistersConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=HEADS, mlp_ratio=mlp // width, image_size=SIZE,
        patch_size=PATCH, num_register_tokens=4, layer_norm_eps=1e-6,
    )  # fmt: skip
    model = Dinov2WithRegistersModel(config).double().eval()
    layers = {name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")} | {"attention.o_proj": "attn.proj"}
    others = {
        "embeddings.patch_embeddings.projection.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embeddings.projection.bias": weights["patch_embed.proj.bias"],
        "embeddings.cls_token": weights["cls_token"],
        "embeddings.register_tokens": weights["reg_token"],
        # timm adds no position to the class token; transformers has one for it, here zero.
        "embeddings.position_embeddings": torch.cat([torch.zeros(1, 1, width), weights["pos_embed"]], dim=1),
    }
    transplant(weights, model, "encoder.layer", "attention", layers, others)
    expected = model(picture(), output_hidden_states=True).hidden_states[-1][:, 5:]
    torch.testing.assert_close(vit(picture()), expected)


@torch.no_grad()
def test_siglip_is_transformers():
    vit, weights = make(SIGLIP)
    width, mlp = SHAPES[SIGLIP]
    config = SiglipVisionConfig(
        hidden_size=width, intermediate_size=mlp, num_hidden_layers=2, num_attention_heads=HEADS, image_size=SIZE,
        patch_size=PATCH, layer_norm_eps=1e-6, hidden_act="gelu", vision_use_head=False,
    )  # fmt: skip
    model = SiglipVisionModel(config).double().eval()
    layers = {
        "layer_norm1": "norm1", "layer_norm2": "norm2", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
        "self_attn.out_proj": "attn.proj",
    }  # fmt: skip
    others = {
        "embeddings.patch_embedding.weight": weights["patch_embed.proj.weight"],
        "embeddings.patch_embedding.bias": weights["patch_embed.proj.bias"],
        "embeddings.position_embedding.weight": weights["pos_embed"][0],
    }
    transplant(weights, model, "encoder.layers", "self_attn", layers, others)
    expected = model(picture(), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(vit(picture()), expected)


@pytest.mark.parametrize("timm_id", [DINO, SIGLIP])
@torch.no_grad()
def test_they_are_timms(timm_id):
    """In lerobot's environment, which has a torchvision: PyPI's does not load beside a torch for CPUs."""
    timm = pytest.importorskip("timm", reason="needs timm and a torchvision: bash scripts/test_lerobot.sh")
    vit, weights = make(timm_id)
    width, mlp = SHAPES[timm_id]
    model = timm.create_model(
        timm_id, pretrained=False, num_classes=0, img_size=SIZE, embed_dim=width, depth=3, mlp_ratio=mlp / width
    )
    named = {name.replace("scale_factor", "gamma"): value for name, value in weights.items()}
    missing, unknown = model.double().load_state_dict(named, strict=False)
    assert not unknown
    assert all(name.startswith("attn_pool.") for name in missing)
    (expected,) = model.eval().get_intermediate_layers(picture(), n={1})
    torch.testing.assert_close(vit(picture()), expected)
