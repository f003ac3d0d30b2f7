"""What a run itself gives evidence for: each rule reads its metrics and samples, and names the steps that prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from statistics import fmean, median, pstdev

import numpy as np

from tether.metrics.loggers import validation_means
from tether.types import JsonObject
from tether.view.queries import correlation, groups, parts
from tether.view.run import RunFolder

WINDOW = 10
"""Steps whose mean stands for the state of a run."""
MIN_EVALUATIONS = 6
"""Evaluations below which a fall is not told from noise."""
Series = dict[int, float]


@dataclass(frozen=True)
class Advice:
    """A finding of one rule."""

    rule: str
    text: str
    step: int
    """The step to look at."""
    keys: tuple[str, ...] = ()
    """Metrics that show it."""
    rows: list[JsonObject] = field(default_factory=list)
    """Samples that show it, ``{"step": ..., "row": ...}``."""


def advise(run: RunFolder) -> list[JsonObject]:
    """Return the findings of all rules."""
    return [asdict(finding) for rule in RULES for finding in rule(run)]


def _last(series: Series, count: int = WINDOW) -> float:
    return fmean(list(series.values())[-count:])


def _first(series: Series, count: int = WINDOW) -> float:
    return fmean(list(series.values())[:count])


def _score(run: RunFolder) -> tuple[str, Series]:
    key = "critic/score/mean" if run.kind == "text" else "env/return"
    return key, run.series(key)


def _validation(run: RunFolder) -> tuple[str, Series]:
    keys = ["eval/return"] if run.kind == "control" else sorted(validation_means(dict.fromkeys(run.keys, 0.0)))
    return (keys[0], run.series(keys[0])) if keys else ("", {})


def _rows(run: RunFolder, step: int, column: str, *, largest: bool = True, count: int = 3) -> list[JsonObject]:
    """Return the rows of the recorded step next to `step` with the largest or smallest values of a column."""
    if not run.steps:
        return []
    near = min(run.steps, key=lambda other: abs(other - step))
    values = run.columns(near).get(column)
    if values is None:
        return []
    order = np.argsort(np.nan_to_num(values.astype(np.float64) * (-1 if largest else 1), nan=np.inf), kind="stable")
    return [{"step": near, "row": int(row)} for row in order[:count]]


def _score_fell(run: RunFolder) -> Iterator[Advice]:
    key, series = _score(run)
    steps, values = list(series), list(series.values())
    width = min(WINDOW, len(values) // 4)
    if width < 3:
        return
    before = [fmean(values[at - width : at]) for at in range(width, len(values) - width + 1)]
    after = [fmean(values[at : at + width]) for at in range(width, len(values) - width + 1)]
    drops = [one - other for one, other in zip(before, after, strict=True)]
    at = int(np.argmax(drops))
    spread = max(values) - min(values)
    noise = pstdev(values[at : at + width])
    if drops[at] < 0.4 * spread or drops[at] < 3 * noise or _last(series, width) > before[at] - 0.5 * drops[at]:
        return
    # Of the steps next to the widest gap, the first whose score is nearer to what follows.
    middle = (before[at] + after[at]) / 2
    step = next((s for s, v in zip(steps[at:], values[at:], strict=True) if v < middle), steps[at + width])
    causes = _changes(run, step, width, key)
    because = "; ".join(
        f"{name} went from {one:.3g} to {other:.3g} in step {when}" for name, one, other, when in causes
    )
    text = f"{key} fell from {before[at]:.3g} to {after[at]:.3g} at step {step}"
    text += f". Shortly before: {because}" if because else ". No other metric changed shortly before"
    rows = _rows(run, step, "reward", largest=False)
    yield Advice("score fell", text, step, (key, *(name for name, *_ in causes)), rows)


WATCHED = (
    "actor/lr", "actor/ppo_kl", "actor/grad_norm", "actor/entropy", "actor/pg_clipfrac", "actor/ratio_max",
    "response_length/mean", "response_length/clip_ratio", "reward/error_rate", "training/rollout_probs_diff_mean",
    "critic/vf_explained_var", "critic/grad_norm", "actor/reward_kl_penalty", "actor/kl_loss", "env/episode_len",
)  # fmt: skip


def _changes(run: RunFolder, step: int, width: int, score: str) -> list[tuple[str, float, float, int]]:
    """Return the metrics that left the range of the steps before, shortly before or in a step: the first ones first."""
    changes = []
    for key in WATCHED:
        series = run.series(key)
        earlier = [value for at, value in series.items() if step - 3 * width <= at < step - 3]
        if len(earlier) < 5:
            continue
        mean, noise = fmean(earlier), max(pstdev(earlier), 1e-3 * abs(fmean(earlier)), 1e-9)
        for at in range(step - 3, step + 2):
            if at in series and abs(series[at] - mean) > 6 * noise and abs(series[at] - mean) > 0.2 * abs(mean):
                changes.append((abs(series[at] - mean) / noise, key, mean, series[at], at))
                break
    changes.sort(key=lambda one: (one[4], -one[0]))
    return [(key, mean, value, at) for _, key, mean, value, at in changes[:4]]


def _critic_is_useless(run: RunFolder) -> Iterator[Advice]:
    series = run.series("critic/vf_explained_var")
    negative = [step for step, value in series.items() if value < 0]
    recent = list(series)[-WINDOW:]
    if len(series) >= 2 * WINDOW and all(series[step] < 0 for step in recent):
        text = (
            f"the critic explains less than a constant: its explained variance was below 0 in {len(negative)} of "
            f"{len(series)} steps, {_last(series):.2f} on average in the last {WINDOW}. Raise critic.optim.lr or warm "
            "it up (trainer.critic_warmup), or use an estimator without a critic (algorithm.adv_estimator=grpo)"
        )
        yield Advice("critic explains nothing", text, recent[0], ("critic/vf_explained_var",))


def _validation_falls(run: RunFolder) -> Iterator[Advice]:
    score_key, score = _score(run)
    key, series = _validation(run)
    if len(series) < MIN_EVALUATIONS or len(score) < WINDOW:
        return
    values, steps = list(series.values()), list(series)
    best = int(np.argmax([fmean(values[at : at + 2]) for at in range(len(values) - 1)]))
    top, now = fmean(values[best : best + 2]), fmean(values[-2:])
    noise = median(abs(one - other) for one, other in pairwise(values))
    trained = [value for step, value in score.items() if abs(step - steps[best]) <= 3]
    lately = _last(score, min(WINDOW, len(score) // 3 or 1))
    if best + 3 < len(values) and trained and top - now > max(4 * noise, 0.02) and lately > fmean(trained):
        text = (
            f"{key} fell from {top:.3g} at step {steps[best]} to {now:.3g}, while {score_key} rose from "
            f"{fmean(trained):.3g} to {lately:.3g}: the policy exploits the reward or memorises its prompts. Read the "
            "samples with the highest reward"
        )
        yield Advice("validation falls", text, steps[best + 1], (key, score_key), _rows(run, steps[-1], "reward"))


def _parts_disagree(run: RunFolder) -> Iterator[Advice]:
    listed = [one for one in parts(run) if len([mean for mean in one["means"] if mean is not None]) >= 10]
    trends = {one["name"]: _trend(one["steps"], one["means"]) for one in listed}
    by_name = {one["name"]: one for one in listed}
    for one, other in combinations(trends, 2):
        rising, falling = (one, other) if trends[one] > trends[other] else (other, one)
        if trends[rising] > 0.5 and trends[falling] < -0.5:
            gain, loss = by_name[rising]["means"], by_name[falling]["means"]
            step = by_name[rising]["steps"][-1]
            text = (
                f"the part {rising!r} of the reward rises ({gain[0]:.3g} to {gain[-1]:.3g}) while {falling!r} falls "
                f"({loss[0]:.3g} to {loss[-1]:.3g}): the policy exploits {rising!r}"
            )
            keys = (f"reward/extra/{rising}/mean", f"reward/extra/{falling}/mean")
            yield Advice("reward part is exploited", text, step, keys, _rows(run, step, f"part/{rising}"))


def _trend(steps: Sequence[int], means: Sequence[float | None]) -> float:
    """Return the correlation of means with steps, 0 if they change by less than a twentieth of their size."""
    pairs = [(step, mean) for step, mean in zip(steps, means, strict=True) if mean is not None]
    values = [mean for _, mean in pairs]
    third = max(1, len(values) // 3)
    change = abs(fmean(values[-third:]) - fmean(values[:third]))
    if change < 0.1 * max(map(abs, values)):
        return 0.0
    return correlation([step for step, _ in pairs], values) or 0.0


def _format_without_accuracy(run: RunFolder) -> Iterator[Advice]:
    means = {one["name"]: [mean for mean in one["means"] if mean is not None] for one in parts(run)}
    layout = next((values for name, values in means.items() if "format" in name), [])
    accuracy = next((values for name, values in means.items() if name in ("acc", "accuracy", "correct")), [])
    if len(layout) < WINDOW or len(accuracy) < WINDOW:
        return
    third = len(layout) // 3
    gained = fmean(layout[-third:]) - fmean(layout[:third])
    solved = fmean(accuracy[-third:]) - fmean(accuracy[:third])
    if gained > 0.3 and fmean(layout[-third:]) > 0.8 and abs(solved) < 0.05 and fmean(accuracy[-third:]) < 0.5:
        text = (
            f"the format is learned (+{gained:.2f}) while the accuracy stays at {fmean(accuracy[-third:]):.2f}: the "
            "reward of the format is all that the policy still gets. Lower its weight, or take easier prompts"
        )
        yield Advice("format without accuracy", text, run.steps[-1], (), _rows(run, run.steps[-1], "reward"))


def _cut(run: RunFolder) -> Iterator[Advice]:
    series = run.series("response_length/clip_ratio")
    if len(series) >= 5 and _last(series) > 0.3:
        step = list(series)[-1]
        text = (
            f"{_last(series):.0%} of the responses of the last steps were cut by the length limit, which gives most of "
            "them no reward. Raise data.max_response_length, or penalise length (reward_model.overlong_buffer)"
        )
        yield Advice("responses are cut", text, step, ("response_length/clip_ratio",), _rows(run, step, "truncated"))


def _longer_without_reward(run: RunFolder) -> Iterator[Advice]:
    length, (key, score) = run.series("response_length/mean"), _score(run)
    if run.kind != "text" or len(length) < 3 * WINDOW or len(score) < 3 * WINDOW:
        return
    noise = max(pstdev(list(score.values())[:WINDOW]), 1e-6)
    if _last(length) > 1.5 * _first(length) and _last(score) - _first(score) < noise:
        step = list(length)[-1]
        text = (
            f"responses grew from {_first(length):.0f} to {_last(length):.0f} tokens, and {key} did not rise "
            f"({_first(score):.3g} to {_last(score):.3g})"
        )
        yield Advice("longer without reward", text, step, ("response_length/mean", key), _rows(run, step, "length"))


def _one_group_dominates(run: RunFolder) -> Iterator[Advice]:
    heavy = []
    for step in run.steps[-WINDOW:] if run.kind == "text" else ():
        listed = groups(run, step)
        if len(listed) >= 4 and (listed[0].get("gradient_share") or 0.0) > 0.6:
            heavy.append((step, listed[0]))
    if len(heavy) > WINDOW // 2:
        step, top = heavy[-1]
        text = (
            f"in {len(heavy)} of the last {WINDOW} recorded steps one prompt took more than 60 % of the gradient "
            f"({top['gradient_share']:.0%} in step {step}): the others have groups without variance or short responses"
        )
        yield Advice("one prompt dominates", text, step, (), [{"step": step, "row": row} for row in top["rows"][:3]])


def _no_variance(run: RunFolder) -> Iterator[Advice]:
    series = run.series("group/zero_std_fraction")
    if len(series) >= WINDOW and _last(series) > 0.8:
        text = (
            f"{_last(series):.0%} of the prompts of the last steps had equal rewards for all of their responses, which "
            "teach nothing. Take prompts of another difficulty, more responses (rollout.n), or "
            "algorithm.filter_groups.enable=True"
        )
        yield Advice("groups without variance", text, list(series)[-1], ("group/zero_std_fraction",))


@dataclass(frozen=True)
class Limit:
    """A rule about the mean of a metric over the last steps."""

    rule: str
    key: str
    is_wrong: Callable[[float], bool]
    text: str
    """What to say; ``{}`` is the mean."""
    column: str = ""
    """The column whose largest values show it."""

    def __call__(self, run: RunFolder) -> Iterator[Advice]:
        """Yield the finding, if the mean is wrong."""
        series = run.series(self.key)
        if len(series) >= 5 and self.is_wrong(mean := _last(series)):
            step = max(list(series)[-WINDOW:], key=lambda at: abs(series[at]))
            rows = _rows(run, step, self.column) if self.column else []
            yield Advice(self.rule, self.text.format(mean), step, (self.key,), rows)


LIMITS = (
    Limit(
        "first ratio is not 1", "actor/first_update/ratio_max", lambda mean: mean > 1.05,
        "at the first optimizer step the policy is still the old one, yet its largest ratio is {:.3f}: old log-probs "
        "and update disagree. Check number formats and dropout", "ratio",
    ),
    Limit(
        "few effective samples", "rollout_corr/rollout_is_eff_sample_size", lambda mean: mean < 0.3,
        "the importance weights leave {:.0%} effective samples: the sampler is too far from the trainer", "mismatch",
    ),
    Limit(
        "sampler and trainer differ", "training/rollout_mismatch_alarm", lambda mean: mean > 0.2,
        "in {:.0%} of the last steps sampler and trainer disagreed by more than their number formats explain",
        "mismatch",
    ),
    Limit(
        "much is clipped", "actor/pg_clipfrac", lambda mean: mean > 0.4,
        "{:.0%} of the tokens are clipped, which learn nothing: lower the learning rate or the number of epochs",
        "ratio",
    ),
    Limit(
        "rewards fail", "reward/error_rate", lambda mean: mean > 0.02,
        "the reward fails on {:.1%} of the responses, which are left out; read their errors in the table of samples",
    ),
    Limit(
        "responses are identical", "response/identical_fraction", lambda mean: mean > 0.8,
        "{:.0%} of the responses of a step are one and the same: the policy ignores its prompts",
    ),
    Limit(
        "devices wait for one", "global_seqlen/busiest_over_mean", lambda mean: mean > 1.5,
        "the busiest device has {:.1f} times the mean work, and the others wait for it (trainer.balance_batch)",
    ),
    Limit(
        "updates are skipped", "actor/skipped_updates", lambda mean: mean > 0.1,
        "{:.2f} optimizer steps of a training step have no finite gradient; incidents/ in the folder replays them",
    ),
)  # fmt: skip


def _entropy_collapsed(run: RunFolder) -> Iterator[Advice]:
    series = run.series("actor/entropy")
    if (
        run.kind == "text"
        and len(series) >= 2 * WINDOW
        and _last(series) < 0.05 * _first(series)
        and _last(series) < 0.05
    ):
        step = next(step for step, value in series.items() if value < 0.1 * _first(series))
        text = (
            f"the entropy collapsed from {_first(series):.3g} to {_last(series):.3g} nats by step {step}: the policy "
            "hardly explores. Raise the clip range (clip_ratio_high) or actor.entropy_coeff, or lower the learning rate"
        )
        yield Advice("entropy collapsed", text, step, ("actor/entropy",), _rows(run, step, "entropy", largest=False))


RULES: Sequence[Callable[[RunFolder], Iterator[Advice]]] = (
    _score_fell, _validation_falls, _parts_disagree, _format_without_accuracy, _critic_is_useless, _no_variance, _cut,
    _longer_without_reward, _one_group_dominates, _entropy_collapsed, *LIMITS,
)  # fmt: skip
