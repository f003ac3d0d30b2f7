"""Checks against TRL: the losses of its trainers, called with a model that returns given log-probabilities; and its
advantages, taken from one real step of the trainer on a tiny random model."""

from __future__ import annotations

import logging
import tempfile
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

from benchmarks.oracles import ours
from benchmarks.oracles.cases import WIDTH, Case
from benchmarks.oracles.compare import Check, Outputs
from tests.tiny import tiny_model, tiny_tokenizer
from tether.algorithms import POLICY_LOSSES, aggregate_loss, kl_penalty

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
FINITE = ("ragged", "tools", "empty")
SCENARIOS = (*FINITE, "poison")

NAN = "tether: values at masked positions must not matter; TRL multiplies them by the mask, and NaN x 0 is NaN"
EMPTY_ROW = "tether: a row without tokens does not count; TRL's mean includes it with loss 0"


class Reducer:
    """One process: nothing to gather."""

    num_processes = 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def trl_loss(
    loss_type: str, advantages: Callable[[Case], Tensor], trainer: type = GRPOTrainer, **settings: Any
) -> Callable[[Case], Outputs]:
    """Return the call of a trainer's loss on given log-probabilities."""

    def call(case: Case) -> Outputs:
        mask = case.mask.long()

        def loss(log_probs: Tensor) -> Tensor:
            held = SimpleNamespace(
                _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
                args=SimpleNamespace(
                    delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
                ),
                accelerator=Reducer(),
                model=SimpleNamespace(training=False),
                aux_loss_enabled=False,
                top_entropy_quantile=1.0,
                off_policy_mask_threshold=None,
                importance_sampling_level="token",
                beta=0.0,
                loss_type=loss_type,
                epsilon_low=0.2,
                epsilon_high=0.28,
                use_vllm=False,
                max_completion_length=WIDTH,
                current_gradient_accumulation_steps=1,
                _entropy_bonus_enabled=False,
                _metrics={"eval": defaultdict(list)},
            )
            for name, value in settings.items():
                setattr(held.args if name == "delta" else held, name, value)
            inputs = {
                "prompt_ids": mask[:, :1],
                "prompt_mask": mask[:, :1],
                "completion_ids": mask,
                "completion_mask": mask,
                "old_per_token_logps": case.old_log_probs,
                "old_logps": torch.where(case.mask, case.old_log_probs, 0.0).sum(dim=-1),
                "ref_per_token_logps": case.ref_log_probs,
                "advantages": advantages(case),
                "num_items_in_batch": mask.sum(),
            }
            return trainer._compute_loss(held, held.model, inputs)  # type: ignore[attr-defined]

        return ours.with_gradient(loss, case.log_probs)

    return call


def by_token(case: Case) -> Tensor:
    return case.advantages


def by_row(case: Case) -> Tensor:
    return case.scores


def mine(name: str, mode: str, per_row: bool = False, kl: float = 0.0, **keywords: Any) -> Callable[[Case], Outputs]:
    """tether's loss with one advantage a token, or a row, and optionally k3 to the reference."""

    def call(case: Case) -> Outputs:
        advantages = case.scores[:, None].expand(case.mask.shape) if per_row else case.advantages

        def loss(log_probs: Tensor) -> Tensor:
            term = POLICY_LOSSES[name](log_probs, case.old_log_probs, advantages, case.mask, **keywords).loss
            if kl:
                term = term + kl * kl_penalty(log_probs, case.ref_log_probs, "k3", case.mask)
            return aggregate_loss(term, case.mask, mode, **ours.sizes(case), max_length=WIDTH)

        return ours.with_gradient(loss, case.log_probs)

    return call


def losses() -> list[Check]:
    rows = {"poison": NAN, "empty": EMPTY_ROW}
    cispo = "a choice: TRL bounds CISPO's ratio from above only and by the ratio itself (1.28 is epsilon_high=1.28)"
    table = {
        "vanilla": (
            mine("vanilla", "token-mean", **CLIP),
            trl_loss("bnpo", by_token, delta=3.0),
            {"poison": NAN},
        ),
        "vanilla, seq-mean-token-mean": (
            mine("vanilla", "seq-mean-token-mean", **CLIP),
            trl_loss("grpo", by_token, delta=3.0),
            rows,
        ),
        "gspo": (
            mine("gspo", "seq-mean-token-mean", per_row=True, **CLIP),
            trl_loss("grpo", by_row, importance_sampling_level="sequence"),
            rows,
        ),
        "sapo": (mine("sapo", "seq-mean-token-mean"), trl_loss("sapo", by_token), rows),
        "cispo, no lower clip": (
            mine("cispo", "token-mean", clip_ratio_low=1.0, clip_ratio_high=0.28),
            trl_loss("cispo", by_token, epsilon_high=1.28),
            {"poison": NAN},
        ),
        "cispo": (
            mine("cispo", "token-mean", **CLIP),
            trl_loss("cispo", by_token, epsilon_high=1.28),
            dict.fromkeys(FINITE, cispo) | {"poison": NAN},
        ),
        "geo_mean": (
            mine("geo_mean", "seq-mean-token-mean", per_row=True, **CLIP),
            trl_loss("grpo", by_row, GMPOTrainer),
            rows,
        ),
        "KL k3, in the loss": (
            mine("vanilla", "token-mean", kl=0.5, clip_ratio_c=None, **CLIP),
            trl_loss("bnpo", by_token, beta=0.5),
            {"poison": NAN},
        ),
        "seq-mean-token-sum-norm": (
            mine("vanilla", "seq-mean-token-sum-norm", clip_ratio_c=None, **CLIP),
            trl_loss("dr_grpo", by_token),
            rows,
        ),
    }
    return [Check(name, own, theirs, SCENARIOS, differs) for name, (own, theirs, differs) in table.items()]


def step_of(kind: str, scores: list[float], group: int, **settings: Any) -> Tensor:
    """Run one training step in which answer i gets score i; returns the trainer's advantages."""
    make, config = (GRPOTrainer, GRPOConfig) if kind == "grpo" else (RLOOTrainer, RLOOConfig)
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=len(scores),
            num_generations=group,
            max_completion_length=4,
            beta=0.0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **settings,
        )
        trainer = make(
            model=tiny_model("llama"),
            processing_class=tiny_tokenizer(),
            reward_funcs=lambda completions, **_: scores[: len(completions)],
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "1+1="}, {"prompt": "2+2="}]),
        )
        trainer.train()
        return torch.tensor(list(trainer._logs["advantages"]), dtype=torch.float64)


def advantages() -> list[Check]:
    std = "a choice: TRL adds 1e-4 to the std, tether and verl 1e-6"

    def own(name: str, **keywords: Any) -> Callable[[Case], Outputs]:
        def call(case: Case) -> Outputs:
            found = ours.estimate(name, uid="uid", **keywords)(case.with_equal_groups())
            return {"advantages": found["advantages"][:, 0]}  # the first token of every row is valid here

        return call

    def theirs(kind: str, **settings: Any) -> Callable[[Case], Outputs]:
        return lambda case: {"advantages": step_of(kind, case.with_equal_groups().scores.tolist(), 7, **settings)}

    table = {
        "rloo": (own("rloo"), theirs("rloo"), {}),
        "grpo": (own("grpo"), theirs("grpo"), {"ragged": std}),
        "grpo without std": (
            own("grpo", norm_adv_by_std_in_grpo=False),
            theirs("grpo", scale_rewards="none"),
            {},
        ),
    }
    return [Check(name, mine, trl, ("ragged",), why, dtype=torch.float32) for name, (mine, trl, why) in table.items()]


logging.disable(logging.WARNING)
CHECKS = [*losses(), *advantages()]
