"""The few numbers that summarise a run, selected from all metrics for one line on the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

VALIDATION = "val-core/"


@dataclass(frozen=True)
class Headline:
    """A number of the summary."""

    label: str
    keys: tuple[str, ...]
    """Metric keys; the first one that is logged is shown."""
    style: str
    """A format specification for the number."""
    is_alarm: bool = False
    """Whether it is only shown if it is not 0."""

    def shown(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Return key -> formatted number; empty if the number is not to be shown."""
        keys = (key for key in self.keys if key in metrics and (metrics[key] or not self.is_alarm))
        return {key: format(metrics[key], self.style) for key in keys}


HELD_OUT_LOSS = "val/loss"
"""Loss of held-out conversations in fine-tuning; lower is better."""

HEADLINES = (
    Headline("score", ("critic/score/mean", "env/return"), ".3f"),
    Headline("loss", ("train/loss",), ".3f"),
    Headline("val", ("eval/return", HELD_OUT_LOSS), ".3f"),
    Headline("ref kl", ("actor/reward_kl_penalty",), ".4f"),
    Headline("kl loss", ("actor/kl_loss",), ".4f"),
    Headline("teacher kl", ("distillation/kl",), ".4f"),
    Headline("ppo kl", ("actor/ppo_kl",), ".4f"),
    Headline("length", ("response_length/mean", "env/episode_len"), ".1f"),
    Headline("entropy", ("actor/entropy",), ".3f"),
    Headline("actor grad", ("actor/grad_norm",), ".3g"),
    Headline("critic grad", ("critic/grad_norm",), ".3g"),
    Headline("expl var", ("critic/vf_explained_var",), ".2f"),
    Headline("env steps", ("perf/env_steps",), ".0f"),
    Headline("steps/s", ("perf/sps",), ".0f"),
    Headline("s/step", ("timing_s/step",), ".1f"),
    Headline("failed rewards", ("reward/error_rate",), ".1%", is_alarm=True),
    Headline("skipped", ("actor/skipped_updates", "critic/skipped_updates"), ".0f", is_alarm=True),
)

LABELS = tuple(headline.label for headline in HEADLINES)
"""Labels in display order."""
OPTIONAL_LABELS = (
    "critic grad", "actor grad", "kl loss", "ppo kl", "entropy", "ref kl", "steps/s", "length", "env steps",
    "teacher kl", "loss",
)  # fmt: skip
"""Labels that are dropped on a narrow screen, in this order."""


def validation_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean validation score of each data source, by its key."""
    return {k: v for k, v in metrics.items() if k.startswith(VALIDATION) and k.rpartition("/")[2].startswith("mean@")}


def evaluation_score(metrics: Mapping[str, float]) -> float:
    """Return the score of an evaluation: the mean over data sources, the mean return of its episodes, or minus the
    loss; -inf if there is none."""
    scores = list(validation_means(metrics).values())
    scores = scores or [metrics.get("eval/return", -metrics.get(HELD_OUT_LOSS, math.inf))]
    score = sum(scores) / len(scores)
    return -math.inf if math.isnan(score) else score


def headline_values(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return label -> formatted number of the logged ones; "val" is the mean over data sources, or the mean return."""
    shown = {}
    for headline in HEADLINES:
        if numbers := headline.shown(metrics):
            shown[headline.label] = next(iter(numbers.values()))
    means = validation_means(metrics).values()
    return shown | ({"val": f"{sum(means) / len(means):.3f}"} if means else {})


def headline_keys(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return key -> formatted number, with validation last."""
    shown: dict[str, str] = {}
    for headline in HEADLINES:
        shown |= headline.shown(metrics)
    return shown | {key: f"{value:.3f}" for key, value in validation_means(metrics).items()}
