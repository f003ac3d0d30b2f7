"""Flow-matching policies in whole runs: from demonstrations to PPO, resumed exactly, refused where needed.

Over a small backbone, and over lerobot's own classes where lerobot is installed (`scripts/test_lerobot.sh`).
"""

import importlib.util
from pathlib import Path

import pytest

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("PIL")


import tether  # noqa: E402
from tests.integrations.robots.flow.fake import FakeBackbone  # noqa: E402
from tests.runs.control_run import assert_ratios_are_one, assert_resume_is_exact, call, train  # noqa: E402
from tether.config import ConfigError, load_config  # noqa: E402
from tether.control.build import build_control_run  # noqa: E402
from tether.control.learning.rollouts import POLICY  # noqa: E402
from tether.control.policies.mlp_policy import load_policy  # noqa: E402
from tether.integrations.robots.flow import backbone  # noqa: E402
from tether.integrations.robots.lerobot import read_dataset  # noqa: E402

REACH = Path(__file__).resolve().parents[2] / "recipes/vla-reach/reach.py"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
KEYS = [
    f"env.train.id={REACH}:Reach-v0", "policy.hidden_dim=16", "policy.num_layers=2", "policy.num_action_chunks=2",
    "policy.num_steps=3", "trainer.logger=file",
]  # fmt: skip
RUN = [
    "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=8", "env.eval.num_episodes=4",
    f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_epochs=1", "trainer.log_freq=1",
    "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.test_freq=3",
    "algorithm.reward_type=chunk_level", "algorithm.logprob_type=chunk_level", "algorithm.entropy_type=token_level",
]  # fmt: skip
HAS_LEROBOT = importlib.util.find_spec("lerobot") is not None
NEEDS_LEROBOT = pytest.mark.skipif(not HAS_LEROBOT, reason="needs lerobot: bash scripts/test_lerobot.sh")


@pytest.fixture(scope="module", params=["small", pytest.param("lerobot", marks=NEEDS_LEROBOT)])
def cloned(request, tmp_path_factory):
    """A few demonstrations, imitated for two epochs by each kind."""
    folder = tmp_path_factory.mktemp("flow")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "small":
            patch.setattr(backbone, "make_backbone", FakeBackbone)
        keys = [*KEYS, "policy.model_type=pi0"]
        call("collect", *keys, "--from", f"{REACH}:expert", "-o", folder / "demos", "-n", 4)
        for kind in ("pi0", "pi05"):
            keys = [*KEYS, f"policy.model_type={kind}"]
            call("bc", *keys, "--data", folder / "demos", "-o", folder / kind, "--epochs", 2)
        yield folder


def overrides(folder, kind, cloned, *more):
    start = f"{MODEL}.path={cloned / kind}"
    return [*KEYS, *RUN, f"policy.model_type={kind}", start, f"trainer.default_local_dir={folder}", *more]


METHODS = {
    "pi0": ["policy.noise_method=flow_sde"],
    "pi05": ["policy.noise_method=flow_noise", "policy.joint_logprob=True"],
}


@pytest.mark.parametrize("kind", METHODS)
def test_resuming_is_exact_and_the_first_ratio_of_every_rollout_is_one(kind, cloned, tmp_path):
    """Each step makes one update of its whole rollout."""
    short = ["trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False"]
    options = [*METHODS[kind], *short, f"{ACTOR}.ppo_mini_batch_size=16"]
    whole = assert_resume_is_exact(tmp_path, overrides(tmp_path, kind, cloned, *options), total=2)
    assert_ratios_are_one(whole.directory, 1e-3)


def test_the_scales_are_those_of_the_demonstrations(cloned, tmp_path):
    actions = [action for episode in read_dataset(cloned / "demos") for action in episode.actions]
    saved = load_policy(next((cloned / "pi0").glob("global_step_*")) / POLICY)
    mean = tuple(sum(float(action[column]) for action in actions) / len(actions) for column in range(2))
    assert saved.spec.action_scale[0] == pytest.approx(mean, abs=1e-5)
    run = build_control_run(load_config(None, overrides(tmp_path, "pi0", cloned)))
    run.close()
    assert run.trainer.rollouts.policy.spec.action_scale == saved.spec.action_scale
    fresh = build_control_run(
        load_config(None, [*KEYS, *RUN, "policy.model_type=pi0", f"trainer.default_local_dir={tmp_path / 'fresh'}"])
    )
    fresh.close()
    assert fresh.trainer.rollouts.policy.spec.action_scale == ((0.0, 0.0), (1.0, 1.0))


def test_a_checkpoint_collects_and_is_asked_for_actions(cloned, tmp_path):
    keys = [*KEYS, "policy.model_type=pi0"]
    call("collect", *keys, "--from", cloned / "pi0", "-o", tmp_path / "played", "-n", 2)
    episodes = read_dataset(tmp_path / "played")
    assert [episode.actions.shape[1] for episode in episodes] == [2, 2]
    train(overrides(tmp_path / "run", "pi0", cloned))
    agent = tether.load(tmp_path / "run")
    env = gymnasium.make("Reach-v0")
    obs, _ = env.reset(seed=0)
    for deterministic in (True, False):
        action = agent.predict(obs, deterministic=deterministic, begins=True)
        assert action.shape == (2,)


@NEEDS_LEROBOT
def test_a_folder_of_lerobots_is_imitated_further_and_trained(tmp_path):
    call("collect", *KEYS, "--from", f"{REACH}:expert", "-o", tmp_path / "demos", "-n", 4)
    kind = "policy.model_type=pi0"
    call("bc", *KEYS, kind, "--data", tmp_path / "demos", "-o", tmp_path / "pi0", "--epochs", 1)
    made = load_policy(next((tmp_path / "pi0").glob("global_step_*")) / POLICY)
    network = made.model.policy
    from lerobot.configs import FeatureType, PolicyFeature

    network.config.input_features = {"observation.images.image": PolicyFeature(FeatureType.VISUAL, (3, 32, 32))}
    network.config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    network.save_pretrained(tmp_path / "saved")
    start = f"{MODEL}.path={tmp_path / 'saved'}"
    call("bc", *KEYS, kind, start, "--data", tmp_path / "demos", "-o", tmp_path / "more", "--epochs", 1)
    more = load_policy(next((tmp_path / "more").glob("global_step_*")) / POLICY)
    assert more.spec == made.spec
    result = train([*KEYS, *RUN, kind, start, f"trainer.default_local_dir={tmp_path / 'run'}"])
    assert result.directory.joinpath("global_step_3").is_dir()
    wrong = [*KEYS, *RUN, "policy.model_type=pi05", start, f"trainer.default_local_dir={tmp_path / 'wrong'}"]
    with pytest.raises(ValueError, match=r"set policy\.model_type=pi0"):
        build_control_run(load_config(None, wrong))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["policy.hidden_dim=24"], "policy.hidden_dim: 24"),
        (["policy.noise_method=flow_cps", "policy.num_steps=1"], "policy.num_steps: 1"),
        (["policy.noise_method=flow_noise", "policy.noise_logvar_range=[0.2,0.1]"], "is empty"),
        ([f"{MODEL}.lora_rank=4"], "lora_rank"),
        (["policy.lstm_dim=8"], "policy.lstm_dim"),
    ],
)
def test_contradictions_are_refused(more, says):
    with pytest.raises(ConfigError, match=says):
        load_config(None, [*KEYS, *RUN, "policy.model_type=pi0", *more])


def test_choices_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(backbone, "make_backbone", FakeBackbone)
    keys = ["env.train.id=CartPole-v1", "policy.model_type=pi0", f"trainer.default_local_dir={tmp_path}"]
    with pytest.raises(ValueError, match=r"policy\.model_type=pi0: it generates numbers"):
        build_control_run(load_config(None, keys))
