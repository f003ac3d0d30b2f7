"""PPO with a critic in a simulator, in one file: copy it, and change what you like.

    python recipes/one_file/ppo_control.py        # CartPole, 10 s on one CPU core

One step, as in `train` below::

    observations -> actions -> rewards -> values -> advantages (GAE) -> update of the policy and the critic

The components are those of `tether train`: `tether.algorithms` has the mathematics, `tether.control` environments and
policies. The complete loop is in this file, and a test checks that its weights are bitwise equal to those of the
trainer. README.md in this folder lists what the trainer adds to it.
"""

import argparse
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from tether.algorithms import POLICY_LOSSES, episodic_gae, explained_variance, masked_whiten, value_loss
from tether.batch import EnvBatch
from tether.control.collecting.collector import EnvCollector
from tether.control.collecting.evaluation import evaluate
from tether.control.envs.make import EnvOptions, make_vector_env
from tether.control.envs.protocol import DiscreteActions, VectorEnv
from tether.control.learning.flat import FlatAdamW, FlatParameters
from tether.control.learning.losses import RolloutForward
from tether.control.policies.mlp_policy import ControlPolicy, save_policy
from tether.control.policies.spec import PolicySpec
from tether.keyed_random import generator, seed_of
from tether.loop.engine import UpdatePlan
from tether.observations import row_width


@dataclass(frozen=True)
class Args:
    """The settings, each with the equivalent key of `tether train` (actor = actor_rollout_ref.actor)."""

    env: str = "CartPole-v1"  # env.train.id
    save_to: str = "one_file_policy"
    seed: int = 1  # trainer.seed, env.train.seed

    steps: int = 100  # trainer.total_training_steps
    eval_every: int = 25  # trainer.test_freq
    eval_episodes: int = 20  # env.eval.num_episodes
    num_envs: int = 8  # env.train.total_num_envs
    rollout_steps: int = 128  # env.train.max_steps_per_rollout_epoch: steps of each environment per training step
    hidden_dim: int = 64  # policy.hidden_dim
    num_layers: int = 2  # policy.num_layers
    activation: str = "tanh"  # policy.activation

    gamma: float = 0.99  # algorithm.gamma
    lam: float = 0.95  # algorithm.lam
    epochs: int = 4  # actor.ppo_epochs
    mini_batch_size: int = 256  # actor.ppo_mini_batch_size
    clip_ratio: float = 0.2  # actor.clip_ratio
    value_coef: float = 0.5  # critic.loss_coef
    lr: float = 1e-3  # actor.optim.lr, critic.optim.lr
    max_grad_norm: float = 0.5  # actor.optim.clip_grad


@dataclass(frozen=True)
class Samples:
    """The decisions of a rollout, one per row."""

    obs: Tensor
    actions: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor

    def __getitem__(self, rows: Tensor) -> "Samples":
        return Samples(*(column[rows] for column in vars(self).values()))


def train(args: Args) -> ControlPolicy:
    """Train a policy with its critic, and return it."""
    env, eval_env = (make_vector_env(EnvOptions(args.env, args.num_envs)) for _ in range(2))
    policy = make_policy(env, args)
    # All parameters are views of one vector, so that an optimizer step takes a handful of kernels.
    parameters = FlatParameters(policy.parameter_groups())
    optimizer = FlatAdamW(parameters, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0)
    collector = EnvCollector(env, args.rollout_steps)
    collector.restart(seed_of(args.seed, 0, "start"))
    plan = UpdatePlan(args.mini_batch_size, args.epochs, shuffle=True, seed=args.seed)

    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        # Episodes continue where the last rollout ended. The noise depends only on the seed and the step.
        noise = policy.head.noise(collector.noise_shape, generator(args.seed, step, "noise"))
        batch = collector.collect(policy.acting(), noise)
        batch.update_from(RolloutForward()(policy, batch))  # log-probs of the actions, and values
        samples = advantages_of(batch, args)

        lr = args.lr * (1 - (step - 1) / args.steps)  # decays linearly to zero
        for epoch in range(args.epochs):
            for rows in plan.mini_batches(len(samples.obs), step - 1, epoch):
                parameters.grads.zero_()
                backward(policy, samples[rows], args)
                optimizer.clip_(args.max_grad_norm)
                optimizer.step([lr, lr])

        returns = [episode.reward for episode in batch.episodes]
        variance = explained_variance(samples.values, samples.returns, torch.ones_like(samples.values))
        print(
            f"step {step:3}  return {fmean(returns) if returns else float('nan'):6.1f}  "
            f"explained variance {variance:5.2f}  {time.perf_counter() - start:.2f} s",
            flush=True,
        )
        if step % args.eval_every == 0 or step == args.steps:
            episodes = evaluate(eval_env, policy.acting(), args.eval_episodes, seed=10000)
            print(
                f"step {step:3}  return without noise {fmean(episode.reward for episode in episodes):.1f}", flush=True
            )
    env.close()
    eval_env.close()
    return policy


def make_policy(env: VectorEnv, args: Args) -> ControlPolicy:
    """Return a policy with random weights for the observations and actions of an environment."""
    spec = PolicySpec(
        obs_dim=row_width(env.layout),
        layout=env.layout,
        choices=env.actions.choices if isinstance(env.actions, DiscreteActions) else None,
        action_width=env.actions.width,
        hidden_dim=args.hidden_dim,
        num_layers=args.num_layers,
        activation=args.activation,
    )
    return ControlPolicy(spec, args.seed)


def advantages_of(batch: EnvBatch, args: Args) -> Samples:
    """Return the decisions of a rollout [M, T] as rows, with advantages and returns."""
    values = batch.values[..., 0]  # [M, T + 1]: before each step, and after the last
    next_values = values[:, 1:].clone()
    next_values[batch.terminated] = 0.0  # the value of a terminal state
    next_values[batch.final_at] = batch.bootstrap_values[:, 0]  # truncated: bootstrap
    ended = batch.terminated | batch.truncated
    estimate = episodic_gae(
        batch.token_level_scores, values[:, :-1], next_values, ended, batch.valid, gamma=args.gamma, lam=args.lam
    )
    advantages = masked_whiten(estimate.advantages, batch.valid)
    step, env = batch.valid.T.nonzero(as_tuple=True)  # the executed steps, in the order of time
    return Samples(
        obs=batch.seen[env, step],
        actions=batch.actions[env, step],
        old_log_probs=batch.old_log_probs[env, step],
        advantages=advantages[env, step, None],
        values=values[env, step, None],
        returns=estimate.returns[env, step, None],
    )


def backward(policy: ControlPolicy, samples: Samples, args: Args) -> None:
    """Compute the gradient of the loss in every parameter's ``grad``."""
    # Autograd differentiates the loss, and the policy its own layers; for networks this small, it halves the time.
    passed = policy.run(samples.obs, None)
    outputs, values = passed.outputs.requires_grad_(), passed.values.requires_grad_()
    loss(policy, outputs, values, samples, args).backward(inputs=[outputs, values, *policy.head.parameters()])
    policy.backward(passed, outputs.grad, values.grad)


def loss(policy: ControlPolicy, outputs: Tensor, values: Tensor, samples: Samples, args: Args) -> Tensor:
    """Return PPO's clipped loss plus the value loss, each the mean over the samples."""
    log_probs = policy.head.evaluate(outputs, samples.actions).log_probs.sum(-1, keepdim=True)
    everywhere = torch.ones_like(log_probs, dtype=torch.bool)
    policy_loss = POLICY_LOSSES["vanilla"](
        log_probs,
        samples.old_log_probs,
        samples.advantages,
        everywhere,
        clip_ratio_low=args.clip_ratio,
        clip_ratio_high=args.clip_ratio,
        clip_ratio_c=None,
    )
    critic_loss = value_loss(values, samples.values, samples.returns, everywhere, cliprange_value=None)
    return policy_loss.loss.mean() + args.value_coef * critic_loss.loss.mean()


def main(arguments: list[str] | None = None) -> None:
    """Train with the settings of the command line, and save the policy."""
    parser = argparse.ArgumentParser(description="PPO with a critic in a simulator.")
    for field in fields(Args):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=field.type, default=field.default, help="default: %(default)s")
    args = Args(**vars(parser.parse_args(arguments)))
    torch.set_num_threads(1)  # for networks this small, more threads only wait for each other
    save_policy(train(args), Path(args.save_to))
    print(f"saved to {args.save_to}; tether.control.policies.mlp_policy.load_policy reads it")


if __name__ == "__main__":
    main()
