"""The notes of a run: keys without effect, the engine that samples, and the printed tree."""

import pytest
import yaml

from tests.config.loading import load
from tether.config import format_tree

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_a_plain_config_needs_no_notes():
    assert load().notes == ()


def test_settings_of_elsewhere_are_noted_once_for_each_reason():
    utilization, eager = f"{ROLLOUT}.gpu_memory_utilization=0.4", f"{ROLLOUT}.enforce_eager=True"
    server, devices = load(utilization, eager, "trainer.balance_batch=False").notes
    assert server.startswith(f"no effect: {utilization}, {eager} ({ROLLOUT}.name is native)")
    assert devices.startswith(
        "no effect: trainer.balance_batch=False (trainer.n_gpus_per_node is 1 and trainer.nnodes is 1"
    )


def test_a_default_that_is_written_out_is_not_noted():
    assert load(f"{ROLLOUT}.gpu_memory_utilization=0.5", f"{ACTOR}.fsdp_config.param_offload=False").notes == ()


def test_another_engine_is_never_silently_replaced():
    assert load(f"{ROLLOUT}.name=vllm").notes == ()
    assert load(f"{ROLLOUT}.name=hf").notes == (
        f"{ROLLOUT}.name=hf: the native engine samples instead, also of a model of transformers",
    )


def test_two_penalties_for_the_same_distance_are_noted():
    """verl's pages say that with the one in the loss there is none in the reward."""
    both = ["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.2"]
    (note,) = load(*both).notes
    assert "both penalties act (0.001 in the reward, 0.2 in the loss)" in note
    assert load(*both[:1]).notes == load(*both[1:]).notes == ()


def test_an_aggregation_that_the_loss_does_not_take_is_noted():
    """verl aggregates such a loss as it is defined, and the entropy bonus and the KL by the key."""
    other = f"{ACTOR}.loss_agg_mode=token-mean"
    (note,) = load(f"{ACTOR}.policy_loss.loss_mode=gspo", other).notes
    assert note.startswith(
        f"{other} with {ACTOR}.policy_loss.loss_mode=gspo: the policy loss is aggregated by seq-mean-"
    )
    assert load(f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean").notes == ()


def test_a_critic_that_distillation_alone_does_not_use_is_noted():
    teacher = ["distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path=large"]
    alone = [*teacher, "distillation.distillation_loss.use_task_rewards=False"]
    (note,) = load(*alone).notes
    assert "nothing learns from the critic that algorithm.adv_estimator=gae trains" in note
    assert load(*teacher).notes == load(*alone, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2").notes == ()


def test_a_lower_clip_that_no_ratio_reaches_is_noted():
    low = f"{ACTOR}.clip_ratio_low=10"
    (note,) = load(low).notes
    assert note == f"{low}.0: nothing is clipped below, as no ratio of probabilities is below 1 - 10"
    assert load(f"{ACTOR}.clip_ratio_low=1").notes == ()
    assert load(low, f"{ACTOR}.policy_loss.loss_mode=geo_mean").notes == ()  # its clip is of log-ratios


@pytest.mark.parametrize(
    ("context", "setting", "reason"),
    [
        ([], f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.use_kl_loss is False"),
        ([], "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward is False"),
        ([], "actor_rollout_ref.rollout.trace.token2text=True", "traces of conversations are not supported yet"),
        (["data.val_files=[]"], "trainer.val_before_train=False", "data.val_files is [] and env.train.id is null"),
        (
            ["data.val_files=[]"],
            "trainer.keep_best=True",
            "trainer.test_freq is -1 and data.val_files is [] and env.train.id is null",
        ),
        (
            [f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.name=vllm"],
            f"{ROLLOUT}.multi_turn.max_kept_tokens=7",
            f"{ROLLOUT}.name is vllm",
        ),
        ([], "trainer.async_save=True", "trainer.save_freq is -1"),
        (["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"], "critic.optim.lr=0.1", "critic.enable is False"),
        (
            [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.3"],
            f"{ACTOR}.clip_ratio=0.1",
            "clip_ratio_low and clip_ratio_high are set",
        ),
    ],
)
def test_a_key_whose_switch_is_off_is_noted(context, setting, reason):
    assert load(*context, setting).notes == (f"no effect: {setting} ({reason})",)


MEGATRON = [f"{ACTOR}.strategy=megatron", "critic.strategy=megatron", "trainer.n_gpus_per_node=2"]


@pytest.mark.parametrize(
    ("engine", "setting", "reason"),
    [
        ([], f"{ACTOR}.fsdp_config.param_offload=True", "trainer.n_gpus_per_node is 1 and trainer.nnodes is 1"),
        ([], "critic.model.fsdp_config.optimizer_offload=True", "trainer.n_gpus_per_node is 1 and trainer.nnodes is 1"),
        (MEGATRON, f"{ACTOR}.fsdp_config.offload_policy=True", f"{ACTOR}.strategy is megatron"),
        (["trainer.n_gpus_per_node=2"], f"{ACTOR}.megatron.grad_offload=True", f"{ACTOR}.strategy is fsdp"),
        (["trainer.n_gpus_per_node=2"], f"{ACTOR}.veomni.param_offload=True", "a setting of another engine"),
        (
            ["trainer.n_gpus_per_node=2"],
            "actor_rollout_ref.model.enable_activation_offload=True",
            "activations are not",
        ),
    ],
)
def test_an_engine_without_the_offload_of_a_key_says_so(engine, setting, reason):
    assert [note for note in load(*engine).notes if "offload" in note] == []
    (note,) = (note for note in load(*engine, setting).notes if "offload" in note)
    assert note.startswith(f"no effect: {setting} ({reason}")


def test_an_engine_with_the_offload_of_a_key_notes_nothing():
    sharded = [f"{ACTOR}.fsdp_config.{name}=True" for name in ("param_offload", "optimizer_offload", "offload_policy")]
    assert [note for note in load("trainer.n_gpus_per_node=2", *sharded).notes if "offload" in note] == []
    megatron = [f"{ACTOR}.megatron.{name}_offload=True" for name in ("param", "grad", "optimizer")]
    assert [note for note in load(*MEGATRON, *megatron).notes if "offload" in note] == []


def test_a_key_whose_switch_is_on_is_not_noted():
    assert load(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1").notes == ()


def test_the_tree_is_yaml_with_sources():
    loaded = load("trainer.seed=3", f"{ROLLOUT}.gpu_memory_utilization=0.4")
    text = format_tree(loaded)
    tree = yaml.safe_load(text)
    assert tree["trainer"]["seed"] == tree["data"]["seed"] == 3
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if "#" in line}
    assert lines["clip_ratio_low"].endswith("# inherits actor_rollout_ref.actor.clip_ratio")
    assert lines["total_epochs"].endswith("# default")
    assert "  seed: 3" in text
    assert text.splitlines()[-1].startswith("# note: no effect: actor_rollout_ref.rollout.gpu_memory_utilization=0.4")
    assert "megatron" not in text
    assert "keys at their default that do nothing in this run" in text


AHEAD = "trainer.async_mode=one_step_off"


def test_stale_responses_that_nothing_corrects_are_noted():
    (note,) = load(AHEAD).notes
    assert note.startswith("trainer.async_mode=one_step_off: responses come from older weights, and nothing corrects")


@pytest.mark.parametrize(
    "correction",
    [
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{ACTOR}.policy_loss.loss_mode=decoupled",
    ],
)
def test_stale_responses_that_something_corrects_are_not_noted(correction):
    assert not any("nothing corrects" in note for note in load(AHEAD, correction).notes)


def test_a_staleness_that_cannot_act_is_noted():
    """Sampling exactly one step off has no other one; of 0 there is no asynchronous mode at all."""
    stale, corrected = f"{ROLLOUT}.max_staleness=4", "algorithm.rollout_correction.rollout_is=token"
    assert load(AHEAD, corrected, stale).notes == (f"no effect: {stale} (trainer.async_mode is one_step_off)",)
    assert load(stale).notes == (f"no effect: {stale} (trainer.async_mode is off)",)


def test_a_parity_freq_that_cannot_act_is_noted():
    settings = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.parity_freq=2", "algorithm.rollout_correction.rollout_is=token")
    assert not load(*settings).notes
    assert load(AHEAD, *settings).notes == (
        f"no effect: {ROLLOUT}.parity_freq=2 (trainer.async_mode=one_step_off: only the first weights are compared)",
    )
