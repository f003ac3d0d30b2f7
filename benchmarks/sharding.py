"""Does it matter on how many ranks, and how, a gradient is computed? python -m benchmarks.sharding

For each layout of CPU ranks: the worst relative difference to one process, of a gradient in float64 over all parameters
of a tiny policy or critic, and over several ways to cut the rows into micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.ranks import on_ranks
from tests.text.learning.test_fsdp import critic_gradients, gradients

GOAL = 1e-10
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "4 ranks, HSDP 2 x 2": (4, {"shards": 2}),
    "2 ranks share rows (SP 2)": (2, {"sequence": 2}),
    "4 ranks share rows (SP 4)": (4, {"sequence": 4}),
    "2 x 2 ranks share rows (SP 2)": (4, {"sequence": 2}),
    "2 ranks, layers not resharded": (2, {"reshard": False}),
    "2 ranks, all on the host": (2, {"on_host": True}),
    "4 ranks, SP 2, HSDP 2 x 2, all on the host": (4, {"sequence": 2, "shards": 2, "on_host": True}),
}


def worst(sharding: dict[str, Any]) -> list[float]:
    """Of GAE, of GRPO, of the critic."""
    of_policy = dict(gradients(sharding))
    grpo = of_policy.pop("grpo")
    return [max(of_policy.values()), grpo, max(far for _, far in critic_gradients(sharding))]


def table(layouts: Mapping[str, tuple[int, Any]], worst: Callable[[Any], list[float]]) -> int:
    """Print what ranks find of each layout; 0 if all of it meets the goal, else 1."""
    print("| layout | GAE | GRPO | critic |\n|---|---|---|---|")
    met = True
    for name, (ranks, layout) in layouts.items():
        with TemporaryDirectory() as folder:
            found = on_ranks(Path(folder), ranks, worst, layout)
        print(f"| {name} | {' | '.join(f'{far:.1e}' for far in found)} |", flush=True)
        met = met and max(found) < GOAL
    print(f"\ngoal: below {GOAL:g}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(table(LAYOUTS, worst))
