"""Policy losses, which compute one loss per token, not aggregated, from log-probs and advantages.

Every loss can be called with the keywords of all of them (`tether.algorithms.registry`).
"""

from collections.abc import Callable

from jaxtyping import Bool
from torch import Tensor

from tether.algorithms.aggregation import TokenLoss
from tether.algorithms.policy_losses.bypass import bypass_mode
from tether.algorithms.policy_losses.clipped import cispo, decoupled, interpolate_proximal, vanilla
from tether.algorithms.policy_losses.divergence import dppo_kl, dppo_tv
from tether.algorithms.policy_losses.selection import select_clip_cov, select_kl_cov, select_m2po
from tether.algorithms.policy_losses.sequence import geo_mean, gspo
from tether.algorithms.policy_losses.unclipped import clip_cov, dro, gpg, kl_cov, m2po, sapo, topr
from tether.algorithms.registry import uniform
from tether.loss_requirements import REQUIRED_AGGREGATION

__all__ = ["POLICY_LOSSES", "REQUIRED_AGGREGATION", "TOKEN_SELECTIONS", "interpolate_proximal"]

POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = uniform(
    {
        "vanilla": vanilla,
        "gspo": gspo,
        "sapo": sapo,
        "gpg": gpg,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "geo_mean": geo_mean,
        "cispo": cispo,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
        "dro": dro,
        "topr": topr,
        "m2po": m2po,
        "bypass_mode": bypass_mode,
        "decoupled": decoupled,
    },
    meaning={
        "selected": "[B, T]: the tokens that TOKEN_SELECTIONS[name] selected over the full mini-batch",
        "rollout_log_probs": "[B, T]: log-probabilities of the sampling policy",
    },
    learns="log_probs",
)
"""`policy_loss.loss_mode` -> loss. The name of a new loss must also be added to ``LossMode`` of
`tether.config.schema.actor`."""

TOKEN_SELECTIONS: dict[str, Callable[..., Bool[Tensor, "B T"]]] = uniform(
    {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov, "m2po": select_m2po},
    meaning={"generator": "a seeded torch.Generator on the CPU"},
)
"""For each loss that needs ``selected``, the function that selects tokens once over the full mini-batch."""
