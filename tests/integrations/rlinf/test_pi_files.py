"""RLinf's PPO files of pi0 and pi0.5 in LIBERO and MetaWorld: what they become, and a run of one, scaled down."""

import os

import pytest

from tests.control.envs import libero_stand_in
from tests.integrations.rlinf.pi_files import FILES, REUSED, text_of
from tests.integrations.robots.flow.fake import FakeBackbone
from tests.runs.tiny_run import measured
from tether.config import load_config
from tether.control.build import build_control_run
from tether.integrations.robots.flow import backbone

ASYNC = "trainer.async_mode", "actor_rollout_ref.rollout.max_staleness", "trainer.critic_warmup"


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_whole_and_loads(name, imported, tmp_path):
    result = imported(text_of(FILES[name]))
    assert (result.problems, result.refusals()) == ((), [])
    config = load_config(tmp_path / "run.yaml", []).config
    train, test, policy = config.env.train, config.env.eval, config.policy
    assert config.policy.model_type == ("pi05" if name.endswith("pi05") else "pi0")
    assert policy.relative_actions == (6 if "libero" in name and policy.model_type == "pi0" else 0)
    assert policy.discrete_state_input == (policy.model_type == "pi0")
    assert (train.auto_reset, train.use_fixed_reset_state_ids, train.use_rel_reward) == (False, False, True)
    assert test.ignore_terminations
    assert test.num_episodes == 500
    if "libero" in name:
        assert train.id == test.id == name.partition("_ppo")[0].removesuffix("_async")
        assert train.init_params == test.init_params == {
            "cameras": ["agentview", "robot0_eye_in_hand"], "mirrored": True, "state": "hand", "instruction": True,
            "settling_steps": 15, "camera_heights": 256, "camera_widths": 256,
        }  # fmt: skip
    else:
        assert (train.id, test.id) == (("ML45-train", "ML45-test") if "45" in name else ("MT50", "MT50"))
        assert train.init_params == test.init_params == {
            "camera": "corner2", "camera_position": [0.75, 0.075, 0.7], "picture_size": 480, "rotated": True,
            "shadows": True, "instructions": "sentences", "settling_steps": 16, "reward": "success",
            "terminate_on_success": True,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("libero_spatial_ppo_openpi", (None, None, 0)),
        ("libero_spatial_async_ppo_openpi_pi05", ("fully_async", 1, 0)),
        # 128 x 240 / 5 decisions are 3 mini-batches of 2048, twice: 30 optimizer steps are 5 training steps.
        ("libero_object_async_ppo_openpi_pi05", ("fully_async", 2, 6)),
    ],
)
def test_asynchronous_files_sample_while_the_policy_learns(name, wanted, imported):
    native = imported(text_of(FILES[name])).native
    assert tuple(native.get(key) for key in ASYNC) == wanted
    assert native["actor_rollout_ref.actor.policy_loss.loss_mode"] == ("decoupled" if wanted[0] else "vanilla")


LIBERO = text_of(FILES["libero_spatial_ppo_openpi"])
METAWORLD = text_of(FILES["metaworld_50_ppo_openpi"])
TRAIN = "env.train"


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        (LIBERO, f"{TRAIN}.task_suite_name=libero_130", "suites are libero_spatial"),
        (LIBERO, f"{TRAIN}.use_step_penalty=True", "costs nothing"),
        (LIBERO, f"{TRAIN}.reset_gripper_open=False", "open at the start"),
        (LIBERO, f"{TRAIN}.specific_reset_id=0", "those of all tasks"),
        (LIBERO, f"+{TRAIN}.task_id_filter=[0]", "SUITE/NUMBER"),
        (LIBERO, f"+{TRAIN}.libero_variant=plus", "LIBERO-Plus"),
        (LIBERO, f"{TRAIN}.use_ordered_reset_state_ids=True", "drawn at random"),
        (LIBERO, f"{TRAIN}.is_eval=True", "drawn at random|draws its start states"),
        (LIBERO, "algorithm.staleness_threshold=2", None),
        (METAWORLD, f"{TRAIN}.task_suite_name=metaworld_1", "metaworld_45_ind"),
        (LIBERO, "actor.model.openpi.config_name=pi0_aloha_robotwin", "relative to the state"),
        (LIBERO, "actor.optim.critic_warmup_steps=7", "counts optimizer steps"),
        (text_of(REUSED), "runner.max_epochs=9", "beyond their step"),
    ],
)
def test_what_is_not_done_is_refused_by_name(text, override, says, imported):
    found = imported(text, override).refusals()
    if says is None:
        assert found == []
        return
    key = override.lstrip("+").split("=")[0]
    key = "algorithm.rollout_store_size_per_rank" if key == "runner.max_epochs" else key
    assert [problem.path for problem in found] == [key]
    assert any(part in str(found[0]) for part in says.split("|"))


@pytest.mark.parametrize(("fixed", "auto_reset"), [(True, True), (False, False)])
def test_start_states_that_rlinf_repeats_are_refused(fixed, auto_reset, imported):
    changed = [f"{TRAIN}.use_fixed_reset_state_ids={fixed}", f"{TRAIN}.auto_reset={auto_reset}"]
    groups = [] if auto_reset else [f"{TRAIN}.group_size=8", "algorithm.group_size=8"]
    (problem,) = imported(METAWORLD, *changed, *groups).refusals()
    assert problem.path == f"{TRAIN}.use_fixed_reset_state_ids"


def test_rollouts_that_go_on_are_not_sampled_ahead(imported):
    (problem,) = imported(LIBERO, "+algorithm.staleness_threshold=1", f"{TRAIN}.auto_reset=True").refusals()
    assert problem.path == "algorithm.staleness_threshold"


def test_another_task_of_the_simulator_keeps_how_it_is_seen(imported):
    result = imported(LIBERO, f"{TRAIN}.id=libero_goal/3")
    assert (result.problems, result.refusals()) == ((), [])
    assert result.native["env.train.id"] == "libero_goal/3"
    assert "env.eval.id" not in result.native  # which is then that of training
    assert result.native["env.train.init_params"]["settling_steps"] == 15


def test_what_differs_is_said(imported):
    remarks = "\n".join(imported(METAWORLD).remarks())
    for what in ("holds pi0 and pi0.5 in bf16", "draws 50 goals", "each task of the suite equally often"):
        assert what in remarks


SMALL = [
    "env.train.total_num_envs=4", "env.train.rollout_epoch=2", "env.train.max_steps_per_rollout_epoch=10",
    "env.train.max_episode_steps=10", "env.eval.total_num_envs=2", "env.eval.max_episode_steps=10",
    "env.eval.max_steps_per_rollout_epoch=10", "env.eval.video_cfg.save_video=False", "actor.global_batch_size=8",
    "actor.micro_batch_size=8", "algorithm.update_epoch=1", "runner.max_epochs=2", "runner.val_check_interval=2",
    "runner.save_interval=2", "runner.logger.logger_backends=[]", "actor_rollout_ref.model.path=null",
    "policy.hidden_dim=16", "env.train.init_params.camera_heights=2", "trainer.logger=file",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif("MUJOCO_GL" not in os.environ, reason="pictures are drawn with MUJOCO_GL=egl or osmesa")
def test_a_file_of_metaworld_is_run_scaled_down(monkeypatch, tmp_path):
    """With a small backbone, where MetaWorld is installed."""
    pytest.importorskip("metaworld")
    monkeypatch.setattr(backbone, "make_backbone", FakeBackbone)
    file = tmp_path / "run.yaml"
    file.write_text(text_of(FILES["metaworld_45_ppo_openpi"]))
    small = [item for item in SMALL if "camera_heights" not in item]
    run = build_control_run(load_config(file, [*small, f"trainer.default_local_dir={tmp_path / 'run'}"]))
    try:
        run.trainer.fit()
    finally:
        run.close()
    metrics = measured(tmp_path / "run")[2]
    assert (metrics["env/episode_len"], metrics["eval/num_trajectories"]) == (10, 2)


@pytest.mark.parametrize("name", ["libero_spatial_ppo_openpi", "libero_spatial_async_ppo_openpi_pi05"])
def test_a_file_is_run_scaled_down(name, monkeypatch, tmp_path):
    """With a stand-in for LIBERO and a small backbone; the stand-in solves its tasks in the 13th step after a start."""
    libero_stand_in.install(monkeypatch)
    monkeypatch.setattr(backbone, "make_backbone", FakeBackbone)
    file = tmp_path / "run.yaml"
    file.write_text(text_of(FILES[name]))
    run = build_control_run(load_config(file, [*SMALL, f"trainer.default_local_dir={tmp_path / 'run'}"]))
    try:
        assert [part.name for part in run.trainer.actor.engine.policy.spec.layout] == [
            "agentview", "robot0_eye_in_hand", "state", "task"
        ]  # fmt: skip
        run.trainer.fit()
    finally:
        run.close()
    metrics = measured(tmp_path / "run")[2]
    assert metrics["env/episode_len"] == 10  # 15 idle steps passed the stand-in's success
    assert metrics["eval/num_trajectories"] == 2
    assert ("training/staleness" in metrics) == ("async" in name)
