"""Embodied runs as a whole: they learn in every action space, resume exactly, and say what is wrong."""

import json
import shutil
import sys

import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from safetensors.torch import load_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from tests.control.envs import toys  # noqa: E402
from tests.control.envs.test_workers import kill  # noqa: E402
from tests.runs.control_run import assert_resume_is_exact, contents, train, without_clocks  # noqa: E402
from tests.runs.tiny_run import measured, same  # noqa: E402
from tether.algorithms import discounted_sums  # noqa: E402
from tether.commands.cli import app  # noqa: E402
from tether.config import load_config  # noqa: E402
from tether.control.build import build_control_run  # noqa: E402
from tether.control.learning.advantages import RewardScaler  # noqa: E402
from tether.control.learning.rollouts import POLICY  # noqa: E402

ACTOR = "actor_rollout_ref.actor"
SMALL = [
    "env.train.total_num_envs=4",
    "env.train.max_steps_per_rollout_epoch=16",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "trainer.logger=file",
    "trainer.log_freq=1",
]


@pytest.fixture(autouse=True)
def _toys():
    toys.register()


def learned(folder, name, steps, *more):
    """The mean return of episodes without noise after some training steps."""
    run = train(
        [
            f"env.train.id=tether/{name}-v0", "env.train.total_num_envs=16", "env.eval.num_episodes=100",
            f"{ACTOR}.ppo_mini_batch_size=48", f"{ACTOR}.optim.lr=1e-2", f"{ACTOR}.entropy_coeff=0",
            f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", f"trainer.test_freq={steps}",
            "trainer.val_before_train=False", "trainer.logger=file", f"trainer.default_local_dir={folder}", *more,
        ]
    )  # fmt: skip
    return measured(run.directory)[steps]["eval/return"]


@pytest.mark.slow  # chunks of choices are learned below, numbers by noise that depends on the state, and both at once
@pytest.mark.parametrize("space", toys.SPACES)
def test_identity_is_learned(space, tmp_path):
    more = ["env.train.max_steps_per_rollout_epoch=16", "algorithm.gamma=0", "trainer.val_before_train=True"]
    if space == "box":
        more += [f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.ppo_epochs=4", "policy.init_logstd=-1"]
    else:  # a choice that is given up early never comes back
        more += [f"{ACTOR}.ppo_mini_batch_size=128", f"{ACTOR}.entropy_coeff=0.02"]
    assert learned(tmp_path, f"Identity-{space}", 25, *more) > 0.93
    assert measured(tmp_path)[0]["eval/return"] < 0.9


CHUNKS = ["policy.num_action_chunks=3", "env.train.max_steps_per_rollout_epoch=12", "algorithm.gamma=0.5"]


@pytest.mark.parametrize(
    ("level", "shared"), [("action_level", True), pytest.param("chunk_level", False, marks=pytest.mark.slow)]
)
def test_a_chunk_is_learned(level, shared, tmp_path):
    # Without chunks nobody could do better than one bit and two guesses.
    levels = [f"algorithm.{kind}_type={level}" for kind in ("reward", "logprob", "entropy")]
    assert learned(tmp_path, "Recite", 30, *CHUNKS, *levels, f"policy.share_critic={shared}") > 2.9


def test_groups_teach_without_a_critic(tmp_path):
    groups = [
        "algorithm.adv_estimator=grpo", "env.train.auto_reset=False", "env.train.group_size=8",
        "env.train.max_steps_per_rollout_epoch=3", "env.train.rollout_epoch=4", "policy.num_action_chunks=3",
    ]  # fmt: skip
    assert learned(tmp_path, "Recite", 40, *groups) > 2.9


def overrides(folder, *more):
    return [
        "env.train.id=CartPole-v1", *SMALL, "trainer.total_training_steps=6", "trainer.save_freq=2",
        "trainer.test_freq=3", "env.eval.num_episodes=3", "policy.normalize_observations=True",
        "policy.normalize_rewards=True", f"trainer.default_local_dir={folder}", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run, with a checkpoint of every second step; to be read only."""
    return train(overrides(tmp_path_factory.mktemp("control") / "whole")).directory


@pytest.mark.slow  # callbacks that raise leave the loop, too
def test_a_run_that_an_error_ended_continues_as_if_nothing_had_been(whole, tmp_path):
    failed = build_control_run(load_config(None, overrides(tmp_path / "failed")))

    def fail_after_three_steps():
        assert failed.trainer.step_number < 3, "failed"
        return False

    with pytest.raises(AssertionError, match="failed"):
        failed.trainer.fit(fail_after_three_steps)
    failed.close()
    again = train(overrides(tmp_path / "failed"))
    assert again.resumed_from == tmp_path / "failed" / "global_step_3"
    assert same(contents(whole / "global_step_6"), contents(again.directory / "global_step_6"))
    assert without_clocks(whole) == without_clocks(again.directory)


OPTIONS = {
    "chunks, and a rate that the KL leads": [
        "policy.num_action_chunks=2", "env.train.use_rel_reward=True", "policy.share_critic=True",
        f"{ACTOR}.target_kl=1e-3", f"{ACTOR}.target_kl_control=lr",
    ],
    "episodes that begin with the rollout": [
        "env.train.auto_reset=False", "env.train.rollout_epoch=2", "env.train.group_size=2",
        "algorithm.filter_rewards=True", "algorithm.rewards_upper_bound=12",
    ],
    "groups": [
        "algorithm.adv_estimator=grpo", "env.train.auto_reset=False", "env.train.group_size=2",
        "env.train.use_fixed_reset_state_ids=True",
    ],
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resuming_is_exact_with_every_option(options, tmp_path):
    settings = ["trainer.total_training_steps=3", "trainer.test_freq=-1", "trainer.val_before_train=False", *options]
    assert_resume_is_exact(tmp_path, overrides(tmp_path, *settings), total=3)


@pytest.mark.slow  # signals do that to both loops
def test_a_run_stopped_between_its_checkpoints_saves_and_goes_on(tmp_path):
    short = ["trainer.total_training_steps=2"]
    train(overrides(tmp_path, *short), until=1)
    assert (tmp_path / "global_step_1").is_dir()
    again = train(overrides(tmp_path, *short))
    assert again.resumed_from == tmp_path / "global_step_1"
    assert again.trainer.step_number == 2
    assert again.trainer.rollouts.env_steps == 2 * 4 * 16


def test_seeds_decide_everything(whole, tmp_path):
    first = without_clocks(whole)
    second = train(overrides(tmp_path / "second"), until=2)
    other = train(overrides(tmp_path / "other", "trainer.seed=2"), until=1)
    assert without_clocks(second.directory) == {step: first[step] for step in (0, 1, 2)}
    assert without_clocks(other.directory)[1] != first[1]


def test_the_first_ratio_is_one(tmp_path):
    run = build_control_run(
        load_config(None, overrides(tmp_path, f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=64"))
    )
    run.trainer.rollouts.begin(0)
    metrics = run.trainer.advance()
    run.close()
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/ratio_min"] == pytest.approx(1.0, abs=1e-6)


def test_command_line(tmp_path):
    runner = CliRunner()
    shown = runner.invoke(app, ["train", *overrides(tmp_path)], env={"GLIBC_TUNABLES": "x=1"})
    assert shown.exit_code == 0, shown.output
    assert "CartPole-v1: 4 environments" in shown.output
    assert "environment steps per second" in shown.output
    shown = runner.invoke(app, ["eval", str(tmp_path), "env.eval.num_episodes=5"])
    assert shown.exit_code == 0, shown.output
    assert "eval/return_low" in shown.output
    saved = json.loads((tmp_path / "eval_global_step_6.json").read_text())
    assert saved["metrics"]["eval/num_trajectories"] == 5


def test_episodes_are_recorded(tmp_path):
    imageio = pytest.importorskip("imageio.v2")
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    record = "env.eval.video_cfg.save_video=True"
    short = ["trainer.total_training_steps=1", "trainer.test_freq=1", "env.eval.max_episode_steps=9"]
    run = train(overrides(tmp_path, *short, record), until=1)
    run.trainer.loggers.close()
    shown = CliRunner().invoke(app, ["play", str(tmp_path), "-n", "2", "-o", str(tmp_path / "here")])
    assert shown.exit_code == 0, shown.output
    assert "global_step_1.mp4" in shown.output.replace("\n", "")
    played = imageio.get_reader(tmp_path / "here" / "global_step_1.mp4")
    assert played.get_meta_data()["codec"] == "h264"
    steps = float(shown.output.split("eval/episode_len")[1].split()[0])
    assert played.count_frames() == 2 * steps + 1
    assert (tmp_path / "video" / "step_0.mp4").stat().st_size > 1000
    copied = shutil.copytree(tmp_path, tmp_path / "copied")
    assert CliRunner().invoke(app, ["play", str(copied), "-n", "1"]).exit_code == 0
    assert (copied / "video" / "global_step_1.mp4").exists()
    assert not (tmp_path / "video" / "global_step_1.mp4").exists(), "nothing is written into the run that was copied"


def test_a_worker_that_dies_costs_its_episodes_only(tmp_path):
    run = build_control_run(load_config(None, overrides(tmp_path, "env.train.vectorization=subprocess")))
    run.trainer.rollouts.begin(0)
    run.trainer.advance()
    env = run.trainer.rollouts.collector.env
    kill(env, 0)
    with pytest.warns(RuntimeWarning, match="is replaced"):
        metrics = run.trainer.advance()
    lost = env._workers[0].rows.stop
    assert run.trainer.rollouts.env_steps == 2 * 4 * 16 - lost
    assert metrics["actor/skipped_updates"] == 0
    run.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["env.train.id=CartPol-v1"], r"env\.train\.id: no .* registered as CartPol-v1\. Did you mean CartPole"),
        (
            ["env.eval.id=tether/Recite-v0", "env.eval.video_cfg.save_video=True", "trainer.test_freq=1"],
            r"env\.eval\.init_params: .*Recite-v0 does not take its .*no pictures, which env\.eval\.video_cfg",
        ),
        (
            ["env.eval.id=tether/Recite-v0", "trainer.test_freq=1"],
            r"eval\.id: tether/Recite-v0 shows state \(3,\) .*the policy reads state \(4,\) and chooses among \(2,\)",
        ),
        (["env.train.init_params.gravity=3"], r"CartPole-v1 does not take its arguments .*: ~env.train.init_params"),
        (
            ["env.train.wrappers=[gymnasium.wrappers:NormalizeObservation]"],
            r"env\.train: NormalizeObservation around CartPole-v1 .* set policy\.normalize_observations=True",
        ),
        (
            ["env.train.wrappers=[]", "env.eval.wrappers=[gymnasium.wrappers:NormalizeReward]", "trainer.test_freq=1"],
            r"env\.eval: NormalizeReward around CartPole-v1 .* set policy\.normalize_rewards=True",
        ),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere"], r"resume_from_path=nowhere"),
    ],
)  # fmt: skip
def test_bad_input(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_control_run(load_config(None, overrides(tmp_path, *more)))


@pytest.mark.parametrize(
    ("given", "preset"),
    [
        (["env.train.id=tether/Identity-box-v0"], (1, 2048, 10, True)),
        pytest.param(
            ["env.train.id=tether/Identity-box-v0", "env.train.vectorization=subprocess"], (1, 2048, 10, True),
            marks=pytest.mark.slow,
        ),
        (["env.train.id=tether/Identity-box-v0", "env.train.total_num_envs=3"], (3, 2048, 10, True)),
        (["env.train.id=tether/Identity-multi-binary-v0"], (8, 128, 4, False)),
    ],
)  # fmt: skip
def test_defaults_fit_the_actions_of_an_environment_whose_id_does_not_tell(given, preset, tmp_path):
    run = build_control_run(load_config(None, [*given, "trainer.logger=file", f"trainer.default_local_dir={tmp_path}"]))
    run.close()
    config = run.loaded.config
    train, policy, epochs = config.env.train, config.policy, config.actor_rollout_ref.actor.ppo_epochs
    shape = (train.total_num_envs, train.max_steps_per_rollout_epoch, epochs, policy.normalize_observations)
    assert shape == preset
    assert config.env.eval.total_num_envs == preset[0]
    assert run.trainer.rollouts.collector.env.num_envs == preset[0]


def test_a_checkpoint_of_another_environment_is_refused(whole):
    with pytest.raises(ValueError, match=r"env\.train\.id: not what .* was trained with"):
        build_control_run(load_config(None, overrides(whole, "env.train.id=Acrobot-v1")))


def test_videos_that_cannot_be_written_are_said_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    more = ["env.eval.video_cfg.save_video=True", "trainer.test_freq=1"]
    with pytest.raises(ValueError, match=r"save_video: videos need .*imageio.*pip install .*\[video\]'"):
        build_control_run(load_config(None, overrides(tmp_path, *more)))


def test_rewards_that_overflow_are_said(tmp_path):
    """1e38 in the place of CartPole's 1; a factor that brings it back is fine."""
    said = []
    big = [
        "env.train.wrappers=[tests.control.envs.stateful:Astronomic]", "trainer.test_freq=-1",
        "trainer.val_before_train=False", "policy.normalize_rewards=False",
    ]  # fmt: skip
    for factor in ("1e-38", "1"):
        more = overrides(tmp_path / factor, *big, f"env.train.reward_coef={factor}")
        run = build_control_run(load_config(None, more))
        run.trainer.loggers.warn = said.append
        run.trainer.fit()
        run.close()
        assert ["has not been updated for 3 steps" in message for message in said] == [True] * (factor == "1")


def test_rewards_are_scaled_by_the_returns_so_far():
    scaler = RewardScaler(num_envs=2, gamma=0.5, clip=1.0)
    rewards = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 1.0]])
    ended = torch.tensor([[False, True, False], [False, False, False]])
    valid = torch.ones(2, 3, dtype=torch.bool)
    sums = torch.tensor([[1.0, 2.5, 3.0], [4.0, 2.0, 2.0]])
    begin = torch.tensor([True, True])
    torch.testing.assert_close(scaler(rewards, begin, ended, valid), (rewards / sums.std()).clamp(max=1.0))
    # The next rollout goes on with the sums of the last one: 1 + 0.5 * 3, and 1 + 0.5 * 2.
    before = torch.tensor([3.0, 2.0])
    more = discounted_sums(torch.ones(2, 1), torch.zeros(2, 1), before, 0.5)
    scale = torch.cat([sums.flatten(), more.flatten()]).std()
    ones = torch.ones(2, 1)
    torch.testing.assert_close(scaler(ones, ~begin, ones.bool(), ones.bool()), (ones / scale).clamp(max=1.0))


def test_clip_range_and_entropy_bonus_fall_over_the_run(tmp_path):
    falls = [f"{ACTOR}.clip_ratio_schedule=linear", f"{ACTOR}.entropy_coeff_schedule=linear"]

    def weights(name, *more):
        steps = ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=-1"]
        task = ["env.train.id=tether/Identity-discrete-v0", f"{ACTOR}.optim.lr_scheduler_type=constant"]
        train([*SMALL, *task, *steps, f"trainer.default_local_dir={tmp_path / name}", *more])
        saved = [tmp_path / name / f"global_step_{step}" for step in (1, 2)]
        return [load_file(checkpoint / POLICY / "policy.safetensors") for checkpoint in saved]

    stay, fall = weights("stay"), weights("fall", *falls)
    assert same(stay[0], fall[0])  # the first step has the whole of both
    assert not same(stay[1], fall[1])
    steps = [measured(tmp_path / "fall")[step] for step in (1, 2)]
    assert [step["actor/clip_ratio_high"] for step in steps] == [0.2, 0.1]
    assert [step["actor/entropy_coeff"] for step in steps] == [0.01, 0.005]


COUNTDOWN = [
    "env.train.id=tether/Countdown-v0",
    "env.train.max_steps_per_rollout_epoch=8",
    "env.train.init_params={ends: 4}",
    f"{ACTOR}.ppo_mini_batch_size=32",
    "trainer.total_training_steps=1",
    "trainer.logger=file",
    "trainer.test_freq=1",
    "env.eval.init_params={ends: 2}",  # where the last step solves the task
    "env.eval.num_episodes=3",
]


IN_PROCESSES = ["env.train.vectorization=subprocess", "env.train.num_workers=2"]


@pytest.mark.parametrize("more", [[], pytest.param(IN_PROCESSES, marks=pytest.mark.slow)], ids=str)
def test_numbers_of_the_last_info_are_logged(more, tmp_path):
    folder = f"trainer.default_local_dir={tmp_path}"
    train([*COUNTDOWN, *more, folder, "env.train.info_metrics=[is_success]"])
    metrics = measured(tmp_path)[1]
    assert metrics["env/info/is_success"] == 0.0
    assert metrics["eval/info/is_success"] == metrics["eval/info/is_success_low"] == 1.0


def test_an_info_metric_that_is_not_told_is_named(tmp_path):
    with pytest.raises(ValueError, match="tells no 'speed' in the info of an episode's last step, but 'is_success'"):
        train([*COUNTDOWN, f"trainer.default_local_dir={tmp_path}", "env.train.info_metrics=[is_success,speed]"])
