"""The parity probe: compares the sampler with the trainer before its samples are used.

The trainer computes log-probs for some of the rows that the sampler just produced. Tokens, weights and distribution are
the same, so only rounding may cause differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from tether.batch import RolloutBatch, TokenIds, WeightUpdate
from tether.text.sampling.protocol import (
    FinishedResponse,
    NoiseKey,
    Responder,
    RolloutEngine,
    RolloutProgress,
    SamplingParams,
)

ROWS, MORE_ROWS = 4, 64
"""Number of rows to score; the second number is used before a difference ends the run, because the estimate from few
tokens is noisy in bfloat16."""
SLACK = 2.0
"""Factor on the tolerance, so that the warning of each step, which covers all rows, precedes the end of the run."""


class VerifiableEngine(RolloutEngine, Protocol):
    """An engine that samples in another process, with actions that may fix wrong log-probs."""

    options: str
    """Server options that affect log-probs."""

    def recovery_actions(self) -> Mapping[str, Callable[[], None]]:
        """Return possible causes of wrong log-probs, the most likely first, each with an action that fixes it."""
        ...

    def transfer_metrics(self) -> dict[str, float]:
        """Return the bytes of weights sent since the last call, as a metric."""
        ...


class ParityProbe:
    """An engine that is compared with the trainer at its first sampling and then every `every` steps.

    Args:
        engine: the sampling engine.
        log_probs: computes the trainer's log-probs [B, T] of sampled rows.
        every: steps between two comparisons; below 1: only the first one.
        tolerance: largest KL from sampler to trainer (k3 estimate, nats per token) that rounding explains.
        sampling: parameters of training rows; rows with other parameters are not compared.
    """

    def __init__(
        self,
        engine: VerifiableEngine,
        log_probs: Callable[[RolloutBatch], Tensor],
        *,
        every: int,
        tolerance: float,
        sampling: SamplingParams,
    ) -> None:
        self._engine, self._log_probs = engine, log_probs
        self._every, self._tolerance, self._sampling = every, tolerance, sampling
        self.eos_token_ids, self.context = engine.eos_token_ids, engine.context
        self._verified_at: int | None = None

    def load_weights(self, weights: WeightUpdate) -> None:
        self._engine.load_weights(weights)

    def transfer_metrics(self) -> dict[str, float]:
        return self._engine.transfer_metrics()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        responder: Responder | None = None,
    ) -> RolloutBatch:
        """Generate as `RolloutEngine.generate` describes, and compare when due.

        Raises:
            ValueError: sampler and trainer disagree by more than rounding explains.
        """
        if self._verified_at is None and not self._is_same(sampling):
            self.verify(prompts, key)
        rollout = self._engine.generate(prompts, sampling, key, on_finished, on_progress, responder)
        if self._is_same(sampling) and self._is_due(key.step):
            self._verify(lambda rows: rollout[:rows], prompts, key)
        return rollout

    def _is_same(self, sampling: SamplingParams) -> bool:
        """Return whether the distribution is that of training, regardless of number and length of the responses."""
        sizes = self._sampling
        return sizes == replace(sampling, n=sizes.n, max_new_tokens=sizes.max_new_tokens, max_length=sizes.max_length)

    def verify(self, prompts: Sequence[Sequence[int] | TokenIds], key: NoiseKey) -> None:
        """Compare now, on one response to each of the first prompts.

        Args:
            prompts: at least one.
            key: key of the random numbers.

        Raises:
            ValueError: sampler and trainer disagree by more than rounding explains.
        """
        self._verify(lambda rows: self._one_each(prompts, rows, key), prompts, key)

    def _verify(
        self, sample: Callable[[int], RolloutBatch], prompts: Sequence[Sequence[int] | TokenIds], key: NoiseKey
    ) -> None:
        kl = self._difference(sample(ROWS))
        if not kl <= self._tolerance:  # NaN is also a failure
            kl = self._difference(sample(MORE_ROWS))
            if not kl <= SLACK * self._tolerance:
                raise ValueError(self._complaint(kl, prompts, key))
        self._verified_at = key.step

    def _one_each(self, prompts: Sequence[Sequence[int] | TokenIds], rows: int, key: NoiseKey) -> RolloutBatch:
        return self._engine.generate(list(prompts)[:rows], replace(self._sampling, n=1), key)

    def _is_due(self, step: int) -> bool:
        if self._verified_at is None:
            return True
        return self._every > 0 and step != self._verified_at and step % self._every == 0

    def _difference(self, rollout: RolloutBatch) -> float:
        """Return the KL from sampler to trainer in nats per token, as `rollout_corr/k3_kl`."""
        mask = rollout.response_mask
        log_ratio = (self._log_probs(rollout) - rollout.rollout_log_probs)[mask].double()
        return float((log_ratio.expm1() - log_ratio).mean()) if mask.any() else 0.0

    def _complaint(self, kl: float, prompts: Sequence[Sequence[int] | TokenIds], key: NoiseKey) -> str:
        """Return the error message, with the cause that was identified by trying each action on the same rows."""
        tolerance = SLACK * self._tolerance
        lines = [
            f"sampler and trainer disagree about the same tokens, in step {key.step}: {kl:.2g} nats per token (k3); "
            f"rounding explains at most {tolerance:g}. The samples are not those of the policy that is trained."
        ]
        for cause, recover in self._engine.recovery_actions().items():
            recover()
            kl_after = self._difference(self._one_each(prompts, MORE_ROWS, key))
            fixed = kl_after <= tolerance
            lines.append(f"- {cause}: {'yes, this is it' if fixed else 'no'} ({kl_after:.2g} after fixing it)")
            if fixed:
                return "\n".join(lines)
        lines.append(
            "- other sampling parameters, or another model: the remaining causes. Compare temperature, top_k and top_p "
            f"with the server's options ({self._engine.options})"
        )
        return "\n".join(lines)
