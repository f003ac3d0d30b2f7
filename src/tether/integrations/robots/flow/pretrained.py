"""Saved policies in lerobot's format: a folder with config.json, model.safetensors and normalisation statistics."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tether.integrations.robots.flow.backbone import Sizes
from tether.integrations.robots.flow.policy import FlowPolicy
from tether.integrations.robots.flow.spec import Scale
from tether.runtime.disk import COPY_AGAIN, read_json, reading

CONFIG, WEIGHTS, PROCESSOR = "config.json", "model.safetensors", "policy_preprocessor.json"
STATE, ACTION = "observation.state", "action"
ASSUMED = {
    "min_period": 4e-3, "max_period": 4.0, "time_sampling_beta_alpha": 1.5, "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999, "time_sampling_offset": 0.001,
}  # fmt: skip
"""Settings that have the same value in all published policies; other values are refused."""
PUBLISHED_WIDTH = 2048
"""Width of PaliGemma in lerobot's own sizes."""
KEY = "actor_rollout_ref.model.path"


@dataclass(frozen=True)
class Pretrained:
    """A saved policy's description."""

    folder: Path
    model_type: str
    horizon: int
    latent_dim: int
    state_dim: int
    image_size: int
    prompt_length: int
    cameras: int
    """Number of images with which it was trained."""
    action_dim: int | None
    """Columns of an action with which it was trained; None: unknown."""
    sizes: dict[str, int] | None
    action_scale: Scale | None
    """Scale of actions; None: the folder has no statistics."""
    state_scale: Scale | None
    relative_actions: bool
    """Whether its actions are relative to the state."""


def is_pretrained(folder: Path) -> bool:
    """Return whether the folder has a policy in lerobot's format."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def read_pretrained(folder: Path) -> Pretrained:
    """Return the description of the policy in a folder.

    Raises:
        ValueError: the policy has a different type, or its configuration differs from that of published policies.
    """
    config = read_json(folder / CONFIG, dict, COPY_AGAIN)
    kind = config.get("type")
    if kind not in ("pi0", "pi05"):
        raise ValueError(f"{KEY}={folder}: {CONFIG} is of type {kind}; the types pi0 and pi05 can be loaded")
    for name, supported in ASSUMED.items():
        if config.get(name, supported) != supported:
            raise ValueError(f"{KEY}={folder}: {CONFIG} has {name}={config[name]}; only {supported} is supported")
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        shapes = {_prefixed(name): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    try:
        sizes = Sizes.of_weights(shapes)
    except (KeyError, StopIteration) as error:
        raise ValueError(f"{folder / WEIGHTS}: not the weights of lerobot's {kind} ({error} is missing)") from error
    features = (config.get("input_features") or {}) | (config.get("output_features") or {})
    scales = _scales(folder)
    return Pretrained(
        folder=folder,
        model_type=kind,
        horizon=config["chunk_size"],
        latent_dim=config["max_action_dim"],
        state_dim=config["max_state_dim"],
        image_size=config["image_resolution"][0],
        prompt_length=config["tokenizer_max_length"],
        cameras=sum(feature["type"] == "VISUAL" for feature in features.values()),
        action_dim=features[ACTION]["shape"][0] if ACTION in features else None,
        sizes=None if sizes.vlm_width == PUBLISHED_WIDTH else asdict(sizes),
        action_scale=scales.get(ACTION),
        state_scale=scales.get(STATE),
        relative_actions=bool(config.get("use_relative_actions")),
    )


def load_weights(policy: FlowPolicy, folder: Path) -> None:
    """Load the weights of a folder into the network; the critic is unchanged.

    Raises:
        ValueError: the weights do not fit the network; the message names some of them.
    """
    network = policy.model.policy
    state = network._fix_pytorch_state_dict_keys(load_file(folder / WEIGHTS), network.config)
    weights = {_prefixed(name): value for name, value in state.items()}
    # Files may lack the output layers, which share weights and are unused.
    read = {name for name, value in network.named_parameters() if not name.endswith("lm_head.weight")}
    missing, wrong = network.load_state_dict(_fitting(weights, network, folder), strict=False)
    missing = [name for name in missing if name in read]
    if missing or wrong:
        raise ValueError(f"{folder / WEIGHTS}: unknown weights {sorted(wrong)[:3]}, missing weights {missing[:3]}")


def _fitting(weights: dict[str, Tensor], network: Any, folder: Path) -> dict[str, Tensor]:
    expected = network.state_dict()
    for name, value in weights.items():
        if name in expected and expected[name].shape != value.shape:
            shape, expected_shape = list(value.shape), list(expected[name].shape)
            raise ValueError(f"{folder / WEIGHTS}: {name} has the shape {shape}, the policy {expected_shape}")
    return weights


def _prefixed(name: str) -> str:
    """Return the name with lerobot's module prefix, which openpi's files lack."""
    return name if name.startswith("model.") else f"model.{name}"


def _scales(folder: Path) -> dict[str, Scale]:
    """Return feature -> scale, if the folder has a normalizer with statistics.

    Raises:
        ValueError: the normalisation mode is not supported.
    """
    if not (folder / PROCESSOR).is_file():
        return {}
    with reading(folder / PROCESSOR, COPY_AGAIN):
        steps = read_json(folder / PROCESSOR, dict, COPY_AGAIN)["steps"]
        normalizer = next((step for step in steps if step.get("registry_name") == "normalizer_processor"), None)
        if normalizer is None or "state_file" not in normalizer:
            return {}
        modes = normalizer["config"]["norm_map"]
        statistics = load_file(folder / normalizer["state_file"])
    scales = {}
    for feature, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        by_name = {
            name.rpartition(".")[2]: value for name, value in statistics.items() if name.startswith(f"{feature}.")
        }
        if by_name:
            scales[feature] = scale_of(modes.get(kind, "IDENTITY"), by_name, f"{folder / PROCESSOR}: norm_map.{kind}")
    return scales


ENDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
"""Modes that map a range to [-1, 1] -> names of the statistics that bound the range."""


def scale_of(mode: str, statistics: dict[str, Tensor], where: str) -> Scale:
    """Return offsets and scales for one of lerobot's normalisation modes.

    Raises:
        ValueError: the mode is unknown, or its statistics are missing.
    """
    names = ("mean", "std") if mode == "MEAN_STD" else ENDS.get(mode, ())
    if mode != "IDENTITY" and (not names or any(name not in statistics for name in names)):
        raise ValueError(f"{where}={mode}: needs one of MEAN_STD, {', '.join(ENDS)} or IDENTITY, with its statistics")
    if mode == "IDENTITY":
        columns = next(iter(statistics.values())).numel()
        return (0.0,) * columns, (1.0,) * columns
    first, second = (statistics[name].double().flatten() for name in names)
    if mode == "MEAN_STD":
        return _columns(first, second + 1e-8)
    width = torch.where(first == second, 1e-8, second - first)
    return _columns(first + width / 2, width / 2)


def _columns(offset: Tensor, scale: Tensor) -> Scale:
    return tuple(offset.tolist()), tuple(scale.tolist())
