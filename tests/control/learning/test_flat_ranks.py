"""A control policy on two ranks learns what it learns in one process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conformance.test_control_engines import COEFFICIENTS, SELECTION
from tests.control.learning import test_control_network as networks
from tests.control.learning.flat_learner import OPTIONS
from tests.control.learning.test_control import CHUNKED, SPECS, chunked_samples, make_policy, make_samples
from tests.ranks import on_ranks
from tether.checkpoints import load_state
from tether.control.learning.flat import FlatEngine
from tether.control.learning.losses import ControlLoss, shard_by_rank
from tether.control.ranks import FlatRankEngine
from tether.loop.engine import LossSpec, UpdatePlan
from tether.loop.incident import replay

BAD_ROW = 3
PLANS = {
    "shuffled": UpdatePlan(mini_batch_rows=12, epochs=2, shuffle=True),  # the last one is short, or one row
    "led by the KL": UpdatePlan(mini_batch_rows=16, epochs=3, shuffle=True, target_kl=1e-3, adapts_lr=True),
    "ended by the KL": UpdatePlan(mini_batch_rows=4, epochs=8, target_kl=1e-3),
}


def policies() -> dict[str, tuple[Any, Any, ControlLoss]]:
    """Name -> (makes a policy in float64, its samples, loss)."""
    found = {}
    for kind, spec in SPECS.items():
        samples = make_samples(make_policy(spec), count=33 - 8)
        found[kind] = (lambda spec=spec: make_policy(spec), samples, ControlLoss(**COEFFICIENTS))
    for name in ("clip_cov", "gspo"):
        loss = ControlLoss(name, selection=SELECTION.get(name, {}), **COEFFICIENTS)
        found[name] = (lambda: make_policy(SPECS["gaussian"]), make_samples(make_policy(SPECS["gaussian"])), loss)
    for kind, level in (("discrete", "chunk_level"), ("gaussian", "token_level")):
        samples = chunked_samples(make_policy(CHUNKED[kind]), level)
        loss = ControlLoss(logprob_level=level, entropy_level=level, **COEFFICIENTS)
        found[f"{kind} chunks"] = (lambda kind=kind: make_policy(CHUNKED[kind]), samples, loss)
    for kind in networks.SPECS:
        samples = networks.random_samples(networks.make(kind))
        found[kind] = (lambda kind=kind: networks.make(kind), samples, ControlLoss(**COEFFICIENTS))
    return found


def compared(folder: Path) -> dict[str, tuple[float, dict[str, float], dict[str, float]]]:
    """How far weights are from those of one process after two updates, and the metrics of both."""
    found = {}
    for kind, (make, samples, loss) in policies().items():
        for name, plan in PLANS.items() if kind == "gaussian" else [("shuffled", PLANS["shuffled"])]:
            one, mine = FlatEngine(make(), OPTIONS, 1e-2), FlatRankEngine(make(), OPTIONS, 1e-2)
            rows, seen = shard_by_rank(samples, dist.get_world_size())[dist.get_rank()]
            for step in range(2):
                expected = one.update(samples, LossSpec(None, loss), plan, step).metrics
                metrics = mine.learn(rows, seen, LossSpec(None, loss), plan, step).metrics
            moved = max(
                float((a - b).abs().max())
                for a, b in zip(mine.policy.parameters(), one.policy.parameters(), strict=True)
            )
            found[f"{kind}, {name}"] = (moved, metrics, expected)
    return found


def skipped(folder: Path) -> tuple[float, list[int]]:
    """Mini-batches that were skipped, and what the kept one names."""
    samples = make_samples(make_policy(SPECS["gaussian"]))
    samples.advantages[BAD_ROW] = math.nan
    engine = FlatRankEngine(make_policy(SPECS["gaussian"]), OPTIONS, 1e-2, folder)
    rows, seen = shard_by_rank(samples, dist.get_world_size())[dist.get_rank()]
    metrics = engine.learn(rows, seen, LossSpec(None, ControlLoss()), UpdatePlan(8), 0).metrics
    dist.barrier()
    return metrics["actor/skipped_updates"], replay(folder / "step_1") if dist.get_rank() == 0 else []


def begins_alike(folder: Path) -> bool:
    """Whether ranks that begin with other weights have those of the first, and what it saves."""
    policy = make_policy(SPECS["gaussian"])
    with torch.no_grad():
        policy.actor.linear[0][0].add_(dist.get_rank())
    engine = FlatRankEngine(policy, OPTIONS, 1e-2)
    expected = make_policy(SPECS["gaussian"]).state_dict()
    alike = all(torch.equal(value, expected[name]) for name, value in engine.policy.state_dict().items())
    if dist.get_rank() == 0:
        engine.begin_saving(folder / "actor", folder / "actor.pt")
        while not engine.writing()[0]:
            pass
    dist.barrier()
    return alike and engine.load_state(folder / "actor.pt") == load_state(folder / "actor.pt")["version"]


def everything(folder: Path) -> dict[str, Any]:
    return {"compared": compared(folder), "skipped": skipped(folder), "alike": begins_alike(folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    of_rank: dict[str, Any] = on_ranks(folder, 2, everything, folder)
    return of_rank


def test_updates_are_those_of_one_process(found: dict[str, Any]) -> None:
    """Whatever the policy, the loss and what ends the passes; some mini-batches have no row on one of the ranks."""
    for case, (moved, metrics, expected) in found["compared"].items():
        assert moved < 1e-9, case
        assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), case
    assert {metrics["actor/epochs"] for _, metrics, _ in found["compared"].values()} > {2.0, 3.0}


def test_a_gradient_that_is_not_finite_is_skipped_on_all(found: dict[str, Any]) -> None:
    assert found["skipped"] == (1.0, [BAD_ROW])


def test_all_ranks_begin_and_save_as_the_first(found: dict[str, Any]) -> None:
    assert found["alike"]
