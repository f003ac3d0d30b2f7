"""recipes/one_file: each file makes the same weights as the trainer does from the same settings, bit for bit."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runs.tiny_run import rows, same, write_inputs, write_jsonl
from tether.config import load_config
from tether.control.build import build_control_run
from tether.control.policies.mlp_policy import load_policy
from tether.runtime.objects import register_objects
from tether.text.build import build_run
from tether.text.models.load import load_causal_lm, load_tokenizer
from tether.text.models.model_path import resolve_model_path

FOLDER = Path(__file__).resolve().parents[2] / "recipes/one_file"


def load_file(name):
    """Import a file of the recipe as a module."""
    spec = importlib.util.spec_from_file_location(f"one_file_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def share_of_letters(data_source, solution_str, ground_truth, extra_info=None):
    """The reward of the trainer's run."""
    return sum(character.isalpha() for character in solution_str) / 8


def equivalent(args, run):
    """Return the overrides of the trainer that mean the same as the settings of ppo.py."""
    policy, actor, critic = "actor_rollout_ref", "actor_rollout_ref.actor", "critic"
    values = {
        f"{policy}.model.path": args.model,
        f"{critic}.model.path": args.model,
        "data.train_files": args.train_data,
        "data.val_files": args.eval_data,
        "data.train_batch_size": args.batch_size,
        "data.max_prompt_length": args.max_prompt_length,
        "data.max_response_length": args.max_response_length,
        "data.seed": args.seed,
        "trainer.seed": args.seed,
        "trainer.device": args.device,
        "trainer.total_training_steps": args.steps,
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": args.gamma,
        "algorithm.lam": args.lam,
        "algorithm.use_kl_in_reward": args.kl_reward_coef > 0,
        "algorithm.kl_penalty": args.kl_reward_estimator,
        "algorithm.kl_ctrl.kl_coef": args.kl_reward_coef,
        f"{policy}.rollout.n": args.responses,
        f"{policy}.rollout.temperature": args.temperature,
        f"{actor}.use_kl_loss": args.kl_loss_coef > 0,
        f"{actor}.kl_loss_type": args.kl_loss_estimator,
        f"{actor}.kl_loss_coef": args.kl_loss_coef,
        f"{actor}.clip_ratio": args.clip_ratio,
        f"{critic}.cliprange_value": args.cliprange_value,
        f"{policy}.model.enable_gradient_checkpointing": False,
        f"{critic}.model.enable_gradient_checkpointing": False,
        f"{critic}.model.use_remove_padding": True,
        f"{actor}.use_dynamic_bsz": True,
    }
    for section, rate in ((actor, args.actor_lr), (critic, args.critic_lr)):
        values |= {
            f"{section}.ppo_epochs": args.epochs,
            f"{section}.ppo_mini_batch_size": args.mini_batch_size,
            f"{section}.ppo_max_token_len_per_gpu": args.max_tokens,
            f"{section}.optim.lr": rate,
            f"{section}.optim.lr_scheduler_type": "linear",
            f"{section}.optim.weight_decay": args.weight_decay,
            f"{section}.optim.clip_grad": args.max_grad_norm,
        }
    for section in (f"{policy}.actor.fsdp_config", f"{policy}.ref.fsdp_config", f"{policy}.rollout"):
        values[f"{section}.dtype"] = args.dtype
    values[f"{critic}.model.fsdp_config.dtype"] = args.dtype
    values |= {
        "custom_reward_function.path": "object:letters",
        "trainer.num_threads": 1,
        "trainer.logger": "file",
        "trainer.save_freq": 0,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.default_local_dir": run,
    }
    return [f"{key}={value}" for key, value in values.items()]


def copied(model):
    """The weights of a model, which may go on learning."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def first_and_others(changes):
    """Return the first change of the settings, which moves the weights, and the others as a slow test."""
    return [pytest.param(changes[:1], id="first"), pytest.param(changes[1:], id="others", marks=pytest.mark.slow)]


CHANGES = [{"lam": 0.95}, {"kl_loss_coef": 0.0}, {"clip_ratio": 0.1}, {"kl_reward_coef": 0.05}]


@pytest.mark.parametrize("changes", first_and_others(CHANGES))
def test_ppo_makes_the_weights_of_the_trainer(changes, tmp_path):
    ppo, inputs = load_file("ppo"), write_inputs(tmp_path)
    args = ppo.Args(
        model=str(inputs / "model"),
        train_data=str(inputs / "train.jsonl"),
        eval_data=str(inputs / "val.jsonl"),
        device="cpu",
        dtype="float32",
        steps=2,
        eval_every=2,
        batch_size=4,
        responses=3,
        max_prompt_length=64,
        max_response_length=8,
        temperature=0.9,
        gamma=0.99,
        lam=0.9,
        kl_reward_coef=0.1,
        kl_loss_coef=0.05,
        epochs=2,
        mini_batch_size=2,
        max_tokens=64,
        cliprange_value=0.1,
        actor_lr=1e-2,
        critic_lr=5e-3,
        weight_decay=0.05,
        max_grad_norm=0.5,
    )
    with register_objects({"letters": share_of_letters}):
        run = build_run(load_config(None, equivalent(args, tmp_path / "run")))
    try:
        run.trainer.fit()
        expected = [copied(learner.engine.model) for learner in (run.trainer.actor, run.trainer.critic)]
    finally:
        run.close()

    def weights(args):
        policy, critic, _ = ppo.train(args, lambda prompt, response: share_of_letters("", response, None))
        return [copied(policy.model), copied(critic.model)]

    assert same(weights(args), expected)
    for change in changes:
        actor, _ = weights(replace(args, **change))
        assert not same(actor, expected[0]), change


CONTROL_CHANGES = [{"lam": 0.9}, {"value_coef": 0.25}, {"clip_ratio": 0.1}, {"seed": 2}]


@pytest.mark.parametrize("changes", first_and_others(CONTROL_CHANGES))
def test_ppo_control_makes_the_weights_of_the_trainer(changes, tmp_path):
    pytest.importorskip("gymnasium")
    ppo = load_file("ppo_control")
    args = ppo.Args(steps=4, eval_every=3, eval_episodes=2, num_envs=4, rollout_steps=64, hidden_dim=16, epochs=2)
    args = replace(args, mini_batch_size=64, lr=1e-2, gamma=0.95)
    actor = "actor_rollout_ref.actor"
    values = {
        "env.train.id": args.env,
        "env.train.seed": args.seed,
        "env.train.total_num_envs": args.num_envs,
        "env.train.max_steps_per_rollout_epoch": args.rollout_steps,
        "policy.hidden_dim": args.hidden_dim,
        "policy.num_layers": args.num_layers,
        "policy.critic_hidden_dim": args.hidden_dim,
        "policy.critic_num_layers": args.num_layers,
        "policy.activation": args.activation,
        "algorithm.gamma": args.gamma,
        "algorithm.lam": args.lam,
        f"{actor}.ppo_epochs": args.epochs,
        f"{actor}.ppo_mini_batch_size": args.mini_batch_size,
        f"{actor}.clip_ratio": args.clip_ratio,
        f"{actor}.entropy_coeff": 0.0,
        f"{actor}.optim.lr": args.lr,
        f"{actor}.optim.clip_grad": args.max_grad_norm,
        "critic.loss_coef": args.value_coef,
        "critic.optim.lr": args.lr,
        "trainer.seed": args.seed,
        "trainer.total_training_steps": args.steps,
        "trainer.save_freq": 0,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.logger": "file",
        "trainer.default_local_dir": tmp_path / "run",
    }
    run = build_control_run(load_config(None, [f"{key}={value}" for key, value in values.items()]))
    try:
        run.trainer.fit()
        expected = copied(run.trainer.actor.engine.policy)
    finally:
        run.close()
    assert same(copied(ppo.train(args)), expected)
    for change in changes:
        assert not same(copied(ppo.train(replace(args, **change))), expected), change


def test_what_the_commands_save_is_read(tmp_path, capsys):
    pytest.importorskip("gymnasium")
    inputs, model, policy = write_inputs(tmp_path), tmp_path / "saved", tmp_path / "saved_policy"
    data = write_jsonl(tmp_path / "rows.jsonl", rows("openai/gsm8k", 4))  # which has a rule
    small = ["--steps", "1", "--batch-size", "2", "--responses", "2", "--device", "cpu", "--dtype", "float32"]
    files = ["--model", f"{inputs / 'model'}", "--train-data", f"{data}", "--eval-data", f"{data}"]
    load_file("ppo").main([*files, *small, "--save-to", f"{model}"])
    path = resolve_model_path(str(model), tmp_path)  # as `tether generate` does
    assert load_tokenizer(path).chat_template
    before, after = (load_causal_lm(each, dtype=torch.float32).state_dict() for each in (inputs / "model", path))
    assert before.keys() == after.keys()
    assert not same(before, after)
    small = ["--steps", "1", "--rollout-steps", "32", "--eval-episodes", "1", "--hidden-dim", "8"]
    load_file("ppo_control").main([*small, "--save-to", f"{policy}"])
    assert load_policy(policy).spec.hidden_dim == 8
    assert capsys.readouterr().out.count("saved to") == 2
