"""What is kept of a skipped update can be replayed by someone who has only the folder."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.batches import ROWS, make_batch, make_critic, make_engine, make_policy
from tether.batch import filled
from tether.training.forward import PolicyModel, ValueModel
from tether.training.incident import replay
from tether.training.losses import CriticLoss, PolicyLoss
from tether.training.micro_batches import MicroBatching
from tether.training.protocol import UpdatePlan

ROOT = Path(__file__).resolve().parents[2]
BAD_ROW = 3
PLAN = UpdatePlan(mini_batch_rows=ROWS)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_replay_script_names_the_row(tmp_path: Path, role: str) -> None:
    policy, critic = make_policy(), make_critic()
    batch = make_batch(policy, critic)
    micro = MicroBatching(max_rows=2)
    if role == "actor":
        filled(batch.advantages)[BAD_ROW, 0] = math.inf
        engine = make_engine(policy, micro, incident_dir=tmp_path)
        loss = PolicyLoss(options={"clip_ratio_high": 0.3}, kl_coef=0.1)
        metrics = engine.update(batch, PolicyModel(policy), loss, PLAN, step=4)
    else:
        filled(batch.returns)[BAD_ROW, 1] = math.nan
        engine = make_engine(critic, micro, incident_dir=tmp_path)
        metrics = engine.update(batch, ValueModel(critic), CriticLoss(), PLAN, step=4)
    assert metrics["skipped_updates"] == 1
    script = tmp_path / "step_5" / "replay.py"
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == ROWS - 1  # of the mini-batch: the row without a score was never in it
    assert [
        line.split(":")[0] for line in lines if "loss nan" in line or "loss inf" in line or "loss -inf" in line
    ] == [f"row {BAD_ROW}"]
    assert all(" 0 of " in line for line in lines if not line.startswith(f"row {BAD_ROW}:"))


def test_replay_returns_the_rows_and_the_first_incident_of_a_step_is_kept(tmp_path: Path) -> None:
    policy = make_policy()
    batch = make_batch(policy, make_critic())
    for row in (0, 7):
        filled(batch.advantages)[row, 0] = math.nan
    engine = make_engine(policy, incident_dir=tmp_path)
    metrics = engine.update(batch, PolicyModel(policy), PolicyLoss(), UpdatePlan(mini_batch_rows=4), step=0)
    assert metrics["skipped_updates"] == 2  # one bad row in each of the two mini-batches
    assert replay(tmp_path / "step_1") == [0]


def test_a_weight_that_is_not_finite_makes_every_row_bad(tmp_path: Path) -> None:
    policy = make_policy()
    batch = make_batch(policy, make_critic())
    with torch.no_grad():
        policy.base_model.norm.weight[0] = math.nan
    make_engine(policy, incident_dir=tmp_path).update(batch, PolicyModel(policy), PolicyLoss(), PLAN, step=0)
    assert replay(tmp_path / "step_1") == list(range(ROWS - 1))
