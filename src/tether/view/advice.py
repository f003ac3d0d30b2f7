"""Findings derived from a run's own records: each rule reads metrics and samples, and names the steps that show it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from statistics import fmean, median, pstdev

import numpy as np

from tether.metrics.loggers import validation_means
from tether.metrics.records import unpack
from tether.observations import Array
from tether.types import JsonObject
from tether.view.queries import ACCURACIES, groups, parts, prompts
from tether.view.run import RunFolder

WINDOW = 10
"""Number of steps whose mean represents the state of a run."""
NEAR_MAXIMUM = 0.8
"""Share of the range of rewards above which little remains to be learned."""
MIN_ROWS = 20
"""Minimum number of samples for comparing the means of two kinds of samples."""
MIN_EVALUATIONS = 6
"""Minimum number of evaluations for telling a drop from noise."""
Series = dict[int, float]


@dataclass(frozen=True)
class Advice:
    """A finding of one rule."""

    rule: str
    text: str
    """The finding, with its evidence."""
    step: int
    """The step to inspect."""
    why_step: str
    """Why this step was selected."""
    remedy: str
    """The setting to check or change."""
    guide: str
    """Documentation about the finding, as page and section: ``page#section``."""
    keys: tuple[str, ...] = ()
    """Metrics that show it."""
    rows: list[JsonObject] = field(default_factory=list)
    """Samples that show it, ``{"step": ..., "row": ...}``."""


GUIDE = "troubleshooting"
SCORE, POLICY, RESPONSES, CRITIC, TIME = (
    f"{GUIDE}#{section}" for section in ("the-score", "the-policy", "responses", "the-critic", "memory-and-time")
)
EPISODES = "episodes"
LAST = "the last step"


def advise(run: RunFolder) -> list[JsonObject]:
    """Return the findings of all rules."""
    return [asdict(finding) for rule in RULES.values() for finding in rule(run)]


def _last(series: Series, count: int = WINDOW) -> float:
    return fmean(list(series.values())[-count:])


def _first(series: Series, count: int = WINDOW) -> float:
    return fmean(list(series.values())[:count])


def _score(run: RunFolder) -> tuple[str, Series]:
    key = "critic/score/mean" if run.kind == "text" else "env/return"
    return key, run.series(key)


def _does_well(run: RunFolder) -> bool:
    """Whether the score rises, or is close to the highest reward of the run."""
    return _rises(run) or _is_near_maximum(run)


def _rises(run: RunFolder) -> bool:
    values = list(_score(run)[1].values())
    if len(values) < 2:
        return False
    width = max(2, min(WINDOW, len(values) // 3))
    first, last = values[:width], values[-width:]
    error = math.sqrt((pstdev(first) ** 2 + pstdev(last) ** 2) / width)
    return fmean(last) - fmean(first) > max(2 * error, 1e-9)


def _is_near_maximum(run: RunFolder) -> bool:
    """Whether little remains to be learned; False if the range of rewards is unknown, as in simulators."""
    highest, lowest = (list(run.series(f"critic/score/{end}").values()) for end in ("max", "min"))
    series = _score(run)[1]
    if not highest or not lowest or not series:
        return False
    return _last(series) > min(lowest) + NEAR_MAXIMUM * (max(highest) - min(lowest))


def _validation(run: RunFolder) -> tuple[str, Series]:
    keys = ["eval/return"] if run.kind == "control" else sorted(validation_means(dict.fromkeys(run.keys, 0.0)))
    return (keys[0], run.series(keys[0])) if keys else ("", {})


def _rows(run: RunFolder, step: int, column: str, *, largest: bool = True, count: int = 3) -> list[JsonObject]:
    """Return the rows with the largest or smallest values of a column in the recorded step nearest to `step`."""
    if not run.steps:
        return []
    near = min(run.steps, key=lambda other: abs(other - step))
    if run.kind == "control" and column == "reward":
        column = "return"
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
    has_recovered = _last(series, width) > before[at] - 0.5 * drops[at]
    if not spread or drops[at] < 0.4 * spread or drops[at] < 3 * noise or has_recovered:
        return
    # Among the steps next to the widest gap, select the first whose score is closer to the level after the drop.
    middle = (before[at] + after[at]) / 2
    step = next((s for s, v in zip(steps[at:], values[at:], strict=True) if v < middle), steps[at + width])
    causes = _changes(run, step, width, key)
    because = "; ".join(
        f"{name} went from {one:.3g} to {other:.3g} in step {when}" for name, one, other, when in causes
    )
    text = f"{key} fell from {before[at]:.3g} to {after[at]:.3g} at step {step}. "
    text += f"Shortly before: {because}." if because else "No other metric changed shortly before."
    rows = _rows(run, step, "reward", largest=False)
    yield Advice(
        "score fell",
        text,
        step,
        "the first step whose score is nearer to the later mean than to the earlier one",
        _remedy_of_fall(causes),
        SCORE if not causes or causes[0][0] not in FALLS_OF_POLICY else POLICY,
        (key, *(name for name, *_ in causes)),
        rows,
    )


FALLS_OF_POLICY = {"actor/lr", "actor/ppo_kl", "actor/grad_norm", "actor/ratio_max", "actor/pg_clipfrac"}
"""Metrics whose change is a cause or a sign of too large an update."""


def _remedy_of_fall(causes: Sequence[tuple[str, float, float, int]]) -> str:
    keep = "Resume from a checkpoint before it, and keep the best one (trainer.keep_best=True)."
    first = causes[0][0] if causes else ""
    if first in FALLS_OF_POLICY:
        return f"The policy moved too far: lower or decay actor.optim.lr, or take fewer updates per batch. {keep}"
    if first == "reward/error_rate":
        return f"The reward began to fail: read the errors in the samples. {keep}"
    if first.startswith("response_length"):
        return f"Compare the responses of the steps before and after: their length changed first. {keep}"
    return f"Compare the samples of the steps before and after, and check whether data or reward changed. {keep}"


WATCHED = (
    "actor/lr", "actor/ppo_kl", "actor/grad_norm", "actor/entropy", "actor/pg_clipfrac", "actor/ratio_max",
    "response_length/mean", "response_length/clip_ratio", "reward/error_rate", "training/rollout_probs_diff_mean",
    "critic/vf_explained_var", "critic/grad_norm", "actor/reward_kl_penalty", "actor/kl_loss", "env/episode_len",
)  # fmt: skip


def _changes(run: RunFolder, step: int, width: int, score: str) -> list[tuple[str, float, float, int]]:
    """Return the metrics that left their earlier range shortly before a step or at it, ordered by time."""
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
            f"{len(series)} steps, {_last(series):.2f} on average in the last {WINDOW}."
        )
        remedy = (
            "Raise critic.optim.lr or warm it up (trainer.critic_warmup), or use an estimator without a critic "
            "(algorithm.adv_estimator=grpo)."
        )
        why = f"the first of the last {WINDOW} steps"
        yield Advice("critic explains nothing", text, recent[0], why, remedy, CRITIC, ("critic/vf_explained_var",))


def _validation_falls(run: RunFolder) -> Iterator[Advice]:
    score_key, score = _score(run)
    key, series = _validation(run)
    if len(series) < MIN_EVALUATIONS or len(score) < WINDOW:
        return
    values, steps = list(series.values()), list(series)
    width = max(2, len(values) // 5)
    windows = [values[at : at + width] for at in range(len(values) - width + 1)]
    best = max(range(len(windows)), key=lambda at: fmean(windows[at]))
    top, now = fmean(windows[best]), fmean(windows[-1])
    noise = median(abs(one - other) for one, other in pairwise(values))
    error = math.sqrt((pstdev(windows[best]) ** 2 + pstdev(windows[-1]) ** 2) / width)
    trained = [value for step, value in score.items() if steps[best] - 3 <= step <= steps[best + width - 1] + 3]
    lately = _last(score, min(WINDOW, len(score) // 3 or 1))
    falls = top - now > max(4 * noise, 3 * error, 0.1 * (max(values) - min(values)), 0.02)
    # In a simulator both scores are returns of the same task, so an evaluation above training is not a loss.
    falls &= run.kind == "text" or now < lately
    if best + width < len(windows) and trained and falls and lately > fmean(trained):
        text = (
            f"{key} fell from {top:.3g} at step {steps[best]} to {now:.3g}, while {score_key} rose from "
            f"{fmean(trained):.3g} to {lately:.3g}: "
        )
        if run.kind == "text":
            text += "the policy exploits the reward or memorises its prompts."
            remedy = "Read the samples with the highest reward; add a KL term, more prompts, or repair the reward."
        else:
            text += "the evaluated policy loses what the policy of training gains."
            remedy = "Compare env.eval with env.train: wrappers, observation statistics, actions without noise."
        why = "the step after the best evaluation"
        rows = _rows(run, steps[-1], "reward")
        yield Advice("validation falls", text, steps[best + 1], why, remedy, SCORE, (key, score_key), rows)


EXPLOITED = "reward part is exploited"


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
                f"({loss[0]:.3g} to {loss[-1]:.3g}): the policy exploits {rising!r}."
            )
            remedy = f"Cap {rising!r}, lower its weight, or remove it; or pay it only where {falling!r} is high."
            keys = (f"reward/extra/{rising}/mean", f"reward/extra/{falling}/mean")
            rows = _rows(run, step, f"part/{rising}")
            yield Advice(EXPLOITED, text, step, "the last recorded step", remedy, SCORE, keys, rows)


def _trend(steps: Sequence[int], means: Sequence[float | None]) -> float:
    """Return the correlation of means with steps; 0 if they change by less than a twentieth of their size."""
    pairs = [(step, mean) for step, mean in zip(steps, means, strict=True) if mean is not None]
    values = [mean for _, mean in pairs]
    third = max(1, len(values) // 3)
    change = abs(fmean(values[-third:]) - fmean(values[:third]))
    if change < 0.1 * max(map(abs, values)):
        return 0.0
    return _correlation([step for step, _ in pairs], values) or 0.0


def _correlation(one: Iterable[float], other: Iterable[float]) -> float | None:
    """Return the correlation of finite pairs; None if one side is constant."""
    pairs = np.array([list(one), list(other)], dtype=np.float64)
    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
    if pairs.shape[1] < 3 or (pairs.max(axis=1) == pairs.min(axis=1)).any():
        return None
    return float(np.asarray(np.corrcoef(pairs))[0, 1])


def _format_without_accuracy(run: RunFolder) -> Iterator[Advice]:
    means = {one["name"]: [mean for mean in one["means"] if mean is not None] for one in parts(run)}
    layout = next((values for name, values in means.items() if "format" in name), [])
    accuracy = next((values for name, values in means.items() if name in ACCURACIES), [])
    if len(layout) < WINDOW or len(accuracy) < WINDOW:
        return
    third = len(layout) // 3
    first, last = accuracy[:third], accuracy[-third:]
    gained, solved = fmean(layout[-third:]) - fmean(layout[:third]), fmean(last) - fmean(first)
    error = math.sqrt((pstdev(first) ** 2 + pstdev(last) ** 2) / third)
    is_flat = abs(solved) < 0.05 and abs(solved) <= 2 * error  # from 1 % to 3 % is a beginning, unless it is noise
    if gained > 0.3 and fmean(layout[-third:]) > 0.8 and is_flat and fmean(last) < 0.5:
        text = (
            f"the format is learned (+{gained:.2f}) while the accuracy stays at {fmean(accuracy[-third:]):.2f}: the "
            "reward of the format is all that the policy still gets."
        )
        remedy, rows = "Lower its weight, or take easier prompts.", _rows(run, run.steps[-1], "reward")
        why = "the last recorded step"
        yield Advice("format without accuracy", text, run.steps[-1], why, remedy, SCORE, (), rows)


def _cut(run: RunFolder) -> Iterator[Advice]:
    series = run.series("response_length/clip_ratio")
    if run.kind != "text" or len(series) < 5 or _last(series) <= 0.3:
        return
    rewards = {True: list[float](), False: list[float]()}
    for at in run.steps[-WINDOW:]:
        columns = run.columns(at)
        if {"truncated", "reward"} <= columns.keys():
            for truncated in (True, False):
                chosen = columns["reward"][columns["truncated"].astype(bool) == truncated]
                rewards[truncated] += chosen[np.isfinite(chosen)].tolist()
    cut, complete = rewards[True], rewards[False]
    text = f"{_last(series):.0%} of the responses of the last steps were cut by the length limit"
    if min(len(cut), len(complete)) >= MIN_ROWS:
        error = math.sqrt(pstdev(cut) ** 2 / len(cut) + pstdev(complete) ** 2 / len(complete))
        if fmean(complete) - fmean(cut) <= max(3 * error, 0.1 * (max(cut + complete) - min(cut + complete))):
            return
        text += f": their mean reward is {fmean(cut):.3g}, that of complete ones {fmean(complete):.3g}."
    elif len(series) < 2 * WINDOW or _does_well(run):  # for example answers of a fixed length that fill the limit
        return
    else:
        text += ", and the score neither rises nor is near its maximum."
    step = list(series)[-1]
    remedy = "Raise data.max_response_length, or penalise length (reward_model.overlong_buffer)."
    rows = _rows(run, step, "truncated")
    yield Advice("responses are cut", text, step, LAST, remedy, RESPONSES, ("response_length/clip_ratio",), rows)


def _longer_without_reward(run: RunFolder) -> Iterator[Advice]:
    length, (key, score) = run.series("response_length/mean"), _score(run)
    if run.kind != "text" or len(length) < 3 * WINDOW or len(score) < 3 * WINDOW:
        return
    noise = max(pstdev(list(score.values())[:WINDOW]), 1e-6)
    if _last(length) > 1.5 * _first(length) and _last(score) - _first(score) < noise:
        step = list(length)[-1]
        text = (
            f"responses grew from {_first(length):.0f} to {_last(length):.0f} tokens, and {key} did not rise "
            f"({_first(score):.3g} to {_last(score):.3g})."
        )
        remedy = "Penalise length (reward_model.overlong_buffer.enable), or aggregate the loss by tokens."
        keys, rows = ("response_length/mean", key), _rows(run, step, "length")
        yield Advice("longer without reward", text, step, LAST, remedy, RESPONSES, keys, rows)


def _one_group_dominates(run: RunFolder) -> Iterator[Advice]:
    heavy = []
    for step in run.steps[-WINDOW:] if run.kind == "text" else ():
        listed = groups(run, step)
        if len(listed) >= 4 and (listed[0].get("gradient_share") or 0.0) > 0.6:
            heavy.append((step, listed[0]))
    # Near the end, few hard prompts may provide all of the gradient.
    if len(heavy) > WINDOW // 2 and not _is_near_maximum(run):
        step, top = heavy[-1]
        text = (
            f"in {len(heavy)} of the last {WINDOW} recorded steps one prompt took more than 60 % of the gradient "
            f"({top['gradient_share']:.0%} in step {step}): the others have groups without variance or short responses."
        )
        remedy = "Take prompts of another difficulty, and look at the rewards and lengths of this group."
        why, rows = "the last step in which one does", [{"step": step, "row": row} for row in top["rows"][:3]]
        yield Advice("one prompt dominates", text, step, why, remedy, SCORE, (), rows)


def _no_variance(run: RunFolder) -> Iterator[Advice]:
    series = run.series("group/zero_std_fraction")
    if len(series) >= 2 * WINDOW and _last(series) > 0.8 and not _does_well(run):
        text = (
            f"{_last(series):.0%} of the prompts of the last steps had equal rewards for all of their responses, which "
            "teach nothing, and the score neither rises nor is near its maximum."
        )
        remedy = (
            "Take prompts of another difficulty, more responses (rollout.n), or algorithm.filter_groups.enable=True."
        )
        step = list(series)[-1]
        yield Advice("groups without variance", text, step, LAST, remedy, SCORE, ("group/zero_std_fraction",))


@dataclass(frozen=True)
class Limit:
    """A rule about the mean of a metric over the last steps."""

    rule: str
    key: str
    is_wrong: Callable[[float], bool]
    text: str
    """Text of the finding; ``{}`` is replaced by the mean."""
    remedy: str
    guide: str
    column: str = ""
    """The column whose largest values show the problem."""
    unless: str = ""
    """A switch of the configuration under which the metric means something else."""

    def __call__(self, run: RunFolder) -> Iterator[Advice]:
        """Yield the finding, if the mean is out of range."""
        series = run.series(self.key) if not self.unless or not run.setting(self.unless) else {}
        if len(series) >= 5 and self.is_wrong(mean := _last(series)):
            step = max(list(series)[-WINDOW:], key=lambda at: abs(series[at]))
            rows = _rows(run, step, self.column) if self.column else []
            why = f"the one of the last {WINDOW} steps with the largest value"
            yield Advice(self.rule, self.text.format(mean), step, why, self.remedy, self.guide, (self.key,), rows)


LIMITS = (
    Limit(
        "first ratio is not 1", "actor/first_update/ratio_max", lambda mean: mean > 1.05,
        "at the first optimizer step the policy is still the old one, yet its largest ratio is {:.3f}: old log-probs "
        "and update disagree.", "Check number formats and dropout.", RESPONSES, "ratio",
        unless="algorithm.rollout_correction.bypass_mode",  # old log-probs are then the sampler's
    ),
    Limit(
        "few effective samples", "rollout_corr/rollout_is_eff_sample_size", lambda mean: mean < 0.3,
        "the importance weights leave {:.0%} effective samples: the sampler is too far from the trainer.",
        "Take the same dtype on both sides, or weights that are less stale.", RESPONSES, "mismatch",
    ),
    Limit(
        "sampler and trainer differ", "training/rollout_mismatch_alarm", lambda mean: mean > 0.2,
        "in {:.0%} of the last steps sampler and trainer disagreed by more than their number formats explain.",
        "Take the same dtype on both sides, or correct for it (algorithm.rollout_correction.rollout_is=token).",
        RESPONSES, "mismatch",
    ),
    Limit(
        "much is clipped", "actor/pg_clipfrac", lambda mean: mean > 0.4,
        "{:.0%} of the tokens are clipped, which learn nothing.",
        "Lower the learning rate or the number of epochs.", POLICY, "ratio",
    ),
    Limit(
        "rewards fail", "reward/error_rate", lambda mean: mean > 0.02,
        "the reward fails on {:.1%} of the responses, which are left out.",
        "Read their errors in the table of samples.", SCORE,
    ),
    Limit(
        "responses are identical", "response/identical_fraction", lambda mean: mean > 0.8,
        "{:.0%} of the responses of a step are one and the same: the policy ignores its prompts.",
        "Balance the answers in the data, add a KL loss, or lower the learning rate.", POLICY,
    ),
    Limit(
        "devices wait for one", "global_seqlen/busiest_over_mean", lambda mean: mean > 1.5,
        "the busiest device has {:.1f} times the mean work, and the others wait for it.",
        "Set trainer.balance_batch=True.", TIME,
    ),
    Limit(
        "updates are skipped", "actor/skipped_updates", lambda mean: mean > 0.1,
        "{:.2f} optimizer steps of a training step have no finite gradient.",
        "Replay them: incidents/ in the folder of the run has the mini-batches.", POLICY,
    ),
)  # fmt: skip


def _entropy_collapsed(run: RunFolder) -> Iterator[Advice]:
    series = run.series("actor/entropy")
    if (
        run.kind == "text"
        and len(series) >= 2 * WINDOW
        and _last(series) < 0.05 * _first(series)
        and _last(series) < 0.05
        and not _is_near_maximum(run)  # nothing remains to be explored once everything is solved
    ):
        step = next(step for step, value in series.items() if value < 0.1 * _first(series))
        text = (
            f"the entropy collapsed from {_first(series):.3g} to {_last(series):.3g} nats by step {step}: the policy "
            "hardly explores."
        )
        remedy = "Raise actor.clip_ratio_high or actor.entropy_coeff, or lower the learning rate."
        why, rows = "the first below a tenth of the beginning", _rows(run, step, "entropy", largest=False)
        yield Advice("entropy collapsed", text, step, why, remedy, POLICY, ("actor/entropy",), rows)


def _never_solved(run: RunFolder) -> Iterator[Advice]:
    listed = prompts(run, limit=None) if run.kind == "text" else {"rows": []}
    rows = listed["rows"]
    never = [one for one in rows if one["never"]]
    others = [one for one in rows if not one["never"]]
    # If most prompts are never solved, the policy is the problem rather than the prompts.
    if not never or len(never) > len(others):
        return
    share = sum(one["solved"] for one in others) / sum(one["attempts"] for one in others)
    # A prompt of average difficulty would be very unlikely to fail so often.
    evident = [
        one for one in never if one["attempts"] >= MIN_ROWS and len(rows) * (1 - share) ** one["attempts"] < 0.01
    ]
    if evident:
        evident.sort(key=lambda one: (-one["attempts"], one["index"]))
        names = ", ".join(str(one["index"]) for one in evident[:10]) + (", ..." if len(evident) > 10 else "")
        plural = "s" if len(evident) > 1 else ""
        fewest, highest = min(one["attempts"] for one in evident), max(one["attempts"] for one in evident)
        text = (
            f"{len(evident)} of {len(rows)} prompts (index {names}) had no solved response in "
            f"{fewest if fewest == highest else f'{fewest} to {highest}'} attempts{' each' if plural else ''}, while "
            f"{share:.0%} of the responses to the others are solved. Solved means: {listed['solved_means']}."
        )
        remedy = (
            f"Read their responses and check the expected answer{plural}; without a mistake there, leave the "
            f"prompt{plural} out until the policy is better, or give partial credit. All of them: tether view RUN "
            "--prompts --json."
        )
        shown = [{"step": one["step"], "row": one["row"]} for one in evident[:3]]
        why = "the last step that has such a prompt"
        yield Advice("prompts never solved", text, shown[0]["step"], why, remedy, SCORE, (), shown)


def _falls(run: RunFolder) -> Iterator[Advice]:
    """Yield the point at which episodes of a simulator fail, if most end early and the critic's values drop before."""
    if run.kind != "control" or _last(run.series("env/success_once") or {0: 0.0}) > 0.5:
        return
    ended, num_terminated, episodes = 0, 0, []
    for step in run.steps[-WINDOW:]:
        columns = run.columns(step)
        if not {"from_start", "terminated", "truncated"} <= columns.keys():
            return
        complete = columns["from_start"].astype(bool) & (columns["terminated"] | columns["truncated"]).astype(bool)
        ended += int(complete.sum())
        num_terminated += int((complete & columns["terminated"].astype(bool)).sum())
        for one in (run.record("episodes", step) or {"rows": []})["rows"]:
            row = one["segment"]
            if complete[row] and columns["terminated"][row] and "values" in one["values"]:
                episodes.append((step, row, _abrupt_drop(unpack(one["values"]["values"]))))
    seen = [(step, row, *drop) for step, row, drop in episodes if drop is not None]
    if ended < MIN_ROWS or num_terminated < 0.8 * ended or len(episodes) < 3 or len(seen) < 2 / 3 * len(episodes):
        return
    step, row, at, before, after = max(seen, key=lambda one: (one[0], one[2]))
    drop_steps = sorted(one[2] for one in seen)
    text = (
        f"{num_terminated} of the {ended} complete episodes of the last {min(WINDOW, len(run.steps))} recorded "
        f"training steps end terminated, and in {len(seen)} of {len(episodes)} recorded ones the critic's value drops "
        f"at once, in the median at step {drop_steps[len(drop_steps) // 2]} of the episode. In episode {row} of "
        f"training step {step} it drops most at step {at} of the episode, from {before:.3g} to {after:.3g}."
    )
    remedy = (
        "Look at observation, action and film there: what the policy does shortly before is what to reward, or to "
        "train from more often. Terminations that are a success are no fault."
    )
    rows = [
        {"step": one[0], "row": one[1], "token": one[2]} for one in sorted(seen, key=lambda one: (-one[0], -one[2]))[:3]
    ]
    why = "the last recorded training step, and the episode that got furthest in it"
    yield Advice("episodes end early", text, step, why, remedy, EPISODES, ("env/episode_len", "env/return"), rows)


def _abrupt_drop(values: Array) -> tuple[int, float, float] | None:
    """Return the step of the largest drop, with the values before and after it, if the drop is abrupt."""
    values = values.astype(np.float64)
    if len(values) < 10 or not np.isfinite(values).all():
        return None
    change = np.diff(values)
    at = int(np.argmin(change)) + 1
    if -change[at - 1] < max(0.3 * np.ptp(values), 5 * float(np.median(np.abs(change)))):
        return None
    return at, float(values[at - 1]), float(values[at])


RULES: Mapping[str, Callable[[RunFolder], Iterator[Advice]]] = {
    "score fell": _score_fell,
    "validation falls": _validation_falls,
    EXPLOITED: _parts_disagree,
    "format without accuracy": _format_without_accuracy,
    "critic explains nothing": _critic_is_useless,
    "groups without variance": _no_variance,
    "responses are cut": _cut,
    "longer without reward": _longer_without_reward,
    "one prompt dominates": _one_group_dominates,
    "prompts never solved": _never_solved,
    "episodes end early": _falls,
    "entropy collapsed": _entropy_collapsed,
    **{limit.rule: limit for limit in LIMITS},
}
RULE_NAMES = list(RULES)
