"""Runs with pictures or a memory: they learn what cannot be learned without, with ratio one, and resume exactly."""

import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from tests.control.envs import toys  # noqa: E402
from tests.control.envs.test_vector import MAKERS  # noqa: E402
from tests.runs.control_run import assert_ratios_are_one, assert_resume_is_exact, train  # noqa: E402
from tests.runs.control_samples import make_samples  # noqa: E402
from tests.runs.test_control import learned  # noqa: E402
from tests.runs.tiny_run import same  # noqa: E402
from tether.config import load_config  # noqa: E402
from tether.control.build import build_control_run  # noqa: E402
from tether.control.collecting.collector import EnvCollector  # noqa: E402
from tether.control.policies.mlp_policy import make_policy  # noqa: E402
from tether.control.policies.network_policy import NetworkPolicy  # noqa: E402
from tether.control.policies.networks import as_tensors  # noqa: E402
from tether.control.policies.spec import PolicySpec  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
CNN = ["policy.model_type=cnn_policy", "policy.hidden_dim=64"]
LSTM = ["policy.lstm_dim=16", "policy.hidden_dim=16", "policy.num_layers=1", "policy.share_critic=True"]


@pytest.fixture(autouse=True)
def _toys():
    toys.register()


SHOWN = {
    "channels last": [],
    "channels first and a number": ["env.train.init_params.channels_first=True", "env.train.init_params.shift=True"],
}


@pytest.mark.parametrize(
    "shown",
    [pytest.param(SHOWN["channels last"], marks=pytest.mark.slow), SHOWN["channels first and a number"]],
    ids=SHOWN,
)
def test_a_picture_is_understood(shown, tmp_path):
    one_step = ["env.train.max_steps_per_rollout_epoch=24", "algorithm.gamma=0"]
    assert learned(tmp_path, "Spot", 12, *CNN, *one_step, f"{ACTOR}.ppo_mini_batch_size=96", *shown) > 0.9


MAZE = ["env.train.max_steps_per_rollout_epoch=20", f"{ACTOR}.ppo_mini_batch_size=80", f"{ACTOR}.optim.lr=2e-2"]


def test_a_memory_finds_the_way(tmp_path):
    assert learned(tmp_path, "TMaze", 20, *MAZE, *LSTM) > 0.95


@pytest.mark.slow
def test_without_a_memory_nobody_does(tmp_path):
    # The negative control: 0.5 is the most that any function of the last observation can get. 400 episodes are right
    # more than 0.62 of the time once in a million such policies.
    assert learned(tmp_path, "TMaze", 20, *MAZE, "env.eval.num_episodes=400") < 0.62


def test_noise_that_depends_on_the_state_finds_the_target(tmp_path):
    sde = ["policy.use_sde=True", "policy.sde_sample_freq=4", "policy.init_logstd=-2", "algorithm.gamma=0"]
    small = ["env.train.max_steps_per_rollout_epoch=16", f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_epochs=4"]
    assert learned(tmp_path, "Identity-box", 20, *sde, *small) > 0.85


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_here_is_refused(tmp_path):
    given = ["env.train.id=tether/Spot-v0", *CNN, "trainer.device=cuda"]
    with pytest.raises(ValueError, match=r"trainer\.device: cuda is not available to torch here"):
        build_control_run(load_config(None, overrides(tmp_path, *given)))


def test_choices_have_no_such_noise(tmp_path):
    with pytest.raises(ValueError, match=r"policy\.use_sde: the actions of tether/Spot-v0 are choices"):
        build_control_run(load_config(None, overrides(tmp_path, "env.train.id=tether/Spot-v0", "policy.use_sde=True")))


def overrides(folder, *more):
    return [
        "env.train.total_num_envs=4", "env.train.max_steps_per_rollout_epoch=16", f"{ACTOR}.ppo_mini_batch_size=32",
        "trainer.logger=file", "trainer.log_freq=1", "trainer.total_training_steps=4", "trainer.save_freq=2",
        "trainer.test_freq=3", "trainer.val_before_train=False", "env.eval.num_episodes=3",
        f"trainer.default_local_dir={folder}", *more,
    ]  # fmt: skip


MAZES = ["env.train.id=tether/TMaze-v0", *LSTM, "policy.normalize_observations=True"]
RUNS = {
    "cnn": ["env.train.id=tether/Spot-v0", *CNN, "env.train.init_params.shift=True"],
    "cnn in bfloat16": ["env.train.id=tether/Spot-v0", *CNN, "policy.dtype=bfloat16", "policy.share_critic=False"],
    "frames": [
        "env.train.id=tether/Spot-v0", *CNN, "env.train.frame_stack=3", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
    ],
    "lstm": [*MAZES, "policy.normalize_rewards=True"],
    "two lstms over chunks": [
        *MAZES, "policy.share_critic=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=16", "policy.num_action_chunks=2",
        "env.train.rollout_epoch=2", "env.train.max_steps_per_rollout_epoch=32",
    ],
    "lstm in groups": [
        *MAZES, "policy.share_critic=False", "algorithm.adv_estimator=grpo", "env.train.auto_reset=False",
        "env.train.group_size=2",
    ],
    "noise by state": ["env.train.id=Pendulum-v1", "policy.use_sde=True", "policy.sde_sample_freq=4"],
    "masks": ["env.train.id=tether/Allowed-v0", "env.train.action_masks=True"],
    "masks from processes": [
        "env.train.id=tether/Allowed-v0", "env.train.action_masks=True", "env.train.vectorization=subprocess",
    ],
    "cnn and lstm": ["env.train.id=tether/Spot-v0", *CNN, *LSTM, f"{ACTOR}.target_kl=0.01"],
}  # fmt: skip


SLOW_RUNS = ("cnn", "frames", "lstm", "lstm in groups", "masks from processes")  # parts of the others


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, marks=pytest.mark.slow if name in SLOW_RUNS else ()) for name, options in RUNS.items()],
    ids=RUNS,
)
def test_resuming_is_exact_and_the_first_ratio_of_every_rollout_is_one(options, tmp_path):
    """Each step makes one update of its whole rollout; the later ones begin with what is remembered."""
    batch = [f"{ACTOR}.ppo_mini_batch_size={128 if 'env.train.rollout_epoch=2' in options else 64}"]
    once = [f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.optim.lr=1e-2", "trainer.total_training_steps=2"]
    whole = assert_resume_is_exact(tmp_path, overrides(tmp_path, *options, *batch, *once), total=2)
    assert_ratios_are_one(whole.directory, 1e-6)


def test_micro_batches_change_nothing_but_rounding(tmp_path):
    policies = []
    for size in (32, 16):
        short = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.test_freq=-1"]
        more = [*RUNS["lstm"], f"{ACTOR}.ppo_micro_batch_size_per_gpu={size}", *short]
        policies.append(train(overrides(tmp_path / str(size), *more)).trainer.rollouts.policy)
    assert [policy.micro_batch for policy in policies] == [32, 16]
    for left, right in zip(*(policy.parameters() for policy in policies), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_learned_from_is_what_was_done_in_every_mode(name):
    policy = make_policy(PolicySpec(1, (2,), 1, hidden_dim=4, num_layers=1, lstm_dim=3), seed=0)
    with torch.no_grad():
        policy.actor.weight.mul_(100)
    collector = EnvCollector(MAKERS[name](), 13, state_width=policy.state_width)
    collector.restart(0)
    for number in range(3):
        acting, outputs = policy.acting(), []

        def act(obs, noise, state, acting=acting, outputs=outputs):
            with torch.no_grad():
                outputs.append(policy.act(policy.inputs(as_tensors(obs)), torch.from_numpy(state))[0])
            return acting(obs, noise, state)

        noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(number))
        rollout = collector.collect(act, noise)
        samples, _ = make_samples(rollout, policy, 0.9, 0.9)
        done = torch.stack(outputs, dim=1).log_softmax(-1).gather(-1, rollout.actions)
        torch.testing.assert_close(samples.old_log_probs[rollout.valid], done[rollout.valid])
        assert bool(rollout.valid.all()) == (name != "NextStep")


def test_a_step_that_only_resets_has_no_part_in_anything():
    policy = make_policy(PolicySpec(1, (2,), 1, hidden_dim=4, num_layers=1, lstm_dim=3), seed=0)
    collector = EnvCollector(MAKERS["NextStep"](), 13, state_width=policy.state_width)
    collector.restart(0)
    noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(0))
    rollout = collector.collect(policy.acting(), noise)
    expected, _ = make_samples(rollout, policy, 0.9, 0.9)
    lost = ~rollout.valid
    rollout.obs["state"][:, :-1][lost] = torch.nan
    rollout.token_level_scores[lost] = torch.nan
    found, _ = make_samples(rollout, policy, 0.9, 0.9)
    assert same(vars(found.decisions()) | {"obs": found.obs}, vars(expected.decisions()) | {"obs": expected.obs})
    assert bool(lost.any())
    assert torch.isfinite(found.obs).all()


def test_the_value_of_an_end_is_that_of_a_memory_of_its_episode():
    policy = make_policy(PolicySpec(1, (2,), 1, hidden_dim=4, num_layers=1, lstm_dim=3), seed=3)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(2)
    collector = EnvCollector(MAKERS["loop"](), 7, state_width=policy.state_width)
    collector.restart(0)
    noise = policy.head.noise(collector.noise_shape, torch.Generator().manual_seed(0))
    rollout = collector.collect(policy.acting(), noise)
    samples, _ = make_samples(rollout, policy, 0.5, 1.0, normalize_advantages=False)
    with torch.no_grad():  # the observations of an episode of five steps, and its last one
        values = policy.step(torch.arange(6.0)[None, :, None], None, torch.zeros(1, policy.state_width))[1][0, :, 0]
    torch.testing.assert_close(samples.returns[0, 4, 0], 5 + 0.5 * values[5])
    torch.testing.assert_close(samples.values[0, :5, 0], values[:5])


def test_pictures_are_kept_as_bytes(tmp_path):
    run = build_control_run(load_config(None, overrides(tmp_path, *RUNS["cnn"])))
    assert isinstance(run.trainer.rollouts.policy, NetworkPolicy)
    kept = run.trainer.rollouts.collector._obs
    assert (kept["picture"].dtype, kept["picture"].shape) == (torch.uint8, (4, 17, 5, 5, 3))
    assert (kept["shift"].dtype, kept["shift"].shape) == (torch.int64, (4, 17, 1))
    run.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["env.train.id=CartPole-v1", *CNN], r"cnn_policy: CartPole-v1 shows no picture of bytes \(state \(4,\)\)"),
        (["env.train.id=tether/Spot-v0", *CNN, "policy.cnn_type=nature"], r"cnn_type=nature: it needs .* 36 x 36"),
        (
            [*RUNS["cnn"], "env.train.drop_observations=[mission]"],
            r"drop_observations: tether/Spot-v0 shows no mission, but only picture, shift\. Correct",
        ),
        ([*RUNS["cnn"], "env.train.drop_observations=[picture]"], r"shows no picture of bytes \(shift \(1,\)\)"),
        (["env.train.id=CartPole-v1", "env.train.drop_observations=[x]"], r"shows no x, but one part only"),
    ],
)  # fmt: skip
def test_bad_input(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_control_run(load_config(None, overrides(tmp_path, *more)))
