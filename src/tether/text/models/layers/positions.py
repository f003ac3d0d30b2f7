"""How many positions of a model turn by the same angles, whichever rows stand beside them.

transformers computes the angles of ``longrope`` and ``dynamic`` positions from the longest row of a batch. One row
beyond the original length turns the tokens of every row that is packed with it, and a sequence that grows beyond that
length no longer fits its own cached keys. Such models are run up to their original length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens of prompt and response together, or None for a model without a limit."""
    text = config.get_text_config()
    lengths = (getattr(text, "max_position_embeddings", None), original_length(config))
    return min((length for length in lengths if length is not None), default=None)


def original_length(config: PreTrainedConfig) -> int | None:
    """Return the length up to which the angles do not depend on the longest row, or None where they never do."""
    text = config.get_text_config()
    lengths = []
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope":
            lengths.append(rope.get("original_max_position_embeddings", text.max_position_embeddings))
        elif "dynamic" in kind:
            lengths.append(text.max_position_embeddings)
    return min(lengths, default=None)


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary settings of a config: one mapping, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [one for one in rope.values() if isinstance(one, Mapping)]
    yield from nested if "rope_type" not in rope and nested else [rope]


def limit_positions(model: PreTrainedModel) -> None:
    """Make a model refuse positions beyond its original length where its angles would depend on the longest row."""
    limit = original_length(model.config)
    if limit is None:
        return
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "rope_type") and not hasattr(module, "position_limit"):
            module.__dict__["position_limit"] = limit
            module.register_forward_pre_hook(partial(_check_positions, limit), with_kwargs=True)


def _check_positions(limit: int, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    longest = int(positions.max()) + 1
    if longest > limit:
        raise ValueError(
            f"a sequence of {longest} tokens exceeds the model's original length of {limit}, beyond which its "
            f"{module.rope_type} positions depend on the longest sequence of a batch. Shorten prompts and responses "
            "(data.max_prompt_length, data.max_response_length, data.max_length)"
        )
