"""`tether reward check`: a table, a plot and the problems of a reward before a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from tether.config import LoadedConfig
from tether.runtime.install import pip_install
from tether.runtime.terminal import Screen, Waiting
from tether.text.rewards.audit import (
    FAULT_SHARE,
    TRUTH,
    WARNING_SHARE,
    Audit,
    audit,
    deviation_within_groups,
    examples,
    share_of_differing_groups,
    verdicts,
)
from tether.text.rewards.outcome import RewardOutcome, RewardRequest
from tether.text.standalone import RewardTrial, build_reward_trial

_SCALE = "on a scale from the worst replies to the ground truth"
MEANINGS = {
    "fault": "A fault means that calls fail, that wrong replies are rewarded (above "
    f"{FAULT_SHARE:.0%} {_SCALE}), or that most right answers are not: fix it before a run.",
    "warning": f"A warning may be intended (for example a wrong reply above {WARNING_SHARE:.0%} {_SCALE}); the check "
    "does not fail because of it.",
}


def check_reward(loaded: LoadedConfig, *, rows: int, samples: int, out: Path | None) -> bool:
    """Show the scores of replies of known quality, and return whether no fault of the reward was found.

    Args:
        loaded: a configuration of a text run.
        rows: number of rows of the training data.
        samples: number of replies of the untrained policy; 0: none.
        out: path of the plot; None: no plot.

    Raises:
        ValueError: inputs are unusable, or this is a control run, whose rewards come from the simulator.
    """
    if loaded.config.env.train.id is not None:
        raise ValueError("env.train.id: the rewards of a control run come from its simulator and cannot be checked")
    if out:
        _check_plot_path(out)
    disable_progress_bar()
    screen = Screen()
    with ExitStack() as stack:
        with Waiting("sampled", None, screen) as waiting:
            trial = stack.enter_context(
                build_reward_trial(loaded.config, rows=rows, samples=samples, on_sampled=waiting.show)
            )
        audited = _audit(trial, screen)
    screen.print(_table(audited))
    screen.print("\nThe best reply of each kind, with the reason for its score:")
    for line in examples(audited):
        screen.print(f"  {line}", soft_wrap=True)
    problems = verdicts(audited)
    kinds = ["fault" if verdict.is_fault else "warning" for verdict in problems]
    for kind, verdict in zip(kinds, problems, strict=True):
        color = "red" if verdict.is_fault else "yellow"
        screen.print(Text(f"{kind}: {verdict.message}", color), soft_wrap=True)
    if problems:
        screen.print(" ".join(meaning for kind, meaning in MEANINGS.items() if kind in kinds), soft_wrap=True)
    else:
        message = "the reward distinguishes right from wrong on these replies"
        if audited.truth is None:
            message = "no wrong reply scores above the sampled ones; no row has a right answer for a comparison"
        screen.print(message, style="green", soft_wrap=True)
    if out:
        _draw(audited, out)
        screen.print(f"written to {out}", soft_wrap=True)
    return not any(verdict.is_fault for verdict in problems)


def _audit(trial: RewardTrial, screen: Screen) -> Audit:
    scored = 0
    with Waiting("scored", None, screen) as waiting:

        def score(requests: Sequence[RewardRequest]) -> tuple[Sequence[RewardOutcome], Sequence[float]]:
            nonlocal scored
            outcomes = trial.rewards.score(requests)
            scored += len(requests)
            waiting.show(scored)
            return outcomes, list(trial.rewards.durations)

        return audit(trial.prompts, score, trial.sampled, trial.group_size, trial.in_turns, trial.cut)


def _table(audited: Audit) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("reply", "wanted", "mean", "std", "min", "max", "none", "failed", "ms/call"):
        table.add_column(column, justify="left" if column in ("reply", "wanted") else "right", no_wrap=True)
    for probe in audited.rows:
        scores = probe.scores or [math.nan]
        wanted = {TRUTH: "high", "sampled": ""}.get(probe.kind, "low")
        numbers = [f"{value:.3g}" for value in (probe.mean, probe.deviation, min(scores), max(scores))]
        none = len(probe.outcomes) - len(probe.scores) - len(probe.errors)
        counts = [str(none), str(len(probe.errors)), f"{1000 * fmean(probe.seconds):.3g}"]
        table.add_row(probe.kind, wanted, *numbers, *counts)
    if audited.sampled and audited.group_size > 1:
        table.add_row("  within a group", "", "", f"{deviation_within_groups(audited):.3g}")
        table.add_row("  groups all equal", "", f"{1 - share_of_differing_groups(audited):.0%}")
    return table


def _check_plot_path(out: Path) -> None:
    """Check that the plot can be written before anything is scored."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"--out needs {error.name}: {pip_install('quickstart')}") from error
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if out.suffix[1:].lower() not in kinds:
        raise ValueError(f"--out={out}: unknown image format; its name can end in {', '.join(kinds)}")
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out={out}: cannot be written; name a file in an existing folder, such as reward.png")


def _draw(audited: Audit, out: Path) -> None:
    """Plot every score as a dot, with one row per kind of reply, and the means."""
    from matplotlib.figure import Figure

    probes = audited.rows[::-1]
    figure = Figure(figsize=(7, 0.6 + 0.4 * len(probes)), layout="constrained")
    axes = figure.subplots()
    for row, probe in enumerate(probes):
        color = {TRUTH: "#2e8b57", "sampled": "#2a6fbb"}.get(probe.kind, "#d1622b")
        axes.scatter(probe.scores, [row] * len(probe.scores), s=12, alpha=0.3, color=color, linewidths=0)
        axes.scatter([probe.mean], [row], marker="|", s=260, linewidths=2, color=color)
    axes.set_yticks(range(len(probes)), [probe.kind for probe in probes])
    axes.set_xlabel("score; the bar is the mean")
    try:
        figure.savefig(out, dpi=150)
    except OSError as error:
        raise ValueError(f"--out={out}: cannot be written ({error.strerror})") from error
