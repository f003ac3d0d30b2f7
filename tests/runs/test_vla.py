"""Vision-language-action policies in whole runs: from demonstrations to PPO, resumed exactly, refused where needed."""

import json
from pathlib import Path

import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("PIL")

from tests.control.envs import toys  # noqa: E402
from tests.runs.control_run import assert_ratios_are_one, assert_resume_is_exact, call  # noqa: E402
from tether.config import ConfigError, load_config  # noqa: E402
from tether.control.build import build_control_run  # noqa: E402
from tether.control.learning.rollouts import POLICY  # noqa: E402
from tether.control.policies.mlp_policy import load_policy  # noqa: E402

REACH = Path(__file__).resolve().parents[2] / "recipes/vla-reach/reach.py"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
KEYS = [
    f"env.train.id={REACH}:Reach-v0", "policy.hidden_dim=16", "policy.num_layers=2", "policy.num_heads=2",
    "policy.num_action_chunks=2", "trainer.logger=file",
]  # fmt: skip
RUN = [
    "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=8", "env.eval.num_episodes=4",
    f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=1", "trainer.log_freq=1",
    "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=3",
]  # fmt: skip
SHORT = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]


@pytest.fixture(autouse=True)
def _toys():
    toys.register()


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """A few demonstrations, imitated for two epochs by each kind."""
    folder = tmp_path_factory.mktemp("vla")
    call("collect", *KEYS, "policy.model_type=openvla", "--from", f"{REACH}:expert", "-o", folder / "demos", "-n", 4)
    for kind in ("openvla", "openvla_oft"):
        out = folder / kind
        call("bc", *KEYS, f"policy.model_type={kind}", "--data", folder / "demos", "-o", out, "--epochs", 2)
    return folder


def overrides(folder, kind, cloned, *more):
    start = f"{MODEL}.path={cloned / kind}"
    return [*KEYS, *RUN, f"policy.model_type={kind}", start, f"trainer.default_local_dir={folder}", *more]


LEVELS = {
    "openvla": [f"algorithm.{kind}_type=action_level" for kind in ("reward", "logprob", "entropy")],
    "openvla_oft": ["algorithm.reward_type=chunk_level", "algorithm.logprob_type=token_level"],
}


@pytest.mark.parametrize("kind", [pytest.param("openvla", marks=pytest.mark.slow), "openvla_oft"])
def test_resuming_is_exact_and_the_first_ratio_of_every_rollout_is_one(kind, cloned, tmp_path):
    """Each step makes one update of its whole rollout."""
    options = [*LEVELS[kind], *SHORT, f"{ACTOR}.ppo_mini_batch_size=16"]
    whole = assert_resume_is_exact(tmp_path, overrides(tmp_path, kind, cloned, *options), total=2)
    assert_ratios_are_one(whole.directory, 1e-4)


def test_a_run_in_bfloat16_resumes_bitwise(cloned, tmp_path):
    options = [*LEVELS["openvla_oft"], *SHORT, "policy.dtype=bfloat16"]
    whole = assert_resume_is_exact(tmp_path, overrides(tmp_path, "openvla_oft", cloned, *options), total=2)
    assert whole.trainer.rollouts.policy.model.language.dtype == torch.bfloat16
    saved = load_policy(whole.directory / "global_step_2" / POLICY)
    assert saved.model.language.dtype == torch.float32


def test_the_bounds_are_those_of_the_demonstrations(cloned, tmp_path):
    saved = load_policy(next((cloned / "openvla").glob("global_step_*")) / POLICY)
    assert all(-1 <= low < 0 < high <= 1 for low, high in zip(saved.spec.low, saved.spec.high, strict=True))
    run = build_control_run(load_config(None, overrides(tmp_path, "openvla", cloned)))
    run.close()
    assert run.trainer.rollouts.policy.spec.low == saved.spec.low
    fresh = build_control_run(
        load_config(None, [*KEYS, *RUN, "policy.model_type=openvla", f"trainer.default_local_dir={tmp_path}"])
    )
    fresh.close()
    assert fresh.trainer.rollouts.policy.spec.low == (-1.0, -1.0)


def test_adapters_start_from_an_imitator_and_resume(cloned, tmp_path):
    pytest.importorskip("peft")
    lora = [f"{MODEL}.lora_rank=2"]
    whole = assert_resume_is_exact(tmp_path, overrides(tmp_path, "openvla", cloned, *lora, *SHORT), total=2)
    start = load_policy(next((cloned / "openvla").glob("global_step_*")) / POLICY).state_dict()
    now = whole.trainer.rollouts.policy.state_dict()
    assert torch.equal(now["model.encoder.to_tokens.weight"], start["model.encoder.to_tokens.weight"])
    # A run of all weights starts from the merged ones.
    merged = build_control_run(
        load_config(None, overrides(tmp_path / "m", "openvla", tmp_path, f"{MODEL}.path={whole.directory}"))
    )
    merged.close()
    name = "model.language.model.layers.0.self_attn.q_proj"
    assert not torch.equal(merged.trainer.rollouts.policy.state_dict()[f"{name}.weight"], start[f"{name}.weight"])


def test_a_checkpoint_is_tested_and_demonstrates(cloned, tmp_path):
    call("eval", cloned / "openvla_oft", "env.eval.num_episodes=4")
    (written,) = (cloned / "openvla_oft").glob("eval_*.json")
    assert json.loads(written.read_text())["metrics"]["eval/num_trajectories"] == 4
    keys = [*KEYS, "policy.model_type=openvla_oft"]
    assert "2 episodes" in call("collect", *keys, "--from", cloned / "openvla_oft", "-o", tmp_path / "again", "-n", 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["env.train.id=CartPole-v1"], r"action tokens stand for numbers, and the actions of CartPole-v1 are choices"),
        (["policy.model_type=cnn_policy"], r"policy\.model_type=cnn_policy reads no text, such as task"),
        (["policy.model_type=openvla_oft"], r"its policy has model_type=openvla, this run openvla_oft"),
        (["policy.num_layers=3"], r"its policy has num_layers=2, this run 3"),
    ],
)
def test_bad_input(more, message, cloned, tmp_path):
    given = [*overrides(tmp_path, "openvla", cloned), f"{MODEL}.path={cloned / 'openvla'}", *more]
    with pytest.raises(ValueError, match=message):
        build_control_run(load_config(None, given))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["policy.num_heads=3"], r"policy\.num_heads: 3 heads do not divide policy\.hidden_dim=16"),
        (["policy.lstm_dim=4"], r"policy\.lstm_dim: 4 asks for a memory"),
        (["policy.model_type=mlp_policy", f"{MODEL}.lora_rank=4"], r"lora_rank: 4 asks for adapters"),
    ],
)
def test_contradictions(more, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*KEYS, "policy.model_type=openvla", *more])
