"""Do whole runs end the same, however their ranks share the model?

    python -m benchmarks.whole_runs --write docs/evidence/several-devices.md

Ten steps of PPO with a tiny policy and critic in float32: sampled, scored and learned from, in one process and on CPU
ranks of each layout. The difference of weights to those of one process is relative to how far training moved them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from benchmarks.resumable import write_between
from benchmarks.speed.table import grid
from tests.runs.forked_group import ForkedGroup
from tests.runs.tiny_run import GAE, base_overrides, measured, train, weights, write_inputs
from tether.distributed import groups

BEGIN, END = "<!-- whole_runs:begin -->", "<!-- whole_runs:end -->"
STEPS = 10
GOAL = 1e-3
"""Of weights: the rounding of float32, after ten steps of Adam."""
RATE = 1e-3
SEQUENCE = "ulysses_sequence_parallel_size=2"
SHARED = [f"actor_rollout_ref.actor.{SEQUENCE}", f"critic.{SEQUENCE}"]
HYBRID = ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2", "critic.model.fsdp_config.fsdp_size=2"]
Tensors = Mapping[str, torch.Tensor]
LAYOUTS: Mapping[str, tuple[int, Sequence[str]]] = {
    "1 rank": (1, []),
    "2 ranks": (2, []),
    "2 ranks share rows (SP 2)": (2, SHARED),
    "4 ranks": (4, []),
    "4 ranks, HSDP 2 x 2": (4, HYBRID),
    "4 ranks, SP 2, HSDP 2 x 2": (4, [*SHARED, *HYBRID]),
}
SAMPLED = ("critic/score/mean", "response_length/mean", "critic/score/max", "response_length/max")
"""Metrics of the samples of a step alone."""
LOGGED = (
    "actor/grad_norm",
    "actor/entropy",
    "actor/pg_loss",
    "critic/grad_norm",
    "critic/vf_loss",
)


@contextmanager
def forked() -> Iterator[None]:
    """Have forked ranks, also where one device needs none."""
    with patch.object(groups, "_start_group", ForkedGroup), patch.object(groups, "device_count", lambda config: 2):
        yield


def run(inputs: Path, folder: Path, steps: int, ranks: int | None, more: Sequence[str] = ()) -> Path:
    """Train; None ranks: one process."""
    given = [
        *base_overrides(inputs, folder),
        *GAE,
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        f"actor_rollout_ref.actor.optim.lr={RATE}",
        f"critic.optim.lr={RATE}",
        "critic.model.use_remove_padding=True",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        "trainer.preflight=False",
        *more,
    ]
    if ranks is None:
        return train(given)
    with forked():
        return train([*given, f"trainer.n_gpus_per_node={ranks}"])


def worst_weight(start: Tensors, one: Tensors, other: Tensors) -> float:
    """The largest difference of a parameter, relative to how far training moved it; a new one began near 0."""
    assert one.keys() == other.keys()
    return max(
        float((other[name] - one[name]).norm() / (one[name] - start.get(name, torch.zeros(()))).norm()) for name in one
    )


def worst_metric(left: Path, right: Path) -> float:
    """The largest difference of what was logged at any step, relative to the largest value of its kind."""
    expected, found = measured(left), measured(right)
    names = [name for name in LOGGED if name in expected[1]]
    scales = {name: max(abs(metrics[name]) for metrics in expected.values()) or 1.0 for name in names}
    return max(abs(found[step][name] - expected[step][name]) / scales[name] for step in expected for name in names)


def compare(start: Tensors, one: Path, other: Path, steps: int) -> tuple[int, float, float]:
    """Steps with other samples, and the worst relative differences of weights and metrics."""
    expected, found = measured(one), measured(other)
    assert expected.keys() == found.keys() == set(range(1, steps + 1))
    differ = sum(any(expected[step][name] != found[step][name] for name in SAMPLED) for step in expected)
    ends = [folder / f"global_step_{steps}" for folder in (one, other)]
    far = max(worst_weight(start, *(weights(end, role) for end in ends)) for role in ("actor", "critic"))
    return differ, far, worst_metric(one, other)


def rows(layouts: Mapping[str, tuple[int, Sequence[str]]], steps: int) -> Iterator[tuple[str, int, float, float]]:
    """Of each layout its name, steps with other samples, and the worst differences of weights and metrics."""
    with TemporaryDirectory() as root:
        inputs = write_inputs(Path(root))
        start = load_file(inputs / "model" / "model.safetensors")
        one = run(inputs, inputs / "one", steps, None)
        for number, (layout, (ranks, more)) in enumerate(layouts.items()):
            other = run(inputs, inputs / str(number), steps, ranks, more)
            yield layout, *compare(start, one, other, steps)


def main() -> int:
    """Print the table, and write it; 0 if the goal is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    given = parser.parse_args()
    shown, met = [], True
    for layout, differ, far, metric in rows(LAYOUTS, STEPS):
        shown.append([layout, f"{differ} of {STEPS}", f"{far:.1e}", f"{metric:.1e}"])
        print(shown[-1], flush=True)
        met = met and differ == 0 and far < GOAL
    lines = grid(("layout", "steps with other samples", "weights", "metrics"), shown)
    print("\n".join(lines), f"\n\ngoal: the same samples, weights below {GOAL:g}: {'met' if met else 'MISSED'}")
    if given.write:
        write_between(given.write, BEGIN, END, "\n".join(lines))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
