"""Questions about one run, answered as plain data; the page, exported files and ``--json`` use the same functions."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tether.metrics.keys import describe
from tether.metrics.loggers import validation_means
from tether.metrics.records import unpack
from tether.observations import Array
from tether.spelling import did_you_mean
from tether.types import JsonObject
from tether.view.conversation import message_turn, shown_turns, split_turns
from tether.view.expression import matching
from tether.view.run import RunFolder

Z = 1.96
"""Half-width of a 95 % interval, in standard errors."""
OUTSIDE_STEP = {"timing_s/env", "timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"}
Numbers = list[float | None]
"""Numbers per token or step; None for those that are not finite."""
MAX_ROWS = 500
"""Maximum number of table rows that the page requests at once."""
RECORD_MORE = "trainer.record_mb"


@dataclass(frozen=True)
class TrendChart:
    """One chart, of keys that share a scale."""

    title: str
    keys: tuple[str, ...]
    interval: tuple[str, str] | None = None
    """Keys of the lower and upper bound of the last key's interval."""


@dataclass(frozen=True)
class TrendPanel:
    """A panel of charts that answer one question."""

    title: str
    charts: tuple[TrendChart, ...]


TEXT_PANELS = (
    TrendPanel("Score", (TrendChart("training", ("critic/score/mean",)), TrendChart("validation", ("val-core/*",)))),
    TrendPanel(
        "Length",
        (TrendChart("tokens", ("response_length/mean",)), TrendChart("share cut", ("response_length/clip_ratio",))),
    ),
    TrendPanel(
        "KL and entropy",
        (
            TrendChart(
                "KL in nats per token", ("actor/ppo_kl", "actor/reward_kl_penalty", "actor/kl_loss", "distillation/kl")
            ),
            TrendChart("entropy in nats per token", ("actor/entropy",)),
        ),
    ),
    TrendPanel(
        "Ratio, clipping, mismatch",
        (
            TrendChart("share clipped", ("actor/pg_clipfrac",)),
            TrendChart("ratio", ("actor/ratio_mean", "actor/ratio_max")),
            TrendChart("mismatch of probabilities", ("training/rollout_probs_diff_mean", "rollout_corr/kl")),
        ),
    ),
    TrendPanel(
        "Critic and groups",
        (
            TrendChart("explained variance", ("critic/vf_explained_var",)),
            TrendChart("values and returns", ("critic/values/mean", "critic/returns/mean")),
            TrendChart("groups without variance", ("group/zero_std_fraction",)),
        ),
    ),
    TrendPanel("Seconds of a step", (TrendChart("by phase", ("timing_s/*",)),)),
)
CONTROL_PANELS = (
    TrendPanel(
        "Return",
        (
            TrendChart("training", ("env/return",)),
            TrendChart("evaluation", ("eval/return",), ("eval/return_low", "eval/return_high")),
        ),
    ),
    TrendPanel(
        "Episodes",
        (
            TrendChart("steps", ("env/episode_len", "eval/episode_len")),
            TrendChart("success", ("env/success_once", "eval/success_once")),
        ),
    ),
    TrendPanel(
        "KL and entropy",
        (
            TrendChart("KL in nats per action", ("actor/ppo_kl",)),
            TrendChart("entropy in nats per action", ("actor/entropy",)),
        ),
    ),
    TrendPanel(
        "Ratio and clipping",
        (TrendChart("share clipped", ("actor/pg_clipfrac",)), TrendChart("ratio", ("actor/ratio_max",))),
    ),
    TrendPanel(
        "Critic",
        (
            TrendChart("explained variance", ("critic/vf_explained_var",)),
            TrendChart("values and returns", ("critic/values/mean", "critic/returns/mean")),
        ),
    ),
    TrendPanel("Seconds of a step", (TrendChart("by phase", ("timing_s/*",)),)),
)


def overview(run: RunFolder) -> JsonObject:
    """Return what the first page shows in addition to curves: kind, state, panels, marks and what was not recorded."""
    keys = set(run.keys)
    last = max(run.metrics, default=0)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "kind": run.kind,
        "running": run.is_running,
        "version": run.version,
        "last_step": last,
        "total_steps": next((e["total_steps"] for e in reversed(run.events) if e["kind"] == "start"), None),
        "steps": run.steps,
        "validation_steps": run.validation_steps,
        "panels": panels(run.kind, keys, run),
        "metrics": {key: _meaning(key) for key in sorted(keys)},
        "marks": marks(run),
        "missing": run.missing_data,
        "film": run.last_image_episode if run.kind == "control" else None,
        "has_tasks": run.kind == "control" and bool(tasks(run)),
        "videos": run.videos,
        "axes": [axis for axis in AXES if axis == "step" or axis_values(run, axis)],
    }


def _meaning(key: str) -> JsonObject:
    info = describe(key)
    return {
        "meaning": info.meaning if info else "A metric of this run's own.",
        "healthy": info.healthy if info else None,
    }


def panels(kind: str, keys: set[str], run: RunFolder) -> list[JsonObject]:
    """Return the panels for a kind of run, with the charts for which a metric was logged."""
    shown: list[JsonObject] = []
    for panel in TEXT_PANELS if kind == "text" else CONTROL_PANELS:
        charts = []
        for chart in panel.charts:
            present = [key for name in chart.keys for key in _expanded(name, keys, run)]
            if present:
                charts.append({"title": chart.title, "keys": present, "interval": chart.interval})
        if charts:
            shown.append({"title": panel.title, "charts": charts})
    return shown


def _expanded(name: str, keys: set[str], run: RunFolder) -> list[str]:
    if name == "val-core/*":
        return sorted(validation_means(dict.fromkeys(keys, 0.0)))
    if name == "timing_s/*":
        phases = [key for key in keys if key.startswith("timing_s/")]
        means = {key: run.mean(key) or 0.0 for key in phases if key not in OUTSIDE_STEP}
        return [key for key in sorted(means, key=lambda key: -means[key]) if means[key] > 0.005 * sum(means.values())]
    return [name] if name in keys else []


AXES = ("step", "samples", "tokens", "seconds")


def axis_values(run: RunFolder, axis: str) -> dict[int, float]:
    """Return each step's position on an axis: the step, or total samples, tokens or seconds; empty if unknown."""
    steps = sorted(run.metrics)
    if axis == "step":
        return {step: float(step) for step in steps}
    if run.kind == "control" and axis == "samples":
        return run.series("perf/env_steps")
    if axis == "samples":
        width, responses = run.setting("data.train_batch_size"), run.setting("actor_rollout_ref.rollout.n")
        return {step: float(step * width * responses) for step in steps} if width and responses else {}
    key = "perf/total_num_tokens" if axis == "tokens" else "timing_s/step"
    total, values = 0.0, {}
    for step in steps:
        total += run.metrics[step].get(key) or 0.0
        values[step] = total
    return values if total else {}


def curves(run: RunFolder, keys: Sequence[str], axis: str = "step") -> JsonObject:
    """Return the points of metrics, ``{key: {"x": [...], "y": [...]}}``, with known intervals of validation scores."""
    if axis not in AXES:
        raise ValueError(f"axis={axis}: must be one of {', '.join(AXES)}")
    metrics = set(run.keys)
    for key in keys:
        if key not in metrics:
            raise ValueError(f"no such metric in {run.name}: {key!r}.{did_you_mean(key, metrics)}")
    at = axis_values(run, axis)
    answer: JsonObject = {}
    for key in keys:
        points = {step: value for step, value in run.series(key).items() if step in at}
        answer[key] = {"step": list(points), "x": [at[step] for step in points], "y": list(points.values())}
        if axis == "step" and (dropped := _dropped(run, key)):
            answer[key]["discarded"] = dropped
        low, high = run.series(f"{key}_low"), run.series(f"{key}_high")
        if low and high:
            answer[key] |= {"low": [low.get(s) for s in points], "high": [high.get(s) for s in points]}
        elif key.startswith("val-core/"):
            limits = [binomial(value, _validation_size(run, key, step)) for step, value in points.items()]
            if all(limits):
                answer[key] |= {
                    "low": [pair[0] for pair in limits if pair],
                    "high": [pair[1] for pair in limits if pair],
                }
    return answer


def _dropped(run: RunFolder, key: str) -> list[JsonObject]:
    """Return the points of a metric in discarded steps, one list for each branch that a resume abandoned."""
    known = [[one for one in branch if one.get(key) is not None] for branch in run.discarded]
    return [{"x": [one["step"] for one in branch], "y": [one[key] for one in branch]} for branch in known if branch]


def _validation_size(run: RunFolder, key: str, step: int) -> int:
    """Return the number of validation prompts behind a metric if its scores are 0 or 1, else 0."""
    source = key.removeprefix("val-core/").rsplit("/", 2)[0]
    cache = run.validation_sizes
    if (source, step) not in cache:
        samples = [sample for sample in run.validation(step) if sample["data_source"] == source]
        is_binary = all(sample["reward"] in (0, 1, None) for sample in samples)
        cache[source, step] = len({sample["index"] for sample in samples}) if is_binary else 0
    return cache[source, step]


def binomial(share: float, count: int) -> tuple[float, float] | None:
    """Return Wilson's 95 % interval (1927) of a share of `count`; None if the value is not a share."""
    if not count or not 0 <= share <= 1:
        return None
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


MARKS = (
    ("rollback", re.compile("rollback|goes back to")),
    ("oom", re.compile("did not fit into memory|out of memory")),
    ("restart", re.compile("[Rr]estart|server .*(died|hung)|lost")),
)
"""Kinds of warnings by their text; all other warnings are alarms."""


def marks(run: RunFolder) -> list[JsonObject]:
    """Return events by step: starts, resumes, warnings by kind, checkpoints, and failures counted by metrics."""
    events: list[JsonObject] = []
    for event in run.events:
        if event["kind"] == "start":
            if event["resumed"]:
                events.append({"step": event["step"], "kind": "resume", "text": f"resumed from step {event['step']}"})
            continue
        kind = next((kind for kind, pattern in MARKS if pattern.search(event["text"])), "alarm")
        events.append({"step": event["step"] + 1, "kind": kind, "text": event["text"]})
    for step, record in run.metrics.items():
        if "timing_s/save_checkpoint" in record:
            events.append({"step": step, "kind": "checkpoint", "text": f"checkpoint of step {step}"})
        for key, kind in (
            ("transfer/server_failures", "restart"),
            ("reward/excluded_rows", "dropped"),
            ("training/rollout_mismatch_alarm", "alarm"),
            ("actor/skipped_updates", "alarm"),
        ):
            if value := record.get(key):
                events.append({"step": step, "kind": kind, "text": f"{key} = {value:g}: {_meaning(key)['meaning']}"})
    for branch in run.discarded:
        first, last = branch[0]["step"], branch[-1]["step"]
        text = f"steps {first} to {last} were done, then dropped by a resume from an earlier step"
        events.append({"step": first, "kind": "discarded", "text": text, "until": last})
    return sorted(events, key=lambda mark: mark["step"])


def samples(
    run: RunFolder,
    *,
    step: int | None = None,
    where: str | None = None,
    text: str | None = None,
    sort: str | None = None,
    limit: int = 50,
) -> JsonObject:
    """Return rows of the table of samples (for simulators, of episodes).

    Args:
        run: the run.
        step: the step; None: all recorded steps.
        where: an expression over columns, such as ``reward==0 and length>200``.
        text: only rows that contain this text.
        sort: a column; with a leading ``-`` in descending order.
        limit: maximum number of rows.

    Raises:
        ValueError: an expression or column is invalid, or the step was not recorded.
    """
    steps = run.steps if step is None else [_recorded(run, step)]
    if text:
        with_text = set(run.steps_with_text(text))
        steps = [one for one in steps if one in with_text]
    candidates: list[tuple[int, Array]] = []
    for one in steps:
        columns = run.columns(one)
        rows = np.arange(len(next(iter(columns.values()))))
        if where:
            rows = rows[matching(where, columns | {"step": np.full(len(rows), one)}, len(rows))]
        if text and len(rows):
            rows = rows[[_contains(run, one, int(row), text) for row in rows]]
        if len(rows):
            candidates.append((one, rows))
    total = sum(len(rows) for _, rows in candidates)
    ordered = _sorted(run, candidates, sort, limit)
    return {
        "step": step,
        "total": total,
        "shown": len(ordered),
        "columns": (names := list(run.columns(steps[0])) if steps else []),
        "meanings": {name: column_meaning(name) for name in names},
        "rows": [_row(run, one, row) for one, row in ordered],
        "left_out": (record := run.record("tokens" if run.kind == "text" else "episodes", step)) and record["left_out"]
        if step is not None
        else 0,
        "record_more": RECORD_MORE,
        "not_recorded": {
            name: needs for name, needs in EPISODE_NEEDS.items() if run.kind == "control" and name not in names
        },
    }


COLUMNS = {
    "index": "the prompt in its data set",
    "group": "responses to one prompt in a step share it",
    "reward": "reward of the response, before penalties of KL",
    "reward_seconds": "seconds of the call of the reward; none where it was not called",
    "length": "tokens of the response, or steps of the episode",
    "truncated": "whether the limit of its length ended it",
    "ratio": "the largest ratio of a token, before and after the update",
    "mismatch": "the largest difference of a token's log-prob between trainer and sampler",
    "ref_kl": "mean log-prob of the policy minus that of the reference, in nats per token",
    "entropy": "mean entropy of the policy at its tokens, in nats",
    "value": "mean of the critic's values",
    "return": "sum of the rewards (of text: what is still to come, as a mean over its tokens)",
    "advantage": "mean advantage of its tokens",
    "gradient_share": "share of the step's sum of |advantage| over trained tokens",
    "moved": "advantage times log-ratio, summed: above 0 the update made what was rewarded likelier",
    "policy_version": "number of updates of the weights that sampled it",
    "env": "index of the environment",
    "first": "step of the rollout at which the segment begins",
    "from_start": "whether it begins with its episode, or the episode began in an earlier rollout",
    "terminated": "whether the task ended the episode, such as by a fall or a success",
    "success": "whether the task has been solved in the episode so far",
    "seed": "seed with which the episode was reset; none where its environment went on with its own generator",
    "task": "the task, as the environment describes it",
}
"""Column of the table of samples or episodes -> its meaning."""


def column_meaning(name: str) -> str | None:
    """Return the meaning of a column; None if it is unknown."""
    if name.startswith("part/"):
        return f"{name.removeprefix('part/')}, a part of the reward"
    if name.startswith("info/"):
        return f"{name.removeprefix('info/')}, which the environment reported"
    return COLUMNS.get(name)


DISTRIBUTIONS = {"text": ("reward", "length", "ratio", "advantage"), "control": ("return", "length")}
BINS = 24


def distributions(run: RunFolder, step: int) -> list[JsonObject]:
    """Return histograms and quartiles of the `DISTRIBUTIONS` columns over a step's samples or episodes.

    Raises:
        ValueError: the step was not recorded.
    """
    columns, summaries = run.columns(_recorded(run, step)), list[JsonObject]()
    for name in DISTRIBUTIONS[run.kind]:
        values = columns.get(name, np.array([])).astype(np.float64)
        values = values[np.isfinite(values)]
        if len(values) == 0:
            continue
        counts, edges = np.histogram(values, min(BINS, max(1, len(np.unique(values)))))
        low, first, median, third, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
        summaries.append(
            {"name": name, "counts": counts.tolist(), "edges": edges.tolist(), "mean": float(values.mean())}
            | {"lowest": low, "first quartile": first, "median": median, "third quartile": third, "highest": high}
        )
    return summaries


def _recorded(run: RunFolder, step: int) -> int:
    if step not in run.steps:
        near = sorted(run.steps, key=lambda other: abs(other - step))[:1]
        nearest = f"; the nearest recorded step is {near[0]}" if near else ""
        raise ValueError(
            f"step {step}: not recorded{nearest}. Steps are skipped while recording would take more than 1 % of the "
            f"time, and {RECORD_MORE}=0 records none"
        )
    return step


def _sorted(
    run: RunFolder, candidates: Sequence[tuple[int, Array]], sort: str | None, limit: int
) -> list[tuple[int, int]]:
    if not candidates:
        return []
    steps = np.concatenate([np.full(len(rows), step) for step, rows in candidates])
    rows = np.concatenate([rows for _, rows in candidates])
    order = np.arange(len(rows))
    if sort:
        name = sort.removeprefix("-")
        if name == "step":
            values = steps.astype(np.float64)
        else:
            columns = run.columns(candidates[-1][0])
            if name not in columns:
                raise ValueError(f"sort={sort}: no such column. Columns: step, {', '.join(columns)}")
            none = np.array([np.nan])
            values = np.concatenate(
                [run.columns(step).get(name, none.repeat(max(rows) + 1))[rows] for step, rows in candidates]
            ).astype(np.float64)
        last = np.isnan(values)
        order = np.lexsort((np.nan_to_num(-values if sort.startswith("-") else values), last))
    return [(int(steps[at]), int(rows[at])) for at in order[:limit]]


def _texts(run: RunFolder, step: int) -> JsonObject:
    return run.record("texts", step) or {"rows": [], "prompts": {}}


def _contains(run: RunFolder, step: int, row: int, text: str) -> bool:
    texts = _texts(run, step)
    if row >= len(texts["rows"]):
        return False
    prompt = texts["prompts"].get(str(run.columns(step)["group"][row]), {})
    return text in texts["rows"][row]["response"] or text in prompt.get("prompt", "") or text in str(texts["rows"][row])


def _row(run: RunFolder, step: int, row: int) -> JsonObject:
    columns = run.columns(step)
    answer: JsonObject = {"step": step, "row": row}
    answer |= {name: plain(column[row]) for name, column in columns.items()}
    if run.kind == "text":
        texts = _texts(run, step)
        if row < len(texts["rows"]):
            one = texts["rows"][row]
            prompt = texts["prompts"].get(str(columns["group"][row]), {})
            answer |= {"prompt": prompt.get("prompt", ""), "response": one["response"], "cut": one.get("cut", 0)}
            answer |= {"ground_truth": prompt.get("ground_truth"), "data_source": prompt.get("data_source")}
            answer |= {name: one[name] for name in ("extra", "error", "traceback") if name in one}
    else:
        if "seed" in columns and answer["seed"] < 0:
            answer["seed"] = None
        if "task" in columns:
            answer["task"] = run.task_names(step)[answer["task"]]
    kind = "tokens" if run.kind == "text" else "episodes"
    answer["recorded"] = row in _detailed(run, kind, step)
    return answer


def _detailed(run: RunFolder, kind: str, step: int) -> dict[int, JsonObject]:
    """Return the rows of a step that were recorded in detail, by index."""
    rows = (run.record(kind, step) or {"rows": []})["rows"]
    return {row["row" if kind == "tokens" else "segment"]: row for row in rows}


def plain(value: Any) -> Any:
    """Convert a number of a column to a JSON value."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(packed: JsonObject) -> Numbers:
    """Return a packed array as a list, with None for numbers that are not finite."""
    array = unpack(packed)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return [plain(value) for value in array.ravel()]
    listed: Numbers = array.tolist()
    return listed


def sample(run: RunFolder, step: int, row: int) -> JsonObject:
    """Return everything that was recorded about a response; ``tokens`` is None if its tokens were not recorded.

    Raises:
        ValueError: the step was not recorded, or has no such row, or the run is in a simulator.
    """
    if run.kind != "text":
        raise ValueError(f"{run.folder}: is a run in a simulator, which has episodes and no responses")
    columns = run.columns(_recorded(run, step))
    if not 0 <= row < len(columns["reward"]):
        raise ValueError(f"step {step} has no sample {row}; it has {len(columns['reward'])}")
    answer = _row(run, step, row)
    recorded = _detailed(run, "tokens", step)
    answer["neighbours"] = sorted(recorded)
    if row in recorded:
        one = recorded[row]
        values = {name: numbers(packed) for name, packed in one["values"].items()}
        answer["tokens"] = {
            "pieces": one["pieces"],
            "ids": numbers(one["response_ids"]),
            "prompt_ids": numbers(one["prompt_ids"]),
            "mask": numbers(one["mask"]),
            "values": values | derived(values),
        }
        answer |= {"reasons": one["reasons"], "messages": one["messages"]}
        answer |= {"exact_prompt": one["prompt"], "exact_response": one["response"]}
        turns = split_turns(one["prompt"] + one["response"])
    else:
        answer["tokens"] = None
        turns = []
        answer["why_no_tokens"] = (
            f"Of {len(columns['reward'])} responses of this step {len(recorded)} were recorded token by token; "
            f"{RECORD_MORE} bounds how many."
        )
    if not turns:
        messages = answer.get("messages") or [{"role": "user", "content": answer.get("prompt")}]
        messages = [*messages, {"role": "assistant", "content": answer.get("response")}]
        turns = [message_turn(message) for message in messages]
    answer["turns"] = shown_turns(turns)
    clip = [run.setting(f"actor_rollout_ref.actor.clip_ratio_{side}") for side in ("low", "high")]
    answer["clip"] = clip if None not in clip else [0.2, 0.2]
    # The response was sampled with the weights after the previous step.
    answer["checkpoint"] = min(run.checkpoints, key=lambda at: (abs(at - (step - 1)), at), default=None)
    answer["gamma"] = run.setting("algorithm.gamma")
    parts_of_reward = run.setting("reward_model.parts") or {}
    answer["weights"] = {name: section.get("weight", 1.0) for name, section in parts_of_reward.items()}
    answer["not_recorded"] = _not_recorded(answer)
    return answer


def _floats(values: Numbers) -> Array:
    """Return numbers as an array, with None as NaN."""
    return np.array(values, dtype=np.float64)


def _listed(values: Array) -> Numbers:
    """Return an array as numbers, with None for values that are not finite."""
    return [plain(value) for value in values]


def derived(values: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return values derived from the recorded ones, per token: ratio, mismatch, reference KL, TD error."""
    derivations: dict[str, Numbers] = {}
    known = {name: _floats(column) for name, column in values.items()}
    pairs = {
        "ratio": ("new_log_probs", "old_log_probs"),
        "mismatch": ("old_log_probs", "sampler_log_probs"),
        "ref_kl": ("old_log_probs", "ref_log_probs"),
    }
    for name, (one, other) in pairs.items():
        if one in known and other in known:
            gap = known[one] - known[other]
            derivations[name] = _listed(np.exp(np.minimum(gap, 80.0)) if name == "ratio" else gap)
    if "values" in known and "rewards" in known:
        following = np.append(known["values"][1:], 0.0)
        derivations["td_error"] = _listed(known["rewards"] + following - known["values"])
    if "advantages" in known:
        sizes = np.abs(known["advantages"])
        derivations["loss_share"] = _listed(sizes / (np.nansum(sizes) or 1.0))
    return derivations


NEEDS = {
    "ref_log_probs": "actor_rollout_ref.actor.use_kl_loss, algorithm.use_kl_in_reward or distillation.enabled",
    "values": "algorithm.adv_estimator=gae, which trains a critic",
    "new_log_probs": "an update by the policy; rows that PF-PPO draws again, and steps of critic warm-up, have none",
    "old_log_probs": "algorithm.rollout_correction.bypass_mode=False, or another step",
    "entropy": "a policy that is evaluated before its update",
}
"""Value of a token -> what a run must have for it to be recorded."""


EPISODE_NEEDS = {
    "success": "an environment that reports success or is_success in its infos",
    "seed": "environments that are reset one by one, by env.train.vectorization=sync or subprocess",
}
"""Column of episodes -> what a run must have for it to be recorded."""


def _not_recorded(answer: JsonObject) -> dict[str, str]:
    values = answer["tokens"]["values"] if answer["tokens"] else {}
    return {name: needs for name, needs in NEEDS.items() if answer["tokens"] and name not in values}


def group(run: RunFolder, step: int, index: int) -> JsonObject:
    """Return all responses of a step to one prompt, and the group's share of the gradient."""
    columns = run.columns(_recorded(run, step))
    rows = np.flatnonzero(columns["group"] == index)
    rewards = columns["reward"][rows]
    share = columns.get("gradient_share", np.zeros(len(columns["reward"])))
    return {
        "group": index,
        "rows": [_row(run, step, int(row)) for row in rows],
        "without_variance": bool(len(rows) > 1 and np.all(rewards == rewards[0])),
        "gradient_share": float(share[rows].sum()),
    }


def groups(run: RunFolder, step: int) -> list[JsonObject]:
    """Return each group of a step: its prompt, rewards, mean, share of the gradient, and how far the policy moved."""
    columns = run.columns(_recorded(run, step))
    texts = _texts(run, step)["prompts"]
    summaries = []
    for index in np.unique(columns["group"]):
        rows = np.flatnonzero(columns["group"] == index)
        rewards = columns["reward"][rows].astype(np.float64)
        scored = rewards[np.isfinite(rewards)]
        prompt = texts.get(str(index), {})
        one = {
            "group": int(index),
            "index": int(columns["index"][rows[0]]),
            "prompt": prompt.get("prompt", ""),
            "rows": rows.tolist(),
            "rewards": [plain(reward) for reward in rewards],
            "mean": float(scored.mean()) if len(scored) else None,
            "without_variance": bool(len(scored) > 1 and np.ptp(scored) == 0),
        }
        for name in ("gradient_share", "moved"):
            if name in columns:
                one[name] = plain(np.nansum(columns[name][rows]))
        summaries.append(one)
    return sorted(summaries, key=lambda one: -(one.get("gradient_share") or 0.0))


def prompt_history(run: RunFolder, index: int) -> JsonObject:
    """Return the samples of one prompt over the run, in training and validation, by step."""
    trained = []
    for step in run.steps:
        columns = run.columns(step)
        rows = np.flatnonzero(columns["index"] == index)
        trained += [_row(run, step, int(row)) for row in rows[:4]]
    validation = [
        {"step": step, **sample}
        for step in run.validation_steps
        for sample in run.validation(step)
        if sample["index"] == index
    ]
    return {"index": index, "training": trained[-MAX_ROWS:], "validation": validation[-MAX_ROWS:]}


ACCURACIES = ("acc", "accuracy", "correct")
"""Names of a reward component that states whether a response is correct."""


def prompts(run: RunFolder, limit: int | None = MAX_ROWS) -> JsonObject:
    """Return the training prompts over all recorded steps, the hardest first, and the definition of "solved".

    Args:
        run: the run.
        limit: maximum number of prompts; None: all of them, without their text.
    """
    steps = run.steps if run.kind == "text" else []  # simulators have no prompts
    accuracy = next((f"part/{name}" for name in ACCURACIES if any(f"part/{name}" in run.columns(s) for s in steps)), "")
    rewards = [run.columns(step)["reward"] for step in steps]
    finite = [reward[np.isfinite(reward)] for reward in rewards]
    highest = max((float(reward.max()) for reward in finite if len(reward)), default=1.0)
    by_prompt: dict[int, list[tuple[float, bool]]] = {}
    last: dict[int, tuple[int, int]] = {}
    for step, reward in zip(steps, rewards, strict=True):
        columns = run.columns(step)
        success = columns.get(accuracy, np.full(len(reward), np.nan)) > 0.5 if accuracy else reward > 0.5 * highest
        for row, (index, one, solved) in enumerate(zip(columns["index"], reward, success, strict=True)):
            by_prompt.setdefault(int(index), []).append((float(one), bool(solved)))
            last[int(index)] = (step, row)
    summaries: list[JsonObject] = []
    for index, attempts in by_prompt.items():
        scored = [reward for reward, _ in attempts if math.isfinite(reward)]
        solved = sum(success for _, success in attempts)
        step, row = last[index]
        summaries.append(
            {
                "index": index,
                "attempts": len(attempts),
                "solved": solved,
                "never": not solved,
                "mean": sum(scored) / len(scored) if scored else None,
                "best": max(scored, default=None),
                "step": step,
                "row": row,
            }
        )
    summaries.sort(key=lambda one: (one["solved"] / one["attempts"], one["mean"] or 0.0, one["index"]))
    for one in summaries[:limit] if limit is not None else ():
        texts = _texts(run, one["step"])
        one["prompt"] = texts["prompts"].get(str(run.columns(one["step"])["group"][one["row"]]), {}).get("prompt", "")
    return {
        "solved_means": f"{accuracy.removeprefix('part/')} above 0.5, a part of the reward"
        if accuracy
        else f"a reward above {0.5 * highest:.4g}, half of the highest one of the run",
        "total": len(summaries),
        "never": [one["index"] for one in summaries if one["never"]],
        "rows": summaries[:limit],
    }


def validation(run: RunFolder, step: int, sort: str | None = None, limit: int = MAX_ROWS) -> JsonObject:
    """Return the validation samples of a step, sorted by a column if one is given, and their total number.

    Raises:
        ValueError: there was no validation at this step, or there is no such column.
    """
    rows = run.validation(step)
    if not rows:
        raise ValueError(f"step {step}: no validation. Steps with one: {', '.join(map(str, run.validation_steps))}")
    if sort:
        name = sort.removeprefix("-")
        if name not in rows[0]:
            raise ValueError(f"sort={sort}: no such column. Columns: {', '.join(rows[0])}")
        rows = sorted(
            rows,
            key=lambda row: (row[name] is None, row[name] if isinstance(row[name], int | float) else str(row[name])),
            reverse=sort.startswith("-"),
        )
    return {"step": step, "total": len(rows), "rows": rows[:limit]}


def parts(run: RunFolder) -> list[JsonObject]:
    """Return each component of the reward, with its mean in each step."""
    names = sorted({name for step in run.steps for name in run.columns(step) if name.startswith("part/")})
    summaries = []
    for name in names:
        steps = [step for step in run.steps if name in run.columns(step)]
        columns = [run.columns(step)[name] for step in steps]
        means = [plain(np.nanmean(values)) if np.isfinite(values).any() else None for values in columns]
        summaries.append({"name": name.removeprefix("part/"), "steps": steps, "means": means})
    return summaries


def episode(run: RunFolder, step: int, index: int) -> JsonObject:
    """Return the recorded steps of the episode in row `index`, with images as base64.

    Raises:
        ValueError: the step was not recorded, or not this episode.
    """
    _recorded(run, step)
    recorded = _detailed(run, "episodes", step)
    if index not in recorded:
        listed = ", ".join(map(str, sorted(recorded)))
        raise ValueError(
            f"step {step}: episode {index} was not recorded step by step, but {listed or 'none'}; {RECORD_MORE} bounds "
            "how many are"
        )
    one = recorded[index]
    values = {name: numbers(packed) for name, packed in one["values"].items()}
    if "values" in values:
        ends = bool(run.columns(step)["terminated"][index])
        values["td_error"] = _td_errors(values, run.setting("algorithm.gamma") or 1.0, 0.0 if ends else None)
    answer = _row(run, step, index) | {"values": values, "reasons": one["reasons"], "neighbours": sorted(recorded)}
    answer["actions"] = unpack(one["actions"]).tolist()
    answer["observations"], answer["film"] = {}, None
    for name, packed in one["observations"].items():
        if isinstance(packed, str):
            answer["observations"][name] = packed
        elif len(packed["shape"]) == 4:
            frames = unpack(packed)
            answer["film"] = {"name": name, "shape": packed["shape"], "data": _base64(frames)}
        else:
            answer["observations"][name] = unpack(packed).tolist()
    answer["left_out"] = dict.fromkeys(one["left_out"], f"{RECORD_MORE}: larger than what remained of the step")
    if answer["film"] is None:
        answer["no_film"] = "The observations are no pictures. env.eval.video_cfg.save_video=True films evaluations, "
        answer["no_film"] += "and tether play films a checkpoint."
    value = values.get("values")
    if value and len(value) > 1:
        drops = np.diff(np.array([np.nan if v is None else v for v in value]))
        answer["largest_drop"] = int(np.nanargmin(drops)) + 1 if np.isfinite(drops).any() else None
    return answer


def _td_errors(values: Mapping[str, Numbers], gamma: float, last: float | None) -> Numbers:
    """Return the TD error of each step; `last` is the value after the last step, None if it was not recorded."""
    reward, value = _floats(values.get("shaped_rewards", values["rewards"])), _floats(values["values"])
    following = np.append(value[1:], np.nan if last is None else last)
    return _listed(reward + gamma * following - value)


def _base64(array: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


TASK_WINDOW = 10
"""Number of recorded steps of a task over which the mean success, used for the order, is taken."""


def tasks(run: RunFolder) -> list[JsonObject]:
    """Return the success rate of each task over time, the worst task first; empty if the run reports no success.

    The rate is the share of the episodes that ended in a recorded step, with Wilson's interval. Metrics that an
    environment reports per task are included.
    """
    solved: dict[str, dict[int, tuple[int, int]]] = {}
    for step in run.steps if run.kind == "control" else ():
        columns = run.columns(step)
        if "success" not in columns:
            continue
        ended = columns["terminated"] | columns["truncated"]
        names = run.task_names(step) or [str(run.setting("env.train.id") or "all episodes")]
        index = columns.get("task", np.zeros(len(ended), dtype=np.int32))
        for task in np.unique(index[ended]):
            of_task = columns["success"][ended & (index == task)]
            solved.setdefault(names[task], {})[step] = int(of_task.sum()), len(of_task)
    listed: list[JsonObject] = []
    for task, by_step in solved.items():
        limits = [binomial(right / count, count) or (0.0, 1.0) for right, count in by_step.values()]
        recent = list(by_step.values())[-TASK_WINDOW:]
        listed.append(
            {
                "task": task,
                "steps": list(by_step),
                "values": [right / count for right, count in by_step.values()],
                "low": [low for low, _ in limits],
                "high": [high for _, high in limits],
                "episodes": sum(count for _, count in by_step.values()),
                "recent": sum(right for right, _ in recent) / sum(count for _, count in recent),
            }
        )
    for key in run.keys:
        match = re.fullmatch(r"(env|eval)/info/(.*success.*|task.*)|val-core/(.+)/mean@1", key)
        if match and (series := run.series(key)):
            values = list(series.values())
            listed.append({"task": key, "steps": list(series), "values": values, "recent": values[-1]})
    return sorted(listed, key=lambda one: one["recent"])
