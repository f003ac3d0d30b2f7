"""Tiny folders in the layout of published OpenVLA policies, and a plain reimplementation of what they compute.

Weights are drawn under the published names and never pass through tether.
"""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

SIZE, PATCH, FILLED, REAL = 28, 14, 664, 600
LETTERS = "▁abcdefghijklmnopqrstuvwxyz:?IWO\n"
BEGIN, FIRST_LETTER = 1, 3 + 256
DINO, SIGLIP = "vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"
SHAPES = {DINO: (32, 64), SIGLIP: (48, 40)}
"""timm's id -> width, and width of the perceptron."""
HEADS = 16
TEXT = {
    "model_type": "llama", "vocab_size": FILLED, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "torch_dtype": "bfloat16", "pad_token_id": REAL, "rms_norm_eps": 1e-6,
}  # fmt: skip
COLOURS = {
    "means": [[0.484375, 0.455078125, 0.40625], [0.5] * 3],
    "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5] * 3],
}
STATISTICS = {
    "two": {"action": {"q01": [-0.5, 0.0], "q99": [0.5, 4.0], "mask": [True, False]}},
    "seven": {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}},
}
CONFIG = {
    "model_type": "openvla", "vision_backbone_id": "dinosiglip-vit-so-224px", "use_fused_vision_backbone": True,
    "timm_model_ids": [DINO, SIGLIP], "timm_override_act_layers": [None, None], "image_sizes": [SIZE, SIZE],
    "image_resize_strategy": "resize-naive", "text_config": TEXT, "pad_to_multiple_of": FILLED - REAL,
    "n_action_bins": 256, "norm_stats": STATISTICS,
}  # fmt: skip


def vit_weights(timm_id, depth, draw):
    width, mlp = SHAPES[timm_id]
    weights = {
        "patch_embed.proj.weight": draw(width, 3, PATCH, PATCH), "patch_embed.proj.bias": draw(width),
        "pos_embed": draw(1, (SIZE // PATCH) ** 2, width), "norm.weight": draw(width), "norm.bias": draw(width),
    }  # fmt: skip
    if timm_id == DINO:
        weights |= {"cls_token": draw(1, 1, width), "reg_token": draw(1, 4, width)}
    else:
        weights |= {"attn_pool.latent": draw(1, 1, width), "attn_pool.kv.weight": draw(2 * width, width)}
    for number in range(depth):
        layers = {
            "attn.qkv": (3 * width, width),
            "attn.proj": (width, width),
            "mlp.fc1": (mlp, width),
            "mlp.fc2": (width, mlp),
        }
        for layer, shape in layers.items():
            weights |= {
                f"blocks.{number}.{layer}.weight": draw(*shape),
                f"blocks.{number}.{layer}.bias": draw(shape[0]),
            }
        for norm in ("norm1", "norm2"):
            weights |= {f"blocks.{number}.{norm}.weight": 1 + draw(width), f"blocks.{number}.{norm}.bias": draw(width)}
        if timm_id == DINO:
            weights |= {f"blocks.{number}.ls{one}.scale_factor": 1 + draw(width) for one in (1, 2)}
    return weights


def weights_of(config, seed=0, dtype=torch.float32):
    """All weights of a policy under their published names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (0.25 * torch.randn(shape, generator=generator)).to(dtype)

    weights = {}
    for name, timm_id in zip(("featurizer", "fused_featurizer"), config["timm_model_ids"], strict=False):
        found = vit_weights(timm_id, 3, draw)
        weights |= {f"vision_backbone.{name}.{key}": value for key, value in found.items()}
    width, out = sum(SHAPES[timm_id][0] for timm_id in config["timm_model_ids"]), TEXT["hidden_size"]
    widths = [width, 4 * width, out, out] if len(config["timm_model_ids"]) == 2 else [width, out, out]
    for number in range(1, len(widths)):
        weights[f"projector.fc{number}.weight"] = draw(widths[number], widths[number - 1])
        weights[f"projector.fc{number}.bias"] = draw(widths[number])
    language = LlamaForCausalLM(LlamaConfig(**TEXT))
    return weights | {f"language_model.{name}": draw(*value.shape) for name, value in language.state_dict().items()}


def write_tokenizer(file):
    """Letters and bytes as Llama's tokenizer has them; a space is ▁, and one stands before each text."""
    vocabulary = {"<unk>": 0, "<s>": BEGIN, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocabulary |= {letter: FIRST_LETTER + number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", BEGIN)])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.save(str(file))


def write_folder(folder, seed=0, shards=2, dtype=torch.float32, **changes):
    """A policy in the published layout; returns its weights."""
    config = CONFIG | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    count = len(config["timm_model_ids"])
    (folder / "preprocessor_config.json").write_text(json.dumps({name: of[:count] for name, of in COLOURS.items()}))
    write_tokenizer(folder / "tokenizer.json")
    weights = weights_of(config, seed, dtype)
    names = sorted(weights)
    files = {name: f"model-{1 + number % shards:05}-of-{shards:05}.safetensors" for number, name in enumerate(names)}
    for file in sorted(set(files.values())):
        save_file({name: weights[name].clone() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return weights


# --- the same by hand ------------------------------------------------------------------------------------------------


def prompt_ids(task):
    """The tokens of the prompt of a task in small letters, with the token of the beginning and the one of the end."""
    text = f"▁In: What action should the robot take to {task}?\nOut:".replace(" ", "▁")
    return [BEGIN, *(FIRST_LETTER + LETTERS.index(letter) for letter in text), FIRST_LETTER]


def vit_patches(weights, prefix, timm_id, picture):
    """Patches [P, width] behind the last block but one, of normalised colours [3, size, size]."""
    get = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    side = SIZE // PATCH
    cells = [
        picture[:, PATCH * row : PATCH * (row + 1), PATCH * column : PATCH * (column + 1)].reshape(-1)
        for row in range(side)
        for column in range(side)
    ]
    x = torch.stack(cells) @ get["patch_embed.proj.weight"].flatten(1).T + get["patch_embed.proj.bias"]
    x = x + get["pos_embed"][0]
    if timm_id == DINO:
        x = torch.cat([get["cls_token"][0], get["reg_token"][0], x])
    width = x.shape[1]

    def linear(name, y):
        return y @ get[f"{name}.weight"].T + get[f"{name}.bias"]

    def norm(name, y):
        return functional.layer_norm(y, (width,), get[f"{name}.weight"], get[f"{name}.bias"], 1e-6)

    for block in ("blocks.0", "blocks.1"):
        query, key, value = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x)).split(width, dim=1)
        heads = []
        for part in range(HEADS):
            columns = slice(part * width // HEADS, (part + 1) * width // HEADS)
            scores = query[:, columns] @ key[:, columns].T / (width / HEADS) ** 0.5
            heads.append(scores.softmax(-1) @ value[:, columns])
        mixed = linear(f"{block}.attn.proj", torch.cat(heads, dim=1))
        x = x + mixed * get.get(f"{block}.ls1.scale_factor", 1)
        hidden = functional.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x)))
        x = x + linear(f"{block}.mlp.fc2", hidden) * get.get(f"{block}.ls2.scale_factor", 1)
    return x[-side * side :]


def prompt_embeddings(weights, language, pictures, task, vits=(DINO, SIGLIP)):
    """Begin, patches of bytes [3, size, size] each, and the prompt: [S, E]."""
    embed = language.get_input_embeddings()
    ids = torch.tensor(prompt_ids(task))
    parts = [embed(ids[:1])]
    for picture in pictures:
        seen = []
        for name, timm_id, mean, std in zip(
            ("featurizer", "fused_featurizer"), vits, COLOURS["means"], COLOURS["stds"], strict=False
        ):
            colours = [(picture[c].double() / 255 - mean[c]) / std[c] for c in range(3)]
            seen.append(vit_patches(weights, f"vision_backbone.{name}.", timm_id, torch.stack(colours)))
        x = torch.cat(seen, dim=1)
        layers = sorted({name.split(".")[1] for name in weights if name.startswith("projector.")})
        for number, layer in enumerate(layers):
            x = functional.gelu(x) if number else x
            x = x @ weights[f"projector.{layer}.weight"].T + weights[f"projector.{layer}.bias"]
        parts.append(x)
    return torch.cat([*parts, embed(ids[1:])])


def language_of(weights):
    """transformers' own class with the weights of a folder."""
    language = LlamaForCausalLM(LlamaConfig(**TEXT)).double()
    prefix = "language_model."
    language.load_state_dict({n.removeprefix(prefix): v.double() for n, v in weights.items() if n.startswith(prefix)})
    return language.eval()
