"""Models whose weights are in files still: each rank reads its part of them, and none ever holds all."""

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

from tether.models.language.model_path import weight_files


class UnreadWeight(nn.Parameter):
    """Stands for a weight that a file has: of its shape, with the memory of one number."""

    file: Path
    key: str
    """In the file."""


def unread_model(
    auto_class: Any,
    path: Path | str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedModel | None:
    """A model with `UnreadWeight`s; its buffers, such as rotary frequencies, are computed as its class does.

    Returns:
        The model; None where a weight is not in a safetensors file of its own under the name that the model has for it,
        so that transformers has to load it.
    """
    files = _weights_of(Path(path))
    hook = register_module_parameter_registration_hook(_without_memory)  # type: ignore[arg-type]  # it may return one
    try:
        model: PreTrainedModel = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    finally:
        hook.remove()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    weights: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        found = [name for name in names[id(parameter)] if name in files]
        # Tied weights of which both were saved may differ: then they are no longer tied.
        if len(found) != 1 or files[found[0]][1] != list(parameter.shape):
            return None
        weights[id(parameter)] = _unread(parameter, device, files[found[0]][0], found[0])
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


def is_unread(model: nn.Module) -> bool:
    """Whether a weight of it is in a file still."""
    return any(isinstance(parameter, UnreadWeight) for parameter in model.parameters())


def sources_of(model: nn.Module) -> list[tuple[Path, str] | None]:
    """Of each parameter, where it is to be read from."""
    return [(p.file, p.key) if isinstance(p, UnreadWeight) else None for p in model.parameters()]


def give_memory(module: nn.Module) -> None:
    """Unread weights get the memory of their shape; what stands there is of no use."""
    for parameter in module.parameters():
        if isinstance(parameter, UnreadWeight) and not parameter.is_contiguous():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


@torch.no_grad()
def read_rows(places: Iterable[tuple[tuple[Path, str], int, Tensor]]) -> int:
    """Fill tensors with rows of weights: where the weight is, its first row, and the tensor; returns the bytes read."""
    by_file: dict[Path, list[tuple[str, int, Tensor]]] = {}
    for (file, name), first, rows in places:
        by_file.setdefault(file, []).append((name, first, rows))
    count = 0
    for file, wanted in by_file.items():
        with safe_open(file, "pt") as opened:
            for name, first, rows in wanted:
                if rows.numel():
                    found = opened.get_slice(name)[first : first + len(rows)]
                    rows.copy_(found)
                    count += found.nbytes
    return count


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.device.type == "meta":
        return None
    return nn.Parameter(parameter.to(torch.device("meta")), requires_grad=parameter.requires_grad)


def _unread(parameter: nn.Parameter, device: torch.device, file: Path, name: str) -> UnreadWeight:
    one = torch.zeros(1, dtype=parameter.dtype, device=device)
    found = torch.Tensor._make_subclass(UnreadWeight, one.expand(parameter.shape), parameter.requires_grad)
    found.file, found.key = file, name
    return found


def _weights_of(folder: Path) -> Mapping[str, tuple[Path, list[int]]]:
    """Name -> file and shape."""
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in weight_files(folder):
        with suppress(OSError, SafetensorError), safe_open(file, "pt") as opened:  # it is said when all is loaded
            found |= {name: (file, opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found
