"""Published OpenVLA policies: folders with ``config.json``, safetensors, and the files of image processor and
tokenizer.

The names of the weights are those of its authors' classes: ``vision_backbone.featurizer``, ``.fused_featurizer``,
``projector`` and ``language_model``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tether.integrations.robots.vla.policy import VlaPolicy, under_adapter
from tether.integrations.robots.vla.prompts import FILE as TOKENIZER
from tether.integrations.robots.vla.published import FEATURIZERS, llama_config, make_networks
from tether.integrations.robots.vla.spec import ACTION_BINS, Network
from tether.integrations.robots.vla.vit import HEADS, VitSpec
from tether.runtime.disk import COPY_AGAIN, follow_umask, read_json
from tether.types import JsonObject

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICTURES, STATISTICS = "preprocessor_config.json", "dataset_statistics.json"
KEY = "actor_rollout_ref.model.path"
LANGUAGE = "language."
"""Prefix of the language model's weights in the policy; files have ``language_model.`` instead."""
OWN_STATISTICS = "tether"
"""Dataset name of the action statistics in policies that tether writes."""
HEAD_FILES = ("action_head--*", "noisy_action_projector--*", "proprio_projector--*", "vision_backbone--*")
"""Files of modules that OpenVLA-OFT's authors add to a policy."""
DEFAULT_BINS, DEFAULT_FILLING = ACTION_BINS, 64
Ranges = tuple[tuple[float, ...], tuple[float, ...]]
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Published:
    """The description of a published policy."""

    folder: Path
    network: Network
    statistics: JsonObject
    """``norm_stats``: dataset -> statistics of its actions."""

    @property
    def fields(self) -> dict[str, object]:
        """Return the fields of `VlaSpec` that the published policy determines."""
        config = llama_config(self.network.text_config)
        return {
            "network": self.network,
            "hidden_dim": config.hidden_size,
            "num_layers": config.num_hidden_layers,
            "num_heads": config.num_attention_heads,
        }


def is_published(folder: Path) -> bool:
    """Whether the folder has a model in transformers' layout, which may be another model than OpenVLA."""
    return (folder / CONFIG).is_file()


def read_published(folder: Path, prompt_length: int) -> Published:
    """Read the description of the policy in a folder, without its weights.

    Args:
        folder: folder of the policy.
        prompt_length: length L of its prompts.

    Raises:
        ValueError: it is a different kind of model, a file or weights are missing, or a setting is not supported; the
            message names it.
    """
    config = _json(folder / CONFIG)
    kind = config.get("model_type")
    if kind != "openvla":
        raise ValueError(f"{KEY}={folder}: {CONFIG} is of model_type {kind}; only openvla can be loaded")
    for name in (PICTURES, TOKENIZER):
        if not (folder / name).is_file():
            raise ValueError(f"{KEY}={folder}: {name} is missing. Put it there, as it is in the published folder.")
    _refuse_unsupported(folder, config)
    shapes = _shapes(folder)
    all_fields = config.get("text_config") or {}
    text_config = {name: value for name, value in all_fields.items() if name not in ("torch_dtype", "dtype")}
    network = Network(
        vits=_vits(folder, config, shapes),
        text_config=text_config,
        vocab_size=llama_config(text_config).vocab_size - config.get("pad_to_multiple_of", DEFAULT_FILLING),
        prompt_length=prompt_length,
        tokenizer=str(folder.resolve()),
        resize=config.get("image_resize_strategy", "letterbox"),
    )
    statistics = config.get("norm_stats") or {}
    if (folder / STATISTICS).is_file():
        statistics = statistics | _json(folder / STATISTICS)
    published = Published(folder, network, statistics)
    _check_weights(published, shapes)
    return published


def ranges(published: Published, unnorm_key: str | None) -> Ranges:
    """Return the actions [D] at the lower end of the first bin and at the upper end of the last bin.

    They are the quantiles of the dataset that the key names, or -1 and 1 for columns that its mask excludes from
    normalisation. RLinf's files omit the suffix ``_no_noops`` of datasets, so both names are looked up.

    Raises:
        ValueError: there is no such dataset, or there are several and no key; the message names the available ones.
    """
    datasets = published.statistics
    where = f"policy.unnorm_key={unnorm_key or 'null'}"
    name = next(iter(datasets)) if unnorm_key is None and len(datasets) == 1 else str(unnorm_key)
    name = f"{name}_no_noops" if name not in datasets and f"{name}_no_noops" in datasets else name
    if name not in datasets:
        advice = (
            f"Name one of {', '.join(sorted(datasets))}."
            if datasets
            else "Imitate episodes (tether bc): theirs are taken."
        )
        if unnorm_key is None and datasets:
            raise ValueError(
                f"policy.unnorm_key: missing, and {published.folder} has statistics of several datasets. {advice}"
            )
        raise ValueError(f"{where}: {published.folder} has no statistics of such actions. {advice}")
    actions = datasets[name].get("action") or {}
    if not {"q01", "q99"} <= actions.keys():
        raise ValueError(f"{where}: {published.folder} has no q01 and q99 of the actions of {name}")
    normalised = actions.get("mask") or [True] * len(actions["q01"])
    columns = zip(actions["q01"], actions["q99"], normalised, strict=True)
    low, high = zip(
        *((float(first), float(last)) if scaled else (-1.0, 1.0) for first, last, scaled in columns), strict=True
    )
    return low, high


@torch.no_grad()
def load_weights(policy: VlaPolicy, folder: Path) -> None:
    """Load the weights of a folder, which `read_published` has checked, into the network; the critic is unchanged."""
    names = policy.model.state_dict().keys()
    for shard in _shards(folder):
        weights = {_own(name): value for name, value in load_file(folder / shard).items()}
        loaded = {name for name in weights if name in names or under_adapter(name) in names}
        policy.load_plain({f"model.{name}": weights[name] for name in loaded})


def write_published(policy: VlaPolicy, source: Path, folder: Path) -> None:
    """Write a policy in the published layout, with the statistics of its actions as dataset `OWN_STATISTICS`.

    Args:
        policy: a policy with a published network; LoRA adapters are merged, the critic is omitted.
        source: the folder that the policy was loaded from, whose other files and unused weights are copied; weights
            keep their dtypes.
        folder: the folder to create.
    """
    ignored = shutil.ignore_patterns("*.safetensors", "*.bin", ".*")
    shutil.copytree(source, folder, ignore=ignored, copy_function=shutil.copyfile)  # permissions follow the umask
    actions = {"q01": policy.spec.low, "q99": policy.spec.high, "mask": [True] * policy.spec.action_width}
    statistics = _json(source / STATISTICS) if (source / STATISTICS).is_file() else {}
    (folder / STATISTICS).write_text(json.dumps(statistics | {OWN_STATISTICS: {"action": actions}}, indent=2))
    weights = {name.removeprefix("model."): value for name, value in policy.plain_state().items()}
    for shard in _shards(source):
        old = load_file(source / shard)
        new = {name: weights.get(_own(name), value).to(value.dtype).contiguous() for name, value in old.items()}
        save_file(new, folder / shard, metadata={"format": "pt"})
    follow_umask(folder, like=folder / STATISTICS)


def _json(file: Path) -> JsonObject:
    return read_json(file, dict, COPY_AGAIN)


def _refuse_unsupported(folder: Path, config: JsonObject) -> None:
    language = (config.get("text_config") or {}).get("model_type", "llama")
    pictures = _json(folder / PICTURES)
    resize = config.get("image_resize_strategy", "letterbox")
    unsupported = (
        (CONFIG, "text_config.model_type", language, ("llama",)),
        (CONFIG, "n_action_bins", config.get("n_action_bins", DEFAULT_BINS), (DEFAULT_BINS,)),
        (CONFIG, "image_resize_strategy", resize, ("resize-naive", "letterbox")),
        (PICTURES, "image_resize_strategy", pictures.get("image_resize_strategy", resize), (resize,)),
        *((CONFIG, "timm_model_ids", name, tuple(HEADS)) for name in config.get("timm_model_ids") or (None,)),
        *((PICTURES, "interpolations", name, ("bicubic",)) for name in pictures.get("interpolations") or ()),
    )
    for where, name, value, supported in unsupported:
        if value not in supported:
            allowed = ", ".join(map(str, supported))
            raise ValueError(f"{KEY}={folder}: {where} has {name}={value}; supported: {allowed}")
    for pattern in HEAD_FILES:
        for file in folder.glob(pattern):
            raise ValueError(
                f"{KEY}={folder}: {file.name} is a part that is not supported (heads of continuous actions, "
                "proprioception, FiLM). Give a policy of action tokens."
            )


def _shards(folder: Path) -> list[str]:
    """Return the names of the weight files.

    Raises:
        ValueError: there are none, or some are missing.
    """
    index = {"weight_map": {"": WEIGHTS}} if not (folder / INDEX).is_file() else _json(folder / INDEX)
    shards = sorted(set(index["weight_map"].values()))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise ValueError(f"{KEY}={folder}: {len(missing)} of {len(shards)} files of weights missing: {missing[0]}")
    return shards


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the weights by their names in the policy."""
    shapes: dict[str, list[int]] = {}
    for shard in _shards(folder):
        try:
            with safe_open(folder / shard, framework="pt") as file:
                shapes |= {_own(name): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ValueError(f"{folder / shard}: cannot be read ({error})") from error
        except Exception as error:
            raise ValueError(f"{folder / shard}: damaged, or not safetensors ({error})") from error
    return shapes


def _own(name: str) -> str:
    return name.replace("language_model.", LANGUAGE, 1)


def _vits(folder: Path, config: JsonObject, shapes: Mapping[str, list[int]]) -> tuple[VitSpec, ...]:
    ids, sizes = config["timm_model_ids"], config.get("image_sizes") or []
    colours = _json(folder / PICTURES)
    means, stds = colours.get("means") or [], colours.get("stds") or []
    counts = (len(ids), len(sizes), len(means), len(stds))
    if len(ids) > len(FEATURIZERS) or len(set(counts)) > 1:
        raise ValueError(
            f"{KEY}={folder}: timm_model_ids, image_sizes and {PICTURES}'s means and stds are of "
            f"{', '.join(map(str, counts))} networks"
        )
    return tuple(
        _vit(folder, shapes, f"vision_backbone.{name}", timm_id, size, (*mean,), (*std,))
        for name, timm_id, size, mean, std in zip(FEATURIZERS, ids, sizes, means, stds, strict=False)
    )


def _vit(
    folder: Path, shapes: Mapping[str, list[int]], prefix: str, timm_id: str, size: int, mean: Colour, std: Colour
) -> VitSpec:
    try:
        width, _, patch, _ = shapes[f"{prefix}.patch_embed.proj.weight"]
        mlp_width = shapes[f"{prefix}.blocks.0.mlp.fc1.weight"][0]
    except KeyError as error:
        raise ValueError(f"{KEY}={folder}: missing weights {error}: not those of {timm_id}") from error
    return VitSpec(
        timm_id=timm_id,
        image_size=size,
        patch=patch,
        width=width,
        depth=len(set(_blocks(shapes, prefix))) - 1,
        mlp_width=mlp_width,
        registers=shapes.get(f"{prefix}.reg_token", [1, 0])[1],
        class_token=f"{prefix}.cls_token" in shapes,
        layer_scale=f"{prefix}.blocks.0.ls1.scale_factor" in shapes,
        mean=mean,
        std=std,
    )


def _blocks(shapes: Mapping[str, list[int]], prefix: str) -> Iterator[int]:
    """Yield the block number of each weight of a network's blocks."""
    start = f"{prefix}.blocks."
    return (int(name.removeprefix(start).split(".")[0]) for name in shapes if name.startswith(start))


def _check_weights(published: Published, shapes: Mapping[str, list[int]]) -> None:
    """Check that the weights of a folder are those of its network.

    Raises:
        ValueError: some are missing, unknown, or have different shapes; the message names the first.
    """
    folder = published.folder
    with torch.device("meta"):
        modules = make_networks(published.network)
    names = (LANGUAGE, "vision_backbone.", "projector.")
    expected = {
        n + name: value for n, module in zip(names, modules, strict=True) for name, value in module.state_dict().items()
    }
    if missing := sorted(expected.keys() - shapes.keys()):
        raise ValueError(f"{KEY}={folder}: {len(missing)} weights missing, the first is {missing[0]}")
    for name, value in expected.items():
        if list(value.shape) != list(shapes[name]):
            raise ValueError(
                f"{KEY}={folder}: {name} has the shape {list(shapes[name])}, the network {list(value.shape)}"
            )
    unused = tuple(
        f"vision_backbone.{name}.{weight}"
        for name, vit in zip(FEATURIZERS, published.network.vits, strict=False)
        for weight in (f"blocks.{vit.depth}.", "norm.", "attn_pool.")
    )
    if unknown := sorted(name for name in shapes.keys() - expected.keys() if not name.startswith(unused)):
        raise ValueError(f"{KEY}={folder}: {len(unknown)} weights that OpenVLA does not have, such as {unknown[0]}")
