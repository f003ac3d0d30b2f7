"""Which experts of a mixture each token goes to: recorded in one forward pass, and chosen alike in another one.

A router scores the experts of its layer and takes the best k. Scores that lie close together change places by rounding:
the sampler and the trainer, or the trainer before and after an update, then send a token to other experts, and its
log-probability jumps. With the choice of an earlier pass only the weights of the experts are computed anew, and the
gradient goes through these (routing replay, arXiv:2507.18071, section 5.3; with the sampler's choice arXiv:2510.11370).

Legend: N = tokens of a forward pass, L = decoder layers, k = experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

UNKNOWN = -1
"""In the place of an expert: the router chooses."""
_GIVEN = "_expert_choice"  # attribute of a router, from its layer's attention up to its own call
_FOLLOWS = "_follows_expert_choice"  # attribute of a backbone whose layers have the hooks


@dataclass(eq=False)
class ExpertChoice:
    """The experts of the tokens of one forward pass; goes through a model as the keyword ``expert_choice``."""

    replayed: Tensor | None = None
    """[N, L, k]: the experts that tokens are sent to, all of a token or none (`UNKNOWN`); None: routers choose."""
    records: bool = False
    """Keep what is chosen."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [N, k], of the layers with experts that ran here."""

    def recorded(self, tokens: int, layers: int, experts: int, device: torch.device) -> Tensor:
        """[N, L, k] int16 of what was chosen; `UNKNOWN` in layers that chose nothing here."""
        whole = torch.full((tokens, layers, experts), UNKNOWN, dtype=torch.int16, device=device)
        for layer, chosen in self.chosen.items():
            whole[:, layer] = chosen.to(torch.int16)
        return whole


def experts_per_token(config: Any) -> int | None:
    """k, by a config of transformers; None: a model without experts."""
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token"):
        found = getattr(config.get_text_config(), name, None)
        if found:
            return int(found)
    return None


def follow_choice(model: PreTrainedModel) -> None:
    """Let the routers of a model take their choice from ``expert_choice=``; a second call does nothing.

    Raises:
        ValueError: no module that tether knows as a router.
    """
    backbone = cast(Any, model.base_model)
    if getattr(backbone, _FOLLOWS, False):
        return
    routers = {layer: _router_of(module) for layer, module in enumerate(getattr(backbone, "layers", ()))}
    found = {layer: router for layer, router in routers.items() if router is not None}
    if not found or not all(hasattr(backbone.layers[layer], "self_attn") for layer in found):
        raise ValueError(
            f"{type(model).__name__}: has no router that tether knows, so no choice of experts can be recorded or "
            "replayed. Leave router replay off for this model."
        )
    for layer, router in found.items():
        # The attention gets a layer's keywords, and runs before the router also where the layer is recomputed.
        attention: nn.Module = backbone.layers[layer].self_attn
        attention.register_forward_pre_hook(_Announce(router), with_kwargs=True)
        router.register_forward_hook(_Route(layer), with_kwargs=True)
    setattr(backbone, _FOLLOWS, True)


def recorded_choice(model: PreTrainedModel, choice: ExpertChoice) -> Tensor:
    """[N, L, k] int16, the experts of the tokens of the last forward pass; -1 in layers without any."""
    some = next(iter(choice.chosen.values()))
    layers = len(cast(Any, model.base_model).layers)
    return choice.recorded(len(some), layers, some.shape[1], some.device)


def check_choice(model: PreTrainedModel, choice: ExpertChoice) -> None:
    """After a forward pass: see that it met the routers.

    Raises:
        ValueError: the model's layers do not hand keywords to their attention.
    """
    if not choice.chosen:
        raise ValueError(
            f"{type(model).__name__}: its layers do not hand on what tells routers their choice. Leave router replay "
            "off for this model."
        )


def _router_of(layer: nn.Module) -> nn.Module | None:
    for module in layer.modules():
        if type(module).__name__.endswith("Router") and hasattr(module, "top_k") and hasattr(module, "num_experts"):
            return module
    return None


@dataclass(frozen=True)
class _Announce:
    """Tells a router, when the attention of its layer runs, of the choice."""

    router: nn.Module

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self.router.__dict__[_GIVEN] = given.get("expert_choice")


@dataclass(frozen=True)
class _Route:
    """Records a router's choice, or calls it again with a choice that is given.

    The second call discards the first, whose cost is that of a product with as many columns as there are experts.
    """

    layer: int

    def __call__(self, router: Any, args: tuple[Any, ...], given: dict[str, Any], out: Any) -> Any:
        choice: ExpertChoice | None = router.__dict__.pop(_GIVEN, None)
        if choice is None:
            return None
        if choice.replayed is not None:
            with _Replay(choice.replayed[:, self.layer], router.num_experts) as replay:
                out = type(router).forward(router, *args, **given)
            if replay.choices != 1:
                raise ValueError(
                    f"{type(router).__name__}: chooses its experts by other means than one torch.topk of all of them, "
                    "so that no choice can be replayed. Leave router replay off for this model."
                )
        if choice.records or not choice.chosen:
            choice.chosen[self.layer] = out[-1].detach()
        return out


class _Replay(TorchFunctionMode):
    """Inside, the best k of all experts are those that are given."""

    def __init__(self, experts: Tensor, among: int) -> None:
        super().__init__()
        self.experts, self.among, self.choices = experts, among, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **kwargs or {})
        is_choice = function in (torch.topk, Tensor.topk) and found.indices.shape == self.experts.shape
        if not (is_choice and args[0].shape[-1] == self.among):
            return found
        self.choices += 1
        known = self.experts >= 0
        indices = torch.where(known, self.experts.to(found.indices), found.indices)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
