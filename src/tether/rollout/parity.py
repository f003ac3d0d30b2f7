"""The parity probe: a sampler is proven before it is believed.

The trainer scores a few of the rows that the sampler has just drawn, and compares with the log-probs that came with
them. They are of the same tokens, weights and distribution, so that rounding alone may tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from tether.batch import RolloutBatch, TokenIds, WeightUpdate
from tether.rollout.protocol import FinishedResponse, NoiseKey, Partner, RolloutEngine, RolloutProgress, SamplingParams

ROWS, MORE_ROWS = 4, 64
"""Rows that are scored; and before a difference ends the run, since the few tokens of the first scatter in bfloat16."""
SLACK = 2.0
"""Of the tolerance, for as many rows: the warning of each step, over all rows, comes before the end of the run."""


class Proven(RolloutEngine, Protocol):
    """An engine that runs elsewhere, and what may cure it."""

    options: str
    """Those of its servers that decide about log-probs."""

    def remedies(self) -> Mapping[str, Callable[[], None]]:
        """Possible causes of different log-probs, the likeliest first, each with its remedy."""
        ...

    def moved(self) -> dict[str, float]:
        """Bytes of weights that went to where it runs since it was last asked, as a metric."""
        ...


class ParityProbe:
    """An engine that is compared with the trainer at its first sampling and every `every` steps; else the same.

    Args:
        engine: that samples.
        log_probs: the trainer's log-probs [B, T] of sampled rows.
        every: steps between two comparisons; below 1: only the first.
        tolerance: largest KL from sampler to trainer (k3 estimate, nats per token) that rounding explains.
        sampling: how the rows are drawn that are trained on; others are not compared.
    """

    def __init__(
        self,
        engine: Proven,
        log_probs: Callable[[RolloutBatch], Tensor],
        *,
        every: int,
        tolerance: float,
        sampling: SamplingParams,
    ) -> None:
        self._engine, self._log_probs = engine, log_probs
        self._every, self._tolerance, self._sampling = every, tolerance, sampling
        self.eos_token_ids = engine.eos_token_ids
        self._proven_at: int | None = None

    def load_weights(self, weights: WeightUpdate) -> None:
        """See `RolloutEngine.load_weights`."""
        self._engine.load_weights(weights)

    def moved(self) -> dict[str, float]:
        """See `Proven.moved`."""
        return self._engine.moved()

    def generate(
        self,
        prompts: Sequence[Sequence[int] | TokenIds],
        sampling: SamplingParams,
        key: NoiseKey,
        on_finished: Callable[[FinishedResponse], None] | None = None,
        on_progress: Callable[[RolloutProgress], None] | None = None,
        partner: Partner | None = None,
    ) -> RolloutBatch:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: sampler and trainer disagree by more than rounding explains.
        """
        if self._proven_at is None and sampling != self._sampling:
            self.prove(prompts, key)
        rollout = self._engine.generate(prompts, sampling, key, on_finished, on_progress, partner)
        if sampling == self._sampling and self._is_due(key.step):
            self._prove(lambda rows: rollout[:rows], prompts, key)
        return rollout

    def prove(self, prompts: Sequence[Sequence[int] | TokenIds], key: NoiseKey) -> None:
        """Compare now, on one response to each of the first prompts.

        Args:
            prompts: at least one.
            key: names the random draws.

        Raises:
            ValueError: see `generate`.
        """
        self._prove(lambda rows: self._one_each(prompts, rows, key), prompts, key)

    def _prove(
        self, drawn: Callable[[int], RolloutBatch], prompts: Sequence[Sequence[int] | TokenIds], key: NoiseKey
    ) -> None:
        found = self._difference(drawn(ROWS))
        if not found <= self._tolerance:  # NaN is no parity, too
            found = self._difference(drawn(MORE_ROWS))
            if not found <= SLACK * self._tolerance:
                raise ValueError(self._complaint(found, prompts, key))
        self._proven_at = key.step

    def _one_each(self, prompts: Sequence[Sequence[int] | TokenIds], rows: int, key: NoiseKey) -> RolloutBatch:
        return self._engine.generate(list(prompts)[:rows], replace(self._sampling, n=1), key)

    def _is_due(self, step: int) -> bool:
        if self._proven_at is None:
            return True
        return self._every > 0 and step != self._proven_at and step % self._every == 0

    def _difference(self, rollout: RolloutBatch) -> float:
        """KL from sampler to trainer, nats per token, as `rollout_corr/k3_kl`."""
        mask = rollout.response_mask
        log_ratio = (self._log_probs(rollout) - rollout.rollout_log_probs)[mask].double()
        return float((log_ratio.expm1() - log_ratio).mean()) if mask.any() else 0.0

    def _complaint(self, found: float, prompts: Sequence[Sequence[int] | TokenIds], key: NoiseKey) -> str:
        """The cause, found by trying each remedy on the same rows."""
        most = SLACK * self._tolerance
        lines = [
            f"sampler and trainer disagree about the same tokens, in step {key.step}: {found:.2g} nats per token (k3); "
            f"rounding explains at most {most:g}. The samples are not those of the policy that is trained."
        ]
        for cause, cure in self._engine.remedies().items():
            cure()
            again = self._difference(self._one_each(prompts, MORE_ROWS, key))
            cured = again <= most
            lines.append(f"- {cause}: {'yes, this is it' if cured else 'no'} ({again:.2g} after putting it right)")
            if cured:
                return "\n".join(lines)
        lines.append(
            "- other sampling parameters, or another model: what is left. Compare temperature, top_k and top_p with "
            f"the server's options ({self._engine.options})"
        )
        return "\n".join(lines)
