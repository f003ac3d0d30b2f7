"""Records the experts that each token is routed to in one forward pass, and replays them in another.

A router scores the experts of its layer and selects the best k. Rounding can swap close scores: the sampler and the
trainer, or the trainer before and after an update, then route a token to different experts, and its log-probability
jumps. If the experts of an earlier pass are replayed, only their weights are recomputed, and the gradient flows through
these (routing replay, arXiv:2507.18071, section 5.3; with the sampler's experts arXiv:2510.11370).

Legend: N = tokens of a forward pass, L = decoder layers, k = experts per token.
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
"""Stands for an expert that the router has to choose."""
_CHOICE = "_expert_choice"  # attribute of a router, set from its layer's attention until its own call
_FOLLOWS = "_follows_expert_choice"  # attribute of a backbone whose layers have the hooks


@dataclass(eq=False)
class ExpertChoice:
    """The experts of the tokens of one forward pass; it is passed through a model as the keyword ``expert_choice``."""

    replayed: Tensor | None = None
    """[N, L, k] experts to route tokens to; all of a token's experts are set, or all `UNKNOWN`. None: routers
    choose."""
    records: bool = False
    """Whether to record the experts."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [N, k], for the layers with experts that ran on this rank."""

    def recorded(self, tokens: int, layers: int, experts: int, device: torch.device) -> Tensor:
        """Return the recorded experts [N, L, k] int16, with `UNKNOWN` for layers without a record on this rank."""
        result = torch.full((tokens, layers, experts), UNKNOWN, dtype=torch.int16, device=device)
        for layer, chosen in self.chosen.items():
            result[:, layer] = chosen.to(torch.int16)
        return result


def experts_per_token(config: Any) -> int | None:
    """Return k from a transformers config; None for a model without experts."""
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token"):
        count = getattr(config.get_text_config(), name, None)
        if count:
            return int(count)
    return None


def follow_choice(model: PreTrainedModel) -> None:
    """Make the routers of a model use ``expert_choice=``; a second call has no effect.

    Raises:
        ValueError: the model has no router that tether supports.
    """
    backbone = cast(Any, model.base_model)
    if getattr(backbone, _FOLLOWS, False):
        return
    routers = {layer: _router_of(module) for layer, module in enumerate(getattr(backbone, "layers", ()))}
    with_router = {layer: router for layer, router in routers.items() if router is not None}
    if not with_router or not all(hasattr(backbone.layers[layer], "self_attn") for layer in with_router):
        raise ValueError(
            f"{type(model).__name__}: has no router that tether supports, so no choice of experts can be recorded or "
            "replayed. Leave router replay off for this model."
        )
    for layer, router in with_router.items():
        # The attention gets the layer's keyword arguments, and runs before the router, also when the layer is
        # recomputed.
        attention: nn.Module = backbone.layers[layer].self_attn
        attention.register_forward_pre_hook(_Announce(router), with_kwargs=True)
        router.register_forward_hook(_Route(layer), with_kwargs=True)
    setattr(backbone, _FOLLOWS, True)


def recorded_choice(model: PreTrainedModel, choice: ExpertChoice) -> Tensor:
    """Return [N, L, k] int16, the experts of the tokens of the last forward pass; -1 in layers without experts."""
    some = next(iter(choice.chosen.values()))
    layers = len(cast(Any, model.base_model).layers)
    return choice.recorded(len(some), layers, some.shape[1], some.device)


def check_choice(model: PreTrainedModel, choice: ExpertChoice) -> None:
    """Check after a forward pass that `choice` reached the routers.

    Raises:
        ValueError: the model's layers do not pass keyword arguments to their attention.
    """
    if not choice.chosen:
        raise ValueError(
            f"{type(model).__name__}: its layers do not pass the choice of experts to their routers. Leave router "
            "replay off for this model."
        )


def _router_of(layer: nn.Module) -> nn.Module | None:
    for module in layer.modules():
        if type(module).__name__.endswith("Router") and hasattr(module, "top_k") and hasattr(module, "num_experts"):
            return module
    return None


@dataclass(frozen=True)
class _Announce:
    """A hook that passes the choice to a layer's router when the layer's attention runs."""

    router: nn.Module

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.router.__dict__[_CHOICE] = kwargs.get("expert_choice")


@dataclass(frozen=True)
class _Route:
    """A hook that records a router's choice, or runs the router again with replayed experts.

    The result of the first run is discarded; it costs a product with one column per expert.
    """

    layer: int

    def __call__(self, router: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        choice: ExpertChoice | None = router.__dict__.pop(_CHOICE, None)
        if choice is None:
            return None
        if choice.replayed is not None:
            with _Replay(choice.replayed[:, self.layer], router.num_experts) as replay:
                out = type(router).forward(router, *args, **kwargs)
            if replay.choices != 1:
                raise ValueError(
                    f"{type(router).__name__}: does not choose its experts with one torch.topk over all of them, "
                    "so no choice can be replayed. Leave router replay off for this model."
                )
        if choice.records or not choice.chosen:
            choice.chosen[self.layer] = out[-1].detach()
        return out


class _Replay(TorchFunctionMode):
    """Makes torch.topk over all experts return the replayed ones."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self.experts, self.num_experts, self.choices = experts, num_experts, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs or {})
        is_choice = function in (torch.topk, Tensor.topk) and result.indices.shape == self.experts.shape
        if not (is_choice and args[0].shape[-1] == self.num_experts):
            return result
        self.choices += 1
        is_known = self.experts >= 0
        indices = torch.where(is_known, self.experts.to(result.indices), result.indices)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))
