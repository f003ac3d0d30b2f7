"""Does it matter how Megatron's ranks share a model? python -m benchmarks.layouts

For each layout of CPU ranks: the worst relative difference to one process, of a gradient in float64 over all parameters
of a tiny policy or critic, and over several ways to cut the rows into micro-batches.
"""

from __future__ import annotations

import sys

from benchmarks.sharding import table
from tests.text.learning.megatron_ranks import critic_gradients, gradients
from tests.text.learning.test_megatron import LAYOUTS
from tether.integrations.megatron import MegatronLayout


def worst(layout: MegatronLayout) -> list[float]:
    """Of GAE, of GRPO, of the critic."""
    every = (gradients("gae", layout), gradients("grpo", layout), critic_gradients(layout))
    return [max(far for _, far in found) for found in every]


if __name__ == "__main__":
    sys.exit(table(LAYOUTS, worst))
