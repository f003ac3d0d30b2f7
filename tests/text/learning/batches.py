"""A tiny policy, a tiny critic and a batch in float64: ragged rows, a tool's output, a row without a score."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.device import on_device
from tests.tiny import VOCAB_SIZE, tiny_model
from tether.algorithms import ADVANTAGE_ESTIMATORS, apply_kl_penalty, kl_penalty
from tether.batch import RolloutBatch, TrainBatch, filled
from tether.loop.engine import OptimizerOptions
from tether.text.learning.engines.local import LocalEngine
from tether.text.learning.losses import PolicyForward, ValueForward
from tether.text.learning.packing import MicroBatching
from tether.text.models.critic import critic_from
from tether.text.models.layers import use_tether_attention
from tether.text.models.output import value_head_of

PROMPT_LENGTHS = (3, 7, 1)  # of each group of three rows
RESPONSE_LENGTHS = (4, 9, 1, 6, 2, 8, 5, 3, 7)
ROWS, WIDTH = len(RESPONSE_LENGTHS), max(RESPONSE_LENGTHS)
UNSCORED = 5
TOOL_OUTPUT = (1, slice(3, 6))  # tokens of row 1 that the policy did not sample


def make_policy(*, dtype: torch.dtype = torch.float64, **overrides: object) -> PreTrainedModel:
    model = tiny_model("llama", dtype=dtype, **overrides)
    use_tether_attention(model)
    return on_device(model)


def make_critic(**overrides: object) -> PreTrainedModel:
    """With a head that is not zero, so that gradients reach the backbone."""
    critic = critic_from(tiny_model("llama", dtype=torch.float64, seed=1, **overrides))
    use_tether_attention(critic)
    with torch.no_grad():
        for parameter in value_head_of(critic).parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    return on_device(critic)


def make_rollout() -> RolloutBatch:
    generator = torch.Generator().manual_seed(3)
    prompt_length = torch.tensor(PROMPT_LENGTHS).repeat_interleave(3)
    response_length = torch.tensor(RESPONSE_LENGTHS)
    mask = torch.arange(WIDTH) < response_length[:, None]
    mask[TOOL_OUTPUT] = False
    prompts = torch.randint(4, VOCAB_SIZE, (3, max(PROMPT_LENGTHS)), generator=generator)
    return RolloutBatch(
        uid=torch.arange(3).repeat_interleave(3),
        prompt_ids=prompts.repeat_interleave(3, dim=0),
        prompt_length=prompt_length,
        response_ids=torch.randint(4, VOCAB_SIZE, (ROWS, WIDTH), generator=generator),
        response_length=response_length,
        response_mask=mask,
        rollout_log_probs=torch.zeros(ROWS, WIDTH, dtype=torch.float64),
        truncated=response_length == WIDTH,
        kept=None,
        batch_size=[ROWS],
    )


def make_batch(policy: PreTrainedModel, critic: PreTrainedModel, estimator: str = "gae") -> TrainBatch:
    """A batch as it stands before the update; the old policy is far enough away for ratios to be clipped both ways."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(ROWS, generator=generator)
    scores[UNSCORED] = torch.nan
    batch = TrainBatch.assemble(make_rollout(), scores)
    with torch.no_grad():
        log_probs = PolicyForward()(policy, batch).log_probs
        values = ValueForward()(critic, batch).values

    def near(tensor: Tensor, distance: float) -> Tensor:
        return tensor.cpu() + distance * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)

    batch.rollout_log_probs = near(log_probs, 0.01)
    batch.old_log_probs = near(log_probs, 0.4)
    batch.ref_log_probs = near(log_probs, 0.5)
    batch.values = near(values, 0.6)
    batch.sum_pi_squared = torch.rand(log_probs.shape, generator=generator, dtype=log_probs.dtype)
    batch.bootstrap_values, batch.reward_baselines = torch.randn(2, ROWS, generator=generator, dtype=log_probs.dtype)
    batch.reward_components = torch.randn(ROWS, 2, generator=generator, dtype=log_probs.dtype)
    return with_advantages(batch, estimator)


def with_advantages(batch: TrainBatch, estimator: str = "gae") -> TrainBatch:
    """Fill in rewards (KL penalty included), advantages and returns, as the trainer does."""
    mask = batch.response_mask
    kl = kl_penalty(filled(batch.old_log_probs), filled(batch.ref_log_probs), "kl", mask)
    batch.token_level_rewards = apply_kl_penalty(batch.token_level_scores, kl, mask, kl_coef=0.05).token_level_rewards
    result = ADVANTAGE_ESTIMATORS[estimator](
        batch.token_level_rewards,
        mask,
        uid=batch.uid,
        values=batch.values,
        bootstrap_values=batch.bootstrap_values,
        old_log_probs=batch.old_log_probs,
        sum_pi_squared=batch.sum_pi_squared,
        reward_baselines=batch.reward_baselines,
        reward_components=batch.reward_components,
        gamma=0.95,
        lam=0.9,
    )
    batch.advantages, batch.returns = result.advantages, result.returns
    return batch


def make_engine(
    model: PreTrainedModel, micro: MicroBatching | None = None, *, lr: float = 1e-2, **options: object
) -> LocalEngine:
    """An engine with an optimizer; by default all rows go through at once."""
    return LocalEngine(model, micro or MicroBatching(max_rows=ROWS), OptimizerOptions(lr=lr), **options)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
