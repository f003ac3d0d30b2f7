"""The assignment of a checkpoint's weights to the ranks that write them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from tether.checkpoints import moments_path
from tether.text.learning.packing import balanced
from tether.text.models.save import adapter_folder, join_shards


def writers(model: PreTrainedModel, ranks: int) -> list[int]:
    """Return the rank that writes each of `model.parameters()`, balanced by size.

    A layer stays on one rank, because saving may merge several of its weights into one tensor. A critic's head that is
    trained along with adapters is on the first rank, which has all adapters.
    """
    beside_adapters = {
        number
        for number, (name, parameter) in enumerate(model.named_parameters())
        if hasattr(model, "peft_config") and parameter.requires_grad and ".lora_" not in name
    }
    layers = set(model._no_split_modules or ())
    inside = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in layers]
    units: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        unit = next((layer for layer in inside if name.startswith(layer)), name.split(".base_layer.")[0])
        units.setdefault(unit, []).append(number)
        sizes[unit] = sizes.get(unit, 0) + parameter.numel()
    assignment = [0] * sum(map(len, units.values()))
    members = list(units.values())
    for rank, mine in enumerate(balanced(list(sizes.values()), ranks)):
        for number in chain.from_iterable(members[unit] for unit in mine):
            assignment[number] = 0 if number in beside_adapters else rank
    return assignment


def join_shares(shares: Sequence[Path], folder: Path, state: Path | None) -> None:
    """Combine what ranks wrote in `FsdpEngine.begin_saving` into a model's folder and, unless None, a state file."""
    join_shards([share / folder.name for share in shares], folder)
    if state:
        for number, share in enumerate(shares, 1):
            if (moments := share / "moments.safetensors").exists():
                moments.rename(moments_path(state, number, len(shares)))
        (shares[0] / "state.pt").rename(state)
    if (adapter := adapter_folder(shares[0] / folder.name)).exists():
        adapter.rename(adapter_folder(folder))
