"""A skipped update is kept so that it can be replayed by someone who has only the folder."""

import dataclasses
import logging
import math
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.control.learning.flat_learner import flat_learner
from tests.control.learning.test_control_network import SPECS, make, random_samples
from tests.text.learning.batches import ROWS, make_batch, make_critic, make_engine, make_policy
from tether.batch import TrainBatch, filled
from tether.control.learning.losses import ControlLoss
from tether.control.policies.mlp_policy import make_policy as control_policy
from tether.control.policies.spec import PolicySpec
from tether.loop.engine import LossSpec, OptimizerOptions, UpdatePlan
from tether.loop.incident import replay
from tether.text.learning.losses import CriticLoss, PolicyForward, PolicyLoss, ValueForward
from tether.text.learning.packing import MicroBatching
from tether.text.models.layers import enable_gradient_checkpointing
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
BAD_ROW = 3
PLAN = UpdatePlan(mini_batch_rows=ROWS)


@pytest.mark.parametrize("in_a_process_of_its_own", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_replay_script_names_the_row(
    in_a_process_of_its_own: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that computes in bfloat16, as most do."""
    batch = make_batch(make_policy(), make_critic())
    filled(batch.advantages)[BAD_ROW, 0] = math.inf
    policy = make_policy(dtype=torch.float32)
    engine = make_engine(policy, MicroBatching(max_rows=2), compute_dtype=torch.bfloat16, incident_dir=tmp_path)
    loss = PolicyLoss(options={"clip_ratio_high": 0.3}, kl_coef=0.1)
    assert engine.update(batch, LossSpec(PolicyForward(), loss), PLAN, step=4).metrics["skipped_updates"] == 1
    script = str(tmp_path / "step_5" / "replay.py")
    if in_a_process_of_its_own:
        path = os.pathsep.join([f"{ROOT}/src", str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        out = done.stdout
    else:
        runpy.run_path(script)
        out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) == ROWS - 1  # the row without a score was never in the mini-batch
    assert [line.split(":")[0] for line in lines if ", 0 of " not in line] == [f"row {BAD_ROW}"]


def test_a_critics_update_can_be_replayed(tmp_path: Path) -> None:
    critic = make_critic()
    batch = make_batch(make_policy(), critic)
    filled(batch.returns)[BAD_ROW, 1] = math.nan
    engine = make_engine(critic, incident_dir=tmp_path)
    assert engine.update(batch, LossSpec(ValueForward(), CriticLoss()), PLAN, step=0).metrics["skipped_updates"] == 1
    assert replay(tmp_path / "step_1") == [BAD_ROW]


def test_replay_returns_the_rows_and_the_first_incident_of_a_step_is_kept(tmp_path: Path) -> None:
    policy = make_policy()
    batch = make_batch(policy, make_critic())
    for row in (0, 7):
        filled(batch.advantages)[row, 0] = math.nan
    engine = make_engine(policy, incident_dir=tmp_path)
    metrics = engine.update(
        batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(mini_batch_rows=4), step=0
    ).metrics
    assert metrics["skipped_updates"] == 2  # one bad row in each of the two mini-batches
    assert replay(tmp_path / "step_1") == [0]


def test_the_cut_of_truncated_sampling_is_kept_with_the_batch(tmp_path: Path) -> None:
    policy = make_policy()
    engine = NativeEngine(policy, eos_token_ids=frozenset())
    rollout = engine.generate([[5, 6], [7]], SamplingParams(6, n=2, top_p=0.8), NoiseKey(0, 0))
    batch = TrainBatch.assemble(rollout, torch.ones(4))
    batch.old_log_probs = batch.rollout_log_probs
    batch.advantages = batch.token_level_scores.clone()
    batch.advantages[2, 0] = math.nan
    learner = make_engine(policy, incident_dir=tmp_path)
    learner.update(batch, LossSpec(PolicyForward(), PolicyLoss()), UpdatePlan(mini_batch_rows=4), step=0)
    kept = torch.load(tmp_path / "step_1" / "incident.pt", weights_only=False)["update"]
    saved = kept.batch
    assert torch.equal(saved.kept.count, filled(batch.kept).count)
    log_probs = kept.loss.forward(kept.model, saved, None).log_probs.cpu()
    torch.testing.assert_close(log_probs, batch.rollout_log_probs, rtol=0, atol=1e-10)
    assert replay(tmp_path / "step_1") == [2]


def test_a_weight_that_is_not_finite_makes_every_row_bad(tmp_path: Path) -> None:
    policy = make_policy()
    batch = make_batch(policy, make_critic())
    with torch.no_grad():
        policy.base_model.norm.weight[0] = math.nan
    make_engine(policy, incident_dir=tmp_path).update(batch, LossSpec(PolicyForward(), PolicyLoss()), PLAN, step=0)
    assert replay(tmp_path / "step_1") == list(range(ROWS - 1))


def update(folder: Path, policy: torch.nn.Module | None = None, step: int = 0) -> dict[str, float]:
    """Do an update with one bad row, and keep its incident in `folder`."""
    policy = policy or make_policy()
    batch = make_batch(policy, make_critic())
    filled(batch.advantages)[BAD_ROW, 0] = math.nan
    engine = make_engine(policy, incident_dir=folder)
    return engine.update(batch, LossSpec(PolicyForward(), PolicyLoss()), PLAN, step=step).metrics


def test_gradient_checkpointing_does_not_stand_in_the_way(tmp_path: Path) -> None:
    policy = make_policy()
    enable_gradient_checkpointing(policy)
    assert update(tmp_path, policy)["skipped_updates"] == 1
    assert replay(tmp_path / "step_1") == [BAD_ROW]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".writing_step_1").mkdir()
    (tmp_path / "step_1").mkdir()
    for folder in (".writing_step_1", "step_1"):
        (tmp_path / folder / "incident.pt").write_bytes(b"half of a file")
    assert update(tmp_path)["skipped_updates"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert replay(tmp_path / "step_1") == [BAD_ROW]


@pytest.mark.parametrize("reason", ["a model that cannot be pickled", "a file where the folder should be"])
def test_an_incident_that_cannot_be_kept_is_a_warning(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, folder = make_policy(), tmp_path / "incidents"
    if reason.startswith("a model"):
        policy.a_function = lambda x: x
    else:
        folder.write_text("")
    with caplog.at_level(logging.WARNING):
        assert update(folder, policy)["skipped_updates"] == 1
    assert f"{folder / 'step_1'}: the skipped update could not be kept" in caplog.text
    assert not list(folder.glob("*")) if folder.is_dir() else folder.read_text() == ""


def test_a_full_disk_is_a_warning_too(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - 50_000))
    assert update(small_disk / "incidents")["skipped_updates"] == 1
    assert "the skipped update could not be kept" in caplog.text
    assert not list((small_disk / "incidents").iterdir())
    filler.unlink()
    assert update(small_disk / "incidents")["skipped_updates"] == 1
    assert replay(small_disk / "incidents" / "step_1") == [BAD_ROW]


@pytest.mark.parametrize(
    ("name", "loss"), [*((name, "clip_cov") for name in SPECS), ("perceptrons", "clip_cov"), ("perceptrons", "vanilla")]
)
def test_a_control_policys_update_can_be_replayed(name: str, loss: str, tmp_path: Path) -> None:
    """The fourth row, or sequence, has an advantage that is not finite; clip_cov draws tokens, the same ones again."""
    if name == "perceptrons":
        policy = control_policy(PolicySpec(5, (3,), 1, hidden_dim=6, num_layers=1), seed=0)
        samples = random_samples(make("lstm")).decisions()
        samples = dataclasses.replace(samples, obs=torch.randn(len(samples.actions), 5), actions=samples.actions[:, :1])
        samples = samples.each(torch.Tensor.float, "actions")
    else:
        policy = make(name)
        samples = random_samples(policy)
    samples.advantages[BAD_ROW] = math.nan
    selection = {"clip_cov_lb": 0.0} if loss == "clip_cov" else {}
    learner = flat_learner(
        policy,
        ControlLoss(loss, selection=selection),
        UpdatePlan(24, 1, shuffle=True),
        OptimizerOptions(lr=1e-2),
        1e-2,
        tmp_path,
    )
    assert learner.update(samples, 4).metrics["actor/skipped_updates"] == 1
    kept = torch.load(tmp_path / "step_5" / "incident.pt", weights_only=False)["update"]
    (bad,) = kept._samples.advantages.flatten(1).isnan().any(dim=1).nonzero().tolist()  # in the order of the mini-batch
    assert replay(tmp_path / "step_5") == bad
