"""Does it matter how Megatron's ranks share a model? python -m benchmarks.layouts

For each layout of CPU ranks: the worst relative difference to one process, of a gradient in float64 over all parameters
of a tiny policy or critic, and over several ways to cut the rows into micro-batches.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.training.fsdp_ranks import on_ranks
from tests.training.megatron_ranks import critic_gradients, gradients
from tests.training.test_megatron import LAYOUTS
from tether.models.megatron import Layout

GOAL = 1e-10


def worst(layout: Layout) -> list[float]:
    """Of GAE, of GRPO, of the critic."""
    every = (gradients("gae", layout), gradients("grpo", layout), critic_gradients(layout))
    return [max(far for _, far in found) for found in every]


def main() -> int:
    """Print the table; the exit code says whether the goal is met."""
    print("| layout | ranks | GAE | GRPO | critic |\n|---|---|---|---|---|")
    met = True
    for name, (ranks, layout) in LAYOUTS.items():
        with TemporaryDirectory() as folder:
            found = on_ranks(Path(folder), ranks, worst, layout)
        print(f"| {name} | {ranks} | {' | '.join(f'{far:.1e}' for far in found)} |", flush=True)
        met = met and max(found) < GOAL
    print(f"\ngoal: below {GOAL:g}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
