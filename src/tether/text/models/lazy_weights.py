"""Models whose weights are left in files: each rank reads only its shard, and no process ever has all weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from tether.text.models.model_path import weight_files


class LazyWeight(nn.Parameter):
    """Placeholder for a weight in a file; it has the shape of the weight and uses the memory of one number."""

    file: Path
    key: str
    """Name of the weight in the file."""


def lazy_model(
    auto_class: Any,
    path: Path | str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel | None:
    """Return a model with `LazyWeight`s; its buffers, such as rotary frequencies, are computed by its class.

    Returns:
        The model; None if a weight is not in a safetensors file under its name in the model, so that transformers has
        to load it.
    """
    files = _weights_of(Path(path))
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]  # it may return a parameter
    try:
        model: PreTrainedModel = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    finally:
        hook.remove()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    weights: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        saved_names = [name for name in names[id(parameter)] if name in files]
        # Tied weights that were saved separately may differ; then they must not be tied.
        if len(saved_names) != 1 or files[saved_names[0]][1] != list(parameter.shape):
            return None
        weights[id(parameter)] = _lazy_weight(parameter, device, files[saved_names[0]][0], saved_names[0])
    wide = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    has_buffers = len(model.state_dict()) != sum(map(len, names.values()))
    if has_buffers or (wide and dtype != torch.float32):
        return None
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, weights[id(parameter)])
    if model.can_generate():
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model.to(device).eval()  # type: ignore[arg-type]  # transformers' own `to` is typed for a decorator


def has_lazy_weights(model: nn.Module) -> bool:
    """Return whether a weight of the model is still in its file."""
    return any(isinstance(parameter, LazyWeight) for parameter in model.parameters())


def sources_of(model: nn.Module) -> list[tuple[Path, str] | None]:
    """Return for each parameter the file and key to read it from, or None."""
    return [(p.file, p.key) if isinstance(p, LazyWeight) else None for p in model.parameters()]


def allocate_weights(module: nn.Module) -> None:
    """Allocate uninitialised memory for lazy weights."""
    for parameter in module.parameters():
        if isinstance(parameter, LazyWeight) and not parameter.is_contiguous():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@torch.no_grad()
def read_rows(requests: Iterable[tuple[tuple[Path, str], int, Tensor]]) -> int:
    """Fill tensors with rows of weights, and return the bytes read; a request is (file and key, first row, tensor)."""
    by_file: dict[Path, list[tuple[str, int, Tensor]]] = {}
    for (file, name), first, rows in requests:
        by_file.setdefault(file, []).append((name, first, rows))
    count = 0
    for file, requested in by_file.items():
        with safe_open(file, "pt") as opened:
            for name, first, rows in requested:
                if rows.numel():
                    values = opened.get_slice(name)[first : first + len(rows)]
                    rows.copy_(values)
                    count += values.nbytes
    return count


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.device.type == "meta":
        return None
    return nn.Parameter(parameter.to(torch.device("meta")), requires_grad=parameter.requires_grad)


def _lazy_weight(parameter: nn.Parameter, device: torch.device, file: Path, name: str) -> LazyWeight:
    one = torch.zeros(1, dtype=parameter.dtype, device=device)
    weight = torch.Tensor._make_subclass(LazyWeight, one.expand(parameter.shape), parameter.requires_grad)
    weight.file, weight.key = file, name
    return weight


def _weights_of(folder: Path) -> Mapping[str, tuple[Path, list[int]]]:
    """Return name -> file and shape."""
    weights: dict[str, tuple[Path, list[int]]] = {}
    for file in weight_files(folder):
        # An invalid file is reported when transformers loads the model.
        with suppress(OSError, SafetensorError), safe_open(file, "pt") as opened:
            weights |= {name: (file, opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return weights
