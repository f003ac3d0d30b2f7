"""Published OpenVLA policies in whole runs: imitation, PPO with adapters, resumed exactly, refused where needed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("PIL")
pytest.importorskip("peft")


from tests.integrations.robots.vla.published import write_folder  # noqa: E402
from tests.runs.control_run import assert_resume_is_exact, call, train  # noqa: E402
from tether.commands.model import export  # noqa: E402
from tether.config import load_config  # noqa: E402
from tether.control.build import build_control_run  # noqa: E402
from tether.control.learning.rollouts import POLICY  # noqa: E402
from tether.control.policies.mlp_policy import load_policy  # noqa: E402
from tether.integrations.robots import vla_policies  # noqa: E402
from tether.observations import ObsPart  # noqa: E402

pytestmark = pytest.mark.slow

REACH = Path(__file__).resolve().parents[2] / "recipes/vla-reach/reach.py"
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
KEYS = [f"env.train.id={REACH}:Reach-v0", "policy.num_action_chunks=2", "trainer.logger=file"]
START = ["policy.max_prompt_length=64", "policy.unnorm_key=two"]
RUN = [
    "env.train.total_num_envs=2", "env.train.max_steps_per_rollout_epoch=8", "env.eval.num_episodes=2",
    f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3", f"{ACTOR}.ppo_epochs=1",
    "trainer.log_freq=1", "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=2",
    f"{MODEL}.lora_rank=2",
]  # fmt: skip
LEVELS = {
    "openvla": [f"algorithm.{kind}_type=action_level" for kind in ("reward", "logprob", "entropy")],
    "openvla_oft": ["algorithm.reward_type=chunk_level", "algorithm.logprob_type=token_level"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "tiny"
    write_folder(path)
    return path


def overrides(out, kind, start, *more):
    kinds = [f"policy.model_type={kind}", f"{MODEL}.path={start}", f"trainer.default_local_dir={out}"]
    return [*KEYS, *RUN, *kinds, *LEVELS[kind], *more]


def new_policy(config, value_width):
    model = config.actor_rollout_ref.model
    return vla_policies.new_policy(config.policy, model, reach(), value_width, config.trainer.seed)


@pytest.mark.parametrize("kind", [pytest.param("openvla", marks=pytest.mark.slow), "openvla_oft"])
def test_resuming_is_exact_and_adapters_alone_are_trained(kind, folder, tmp_path):
    whole = assert_resume_is_exact(tmp_path, overrides(tmp_path, kind, folder, *START), total=2)
    policy = whole.trainer.rollouts.policy
    assert (policy.spec.low, policy.spec.high) == ((-0.5, -1.0), (0.5, 1.0))
    fresh = new_policy(load_config(None, overrides(tmp_path / "fresh", kind, folder, *START)).config, value_width=1)
    before = fresh.state_dict()
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert any("lora_" in name for name in moved)
    assert all("lora_" in name or name.startswith("critic.") for name in moved)


def reach():
    """Its environments, as far as a new policy looks at them."""
    from tether.control.envs.protocol import ContinuousActions

    layout = (
        ObsPart("image", "image", (32, 32, 3), "uint8"),
        ObsPart("state", "vector", (2,)),
        ObsPart("task", "text", (5,), "uint8"),
    )
    return SimpleNamespace(id="Reach-v0", layout=layout, actions=ContinuousActions(2, (-1.0, -1.0), (1.0, 1.0)))


@pytest.mark.parametrize("kind", LEVELS)
def test_the_first_ratio_is_one(kind, folder, tmp_path):
    run = build_control_run(
        load_config(None, overrides(tmp_path, kind, folder, *START, f"{ACTOR}.ppo_mini_batch_size=8"))
    )
    run.trainer.rollouts.begin(0)
    metrics = run.trainer.advance()
    run.close()
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["actor/ratio_min"] == pytest.approx(1.0, abs=1e-3)


def test_it_imitates_is_tested_acts_and_is_trained_on(folder, tmp_path):
    keys = [*KEYS, "policy.model_type=openvla_oft", "policy.max_prompt_length=64"]
    call("collect", *KEYS, "--from", f"{REACH}:expert", "-o", tmp_path / "demos", "-n", 2)
    call("bc", *keys, f"{MODEL}.path={folder}", "--data", tmp_path / "demos", "-o", tmp_path / "cloned", "--epochs", 1)
    cloned = load_policy(next((tmp_path / "cloned").glob("global_step_*")) / POLICY)
    assert cloned.spec.low != (-0.5, -1.0)  # of the demonstrations
    assert cloned.spec.network.tokenizer == str(folder)
    call("eval", tmp_path / "cloned", "env.eval.num_episodes=1")
    call("collect", *KEYS, "--from", tmp_path / "cloned", "-o", tmp_path / "played", "-n", 1)
    call("model", "export", tmp_path / "cloned", "--out", tmp_path / "exported")
    again = [f"{MODEL}.path={tmp_path / 'exported'}", "policy.unnorm_key=tether"]
    exported = new_policy(load_config(None, [*keys, *again]).config, value_width=0)
    assert (exported.spec.low, exported.spec.high) == (cloned.spec.low, cloned.spec.high)
    assert all(
        torch.equal(value, cloned.model.state_dict()[name]) for name, value in exported.model.state_dict().items()
    )
    with pytest.raises(ValueError, match=r"--out=.*exists already"):
        export(tmp_path / "cloned", "openvla", tmp_path / "exported")
    run = build_control_run(load_config(None, overrides(tmp_path / "run", "openvla_oft", tmp_path / "cloned")))
    run.close()
    policy = run.trainer.rollouts.policy
    assert policy.spec.network == cloned.spec.network
    name = "vision_backbone.featurizer.blocks.1.mlp.fc2.weight"
    assert torch.equal(policy.model.state_dict()[name], cloned.model.state_dict()[name])
    for key in START:
        with pytest.raises(ValueError, match=rf"{key.split('=')[0]}=.*acts where .*published policy"):
            build_control_run(load_config(None, overrides(tmp_path / "twice", "openvla_oft", tmp_path / "cloned", key)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["policy.unnorm_key=null"],
            r"policy\.unnorm_key: missing, and .* has statistics of several datasets\. Name one of seven, two",
        ),
        (
            ["actor_rollout_ref.model.path=.", "~policy.unnorm_key", "~policy.center_crop"],
            r"path=\.: no checkpoint here\. .*or that of a published OpenVLA policy",
        ),
        (["policy.unnorm_key=seven"], r"policy\.unnorm_key=seven: actions with 7 columns there, and 2 in .*Reach-v0"),
        (["env.train.drop_observations=[image]"], r"reads a picture and an instruction, and .* shows no picture"),
        (["env.train.drop_observations=[task]"], r"reads a picture and an instruction, and .* shows no text"),
        (["policy.max_prompt_length=20"], r"policy\.max_prompt_length=20: the prompt of '\w+' has \d+ tokens"),
    ],
)
def test_bad_input(more, message, folder, tmp_path):
    run = overrides(tmp_path, "openvla", folder, *START, *more)
    with pytest.raises(ValueError, match=message):
        train(run)


@pytest.mark.parametrize("key", ["policy.unnorm_key=two", "policy.max_prompt_length=64", "policy.center_crop=True"])
def test_keys_of_published_policies_are_refused_for_small_ones(key, tmp_path):
    small = ["policy.hidden_dim=16", "policy.num_heads=2", "policy.model_type=openvla", key]
    with pytest.raises(ValueError, match=rf"{key.split('=')[0]}=.*acts where .* is not set"):
        build_control_run(load_config(None, [*KEYS, *small, f"trainer.default_local_dir={tmp_path}"]))


def test_more_pictures_than_openvla_reads_and_other_channels_are_refused():
    env, other = reach(), ObsPart("wrist", "image", (32, 32, 3), "uint8")
    env.layout += (other,)
    with pytest.raises(ValueError, match=r"reads one picture, and Reach-v0 shows image, wrist"):
        vla_policies._check_view(env, "openvla")
    vla_policies._check_view(env, "openvla_oft")
    env.layout = (ObsPart("image", "image", (32, 32, 4), "uint8"), ObsPart("task", "text", (5,), "uint8"))
    with pytest.raises(ValueError, match="has 4 channels"):
        vla_policies._check_view(env, "openvla")
