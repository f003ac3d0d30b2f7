"""Policy losses: log-probabilities and advantages in, one loss for each token out, not aggregated.

Every loss can be called with the keywords of all of them (`tether.algorithms.registry`).
"""

from collections.abc import Callable

from jaxtyping import Bool
from torch import Tensor

from tether.algorithms.policy_losses.bypass import bypass_mode
from tether.algorithms.policy_losses.clipped import cispo, decoupled, interpolate_proximal, vanilla
from tether.algorithms.policy_losses.selection import select_clip_cov, select_kl_cov
from tether.algorithms.policy_losses.sequence import geo_mean, gspo
from tether.algorithms.policy_losses.unclipped import clip_cov, gpg, kl_cov, sapo
from tether.algorithms.registry import uniform
from tether.algorithms.token_loss import TokenLoss
from tether.loss_requirements import REQUIRED_AGGREGATION

__all__ = [
    "POLICY_LOSSES",
    "REQUIRED_AGGREGATION",
    "TOKEN_SELECTIONS",
    "interpolate_proximal",
]

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
        "bypass_mode": bypass_mode,
        "decoupled": decoupled,
    },
    meaning={
        "selected": "[B, T]: the tokens that TOKEN_SELECTIONS[name] chose over the whole mini-batch",
        "rollout_log_probs": "[B, T]: log-probabilities of the policy that sampled",
    },
    learns="log_probs",
)

TOKEN_SELECTIONS: dict[str, Callable[..., Bool[Tensor, "B T"]]] = uniform(
    {"clip_cov": select_clip_cov, "kl_cov": select_kl_cov},
    meaning={"generator": "a seeded torch.Generator on the CPU"},
)
"""For the losses that need ``selected``: the function that chooses, once over the whole mini-batch."""
