"""PPO with a critic on a language model, in one file: copy it, and change what you like.

    tether model pull smollm2-135m        # once: a chat model with 135M parameters
    python recipes/one_file/ppo.py        # 1.5 minutes on two CPU cores
    tether generate one_file_model "Ada likes tea. Bo cannot stand tea. Who likes tea? Reply with the name alone."

One step, as in `train` below::

    prompts -> responses -> scores -> rewards (less the KL) -> advantages (GAE) -> update of the critic and the policy

The components are those of `tether train`: `tether.algorithms` has the mathematics, `tether.text` the models, the
sampler and the data. The complete loop is in this file, and a test checks that its weights are bitwise equal to those
of the trainer. README.md in this folder lists what the trainer adds to it.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.algorithms import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    Metric,
    aggregate_loss,
    apply_kl_penalty,
    count_valid,
    explained_variance,
    kl_penalty,
    masked_mean,
    merge_metrics,
    value_loss,
)
from tether.batch import Prompt, RolloutBatch, TrainBatch
from tether.runtime.cache import cache_dir
from tether.runtime.machine import computes_in_bfloat16, deterministic_kernels, resolve_device
from tether.text.data.prompts import PromptDataset, PromptOptions, PromptSampler, decode
from tether.text.data.sources import load_rows
from tether.text.learning.engines.master_weights import MasterWeights
from tether.text.learning.losses import PolicyForward, PolicyOutputs, ValueForward, ValueOutputs
from tether.text.learning.packing import MicroBatching, row_sizes
from tether.text.models.critic import load_critic
from tether.text.models.load import load_causal_lm, load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.models.save import save_tokenizer, write_model
from tether.text.rewards.outcome import Score, outcome_of
from tether.text.rewards.router import find_reward
from tether.text.sampling.engine import NativeEngine, eos_token_ids
from tether.text.sampling.protocol import NoiseKey, SamplingParams

# Two to four statements about people and a question ("Who can't bear playing the oboe?"); the first word of the
# response has to be the right name. The splits `train` and `test` have no question in common.
TASK = (
    "reasoning_gym:needle_haystack?min_num_statements=2&max_num_statements=4&extract=first_word"
    "&system=Reply%20with%20the%20name%20alone."
)


@dataclass(frozen=True)
class Args:
    """The settings, each with the equivalent key of `tether train` (policy = actor_rollout_ref)."""

    model: str = "smollm2-135m"  # policy.model.path, critic.model.path
    train_data: str = f"{TASK}&part=train&seed=1&size=2000"  # data.train_files
    eval_data: str = f"{TASK}&part=test&seed=2&size=64"  # data.val_files
    save_to: str = "one_file_model"
    device: str = "auto"  # trainer.device
    dtype: str = "auto"  # policy.actor.fsdp_config.dtype, and the same of ref, rollout and critic.model
    seed: int = 1  # trainer.seed, data.seed

    steps: int = 10  # trainer.total_training_steps
    eval_every: int = 5  # trainer.test_freq
    batch_size: int = 8  # data.train_batch_size: prompts per step
    responses: int = 16  # policy.rollout.n: responses per prompt
    max_prompt_length: int = 128  # data.max_prompt_length
    max_response_length: int = 4  # data.max_response_length
    temperature: float = 0.7  # policy.rollout.temperature

    gamma: float = 1.0  # algorithm.gamma
    lam: float = 1.0  # algorithm.lam
    kl_reward_estimator: str = "kl"  # algorithm.kl_penalty
    kl_reward_coef: float = 0.001  # algorithm.kl_ctrl.kl_coef, with algorithm.use_kl_in_reward
    kl_loss_estimator: str = "low_var_kl"  # policy.actor.kl_loss_type
    kl_loss_coef: float = 0.0  # policy.actor.kl_loss_coef, with policy.actor.use_kl_loss

    epochs: int = 1  # policy.actor.ppo_epochs, critic.ppo_epochs
    mini_batch_size: int = 4  # policy.actor.ppo_mini_batch_size, critic.ppo_mini_batch_size: prompts per optimizer step
    max_tokens: int = 4096  # policy.actor.ppo_max_token_len_per_gpu, and the same of critic: tokens per pass
    clip_ratio: float = 0.2  # policy.actor.clip_ratio
    cliprange_value: float = 0.5  # critic.cliprange_value
    actor_lr: float = 3e-5  # policy.actor.optim.lr
    critic_lr: float = 5e-5  # critic.optim.lr
    weight_decay: float = 0.01  # policy.actor.optim.weight_decay, critic.optim.weight_decay
    max_grad_norm: float = 1.0  # policy.actor.optim.clip_grad, critic.optim.clip_grad


Reward = Callable[[Prompt, str], float]
Loss = tuple[Tensor, dict[str, Metric]]


def rule(prompt: Prompt, response: str) -> float:
    """Score a response with the rule of its dataset; for your own task, pass a different function to `train`."""
    function = find_reward(prompt.data_source)
    outcome = outcome_of(function(prompt.data_source, response, prompt.ground_truth, prompt.extra_info))
    if not isinstance(outcome, Score):  # a failure must never become a score of 0
        raise ValueError(f"no score for the response {response!r}: {outcome}")
    return outcome.value


class Learner:
    """A model that computes in `dtype`, with float32 master weights that AdamW updates."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, args: Args) -> None:
        self.model = model
        self.masters = MasterWeights(model, dtype)
        self.optimizer = torch.optim.AdamW(self.masters.parameters(), weight_decay=args.weight_decay, fused=True)


def train(args: Args, reward: Reward = rule) -> tuple[Learner, Learner, PreTrainedTokenizerBase]:
    """Train a policy and a critic, and return both with the tokenizer."""
    device = resolve_device(args.device)
    fast = torch.bfloat16 if computes_in_bfloat16(device) else torch.float32
    dtype = fast if args.dtype == "auto" else getattr(torch, args.dtype)
    path = resolve_model_path(args.model, cache_dir())
    tokenizer = load_tokenizer(path)
    policy = Learner(load_causal_lm(path, dtype=torch.float32).to(device), dtype, args)
    reference = load_causal_lm(path, dtype=dtype).to(device)  # stays equal to the initial policy
    # The same layers with a value head that starts at zero, so the first advantages are the rewards.
    critic = Learner(load_critic(path, dtype=torch.float32).to(device), dtype, args)

    options = PromptOptions(args.max_prompt_length)
    prompts = PromptDataset(load_rows(args.train_data), tokenizer, options)
    held_out = PromptDataset(load_rows(args.eval_data), tokenizer, options)
    prompt_sampler = PromptSampler(len(prompts), args.batch_size, shuffle=True, seed=args.seed)

    # The sampler shares the policy's weights, so updates need not be copied. Its noise depends only on the seed, the
    # step, the sample and the token, so a run can be repeated exactly.
    sampler = NativeEngine(policy.model, eos_token_ids=eos_token_ids(policy.model))
    sampling = SamplingParams(args.max_response_length, n=args.responses, temperature=args.temperature)
    policy_forward = PolicyForward(args.temperature, with_entropy=True)

    print(f"step   0  held-out score {evaluate(sampler, held_out, tokenizer, reward, args):.3f}", flush=True)
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        tasks = [prompts[row] for row in prompt_sampler.next_batch()]

        # Rows p * n to p * n + n - 1 of the batch are the n responses to prompt p.
        rollout = sampler.generate([task.token_ids for task in tasks], sampling, NoiseKey(args.seed, step))
        batch = TrainBatch.assemble(rollout, score(tasks, rollout, tokenizer, reward))

        # Recomputed with the kernels of the update instead of taken from the sampler, so that the first ratios are 1.
        outputs = infer(policy.model, policy_forward, batch, args)
        batch.old_log_probs = outputs.log_probs
        batch.ref_log_probs = infer(reference, PolicyForward(args.temperature), batch, args).log_probs
        batch.values = infer(critic.model, ValueForward(), batch, args).values

        # The score is the reward of a response's last token; the KL penalty to the reference is subtracted per token.
        mask = batch.response_mask
        kl = kl_penalty(batch.old_log_probs, batch.ref_log_probs, args.kl_reward_estimator, mask)
        rewards, mean_kl = apply_kl_penalty(batch.token_level_scores, kl, mask, kl_coef=args.kl_reward_coef)
        estimate = ADVANTAGE_ESTIMATORS["gae"](rewards, mask, values=batch.values, gamma=args.gamma, lam=args.lam)
        batch.advantages, batch.returns = estimate.advantages, estimate.returns

        remaining = 1 - (step - 1) / args.steps  # both learning rates decay linearly to zero
        metrics = update(critic, args.critic_lr * remaining, ValueForward(), critic_loss, batch, args)
        metrics |= update(policy, args.actor_lr * remaining, policy_forward, policy_loss, batch, args)

        print(
            f"step {step:3}  score {batch.token_level_scores.sum(-1).mean():.3f}  KL {mean_kl:.4f}  "
            f"entropy {masked_mean(outputs.entropy, mask):.3f}  clipped {metrics['actor/pg_clipfrac']:.3f}  "
            f"value loss {metrics['critic/vf_loss']:.4f}  "
            f"explained variance {explained_variance(batch.values, batch.returns, mask):.2f}  "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
        if step % args.eval_every == 0 or step == args.steps:
            held_out_score = evaluate(sampler, held_out, tokenizer, reward, args)
            print(f"step {step:3}  held-out score {held_out_score:.3f}", flush=True)
    return policy, critic, tokenizer


def score(tasks: list[Prompt], rollout: RolloutBatch, tokenizer: PreTrainedTokenizerBase, reward: Reward) -> Tensor:
    """Return the score of each response, [B]."""
    rows = zip(rollout.uid.tolist(), rollout.response_ids.tolist(), rollout.response_length.tolist(), strict=True)
    return torch.tensor(
        [reward(tasks[prompt], decode(tokenizer, ids[:n], skip_special_tokens=True)) for prompt, ids, n in rows]
    )


def micro_batches(batch: TrainBatch, args: Args) -> list[Tensor]:
    """Return the rows of each micro-batch. Rows are packed: responses to the same prompt share the prompt's tokens."""
    return [torch.tensor(rows) for rows in MicroBatching(max_tokens=args.max_tokens).split(row_sizes(batch))]


@torch.no_grad()
@deterministic_kernels()
def infer(model: PreTrainedModel, forward: PolicyForward | ValueForward, batch: TrainBatch, args: Args) -> Any:
    """Return the outputs of a model for each response token, without gradients, on the CPU."""
    groups = micro_batches(batch, args)
    outputs = torch.cat([forward(model, batch[rows]) for rows in groups]).cpu()
    return outputs[torch.cat(groups).argsort()]  # back to the order of the batch; micro-batches are sorted by length


@deterministic_kernels()
def update(
    learner: Learner,
    lr: float,
    forward: PolicyForward | ValueForward,
    loss_function: Callable[..., Loss],
    batch: TrainBatch,
    args: Args,
) -> dict[str, float]:
    """Make one optimizer step per mini-batch and epoch, and return the metrics of the loss."""
    learner.optimizer.param_groups[0]["lr"] = lr
    measured = []
    for _ in range(args.epochs):
        for rows in torch.arange(len(batch)).split(args.mini_batch_size * args.responses):
            mini = batch[rows]
            # Losses are divided by the token counts of the mini-batch, so max_tokens does not change the gradient.
            counts = count_valid(mini.response_mask)
            learner.masters.begin_gradients()
            for group in micro_batches(mini, args):
                outputs = forward(learner.model, mini[group])
                micro = mini[group].to(learner.model.device)
                aggregate = partial(
                    aggregate_loss, response_mask=micro.response_mask, mode="token-mean", **counts._asdict()
                )
                loss, metrics = loss_function(outputs, micro, aggregate, args)
                loss.backward()
                measured.append(metrics)
            learner.masters.finish_gradients()
            torch.nn.utils.clip_grad_norm_(learner.masters.parameters(), args.max_grad_norm, error_if_nonfinite=True)
            learner.optimizer.step()
            learner.masters.copy_to_model()
    return {name: float(metric) for name, metric in merge_metrics(measured).items()}


def policy_loss(outputs: PolicyOutputs, batch: TrainBatch, aggregate: Callable[[Tensor], Tensor], args: Args) -> Loss:
    """Return PPO's clipped loss, plus the KL to the reference if it is part of the loss."""
    token_loss = POLICY_LOSSES["vanilla"](
        outputs.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.response_mask,
        clip_ratio_low=args.clip_ratio,
        clip_ratio_high=args.clip_ratio,
    )
    loss = aggregate(token_loss.loss)
    if args.kl_loss_coef:
        kl = kl_penalty(outputs.log_probs, batch.ref_log_probs, args.kl_loss_estimator, batch.response_mask)
        loss = loss + args.kl_loss_coef * aggregate(kl)
    return loss, token_loss.metrics


def critic_loss(outputs: ValueOutputs, batch: TrainBatch, aggregate: Callable[[Tensor], Tensor], args: Args) -> Loss:
    """Return the clipped value loss."""
    token_loss = value_loss(
        outputs.values, batch.values, batch.returns, batch.response_mask, cliprange_value=args.cliprange_value
    )
    return aggregate(token_loss.loss), token_loss.metrics


def evaluate(
    sampler: NativeEngine, prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, reward: Reward, args: Args
) -> float:
    """Return the mean score of the most likely response to each prompt."""
    tasks = [prompts[row] for row in range(len(prompts))]
    greedy = SamplingParams(args.max_response_length, temperature=0.0)
    rollout = sampler.generate([task.token_ids for task in tasks], greedy, NoiseKey(args.seed, step=0))
    return float(score(tasks, rollout, tokenizer, reward).mean())


def main(arguments: list[str] | None = None) -> None:
    """Train with the settings of the command line, and save the policy as a Hugging Face directory."""
    parser = argparse.ArgumentParser(description="PPO with a critic on a language model.")
    for field in fields(Args):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=field.type, default=field.default, help="default: %(default)s")
    args = Args(**vars(parser.parse_args(arguments)))
    policy, _, tokenizer = train(args)
    with policy.masters.installed():  # saves the float32 weights
        write_model(policy.model, Path(args.save_to))
    save_tokenizer(tokenizer, Path(args.save_to))
    print(f"saved to {args.save_to}; try it: tether generate {args.save_to} PROMPT")


if __name__ == "__main__":
    main()
