"""Are the plans of `tether plan` right? python -m benchmarks.plan [--count [MODEL ...]] [--write]

Tables of formulas beside what was counted on fake ranks, published, or measured in this repository, and the plans of
verl's scripts. ``--count`` counts the fake ranks anew, of all models or of those that are named; ``--write`` puts the
tables into docs/guides/plan.md and docs/evidence/seeds.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.oracles.environment import ROOT
from benchmarks.plan.published import Row, fit_rows, memory_rows, ratio_rows, time_rows
from benchmarks.plan.worlds import GIB, WORLDS, World, counted, planned
from benchmarks.resumable import write_between
from benchmarks.speed.table import grid
from tests.config.scripts import SCRIPTS
from tests.config.test_seeds import scripts
from tether.config import ConfigError, load_config
from tether.plan.assumptions import DEFAULT_ASSUMPTIONS
from tether.plan.changes import smallest_changes, trains_adapters
from tether.plan.devices import DEVICES, gib
from tether.plan.memory import total
from tether.plan.planning import Planner
from tether.plan.report import span

COUNTED = Path(__file__).with_name("counted.json")
ALLOWED = 0.1
WHY = {
    World("qwen3-30b-a3b", 256, 8192): "2 MB a token are counted, three times what prime-rl's GPUs need; not known why"
}
"""Reasons for which layouts are missed."""
GUIDE = ROOT / "docs/guides/plan.md"
PAGES = {"plan": GUIDE, "cards": GUIDE, "seeds": ROOT / "docs/evidence/seeds.md"}
RECIPES = ROOT / "recipes/verl"


def main() -> int:
    """Print the tables; 1 if a row is missed that has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", nargs="*", metavar="MODEL", help="count the fake ranks anew, of these models or all")
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    options = parser.parse_args()
    if options.count is not None:
        count(options.count)
    judged, missed = judge()
    blocks = {"plan": judged, "cards": cards(), "seeds": seeds()}
    for name, text in blocks.items():
        print(f"{text}\n")
        if options.write:
            write_between(PAGES[name], f"<!-- {name}:begin -->", f"<!-- {name}:end -->", text)
    return 1 if missed else 0


def count(models: Sequence[str]) -> None:
    """Count the worlds of some models, or all, and keep each result as soon as it is there."""
    results = json.loads(COUNTED.read_text(encoding="utf-8")) if COUNTED.exists() else {}
    for world in WORLDS:
        if models and world.model not in models:
            continue
        results[str(world)] = counted(world)
        COUNTED.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def judge() -> tuple[str, int]:
    """Return the tables, and the number of rows that are missed without a reason."""
    known = json.loads(COUNTED.read_text(encoding="utf-8"))
    ratios = [(world, known[str(world)], planned(world)) for world in WORLDS if str(world) in known]
    too_far = {world for world, size, plan in ratios if abs(plan / size - 1) > ALLOWED}
    worlds = [
        (
            world.model,
            str(world.ranks) + (f", in copies over {world.shards}" if world.shards > 0 else ""),
            f"{world.tokens:,}",
            "on" if world.recompute else "off",
            f"{size / GIB:.2f}",
            f"{plan / GIB:.2f}",
            f"{plan / size:.2f}" + (f" **missed**: {WHY.get(world, '?')}" if world in too_far else ""),
        )
        for world, size, plan in ratios
    ]
    heads = ("model", "ranks", "tokens", "checkpointing", "counted, GiB", "by formula", "ratio")
    text = [
        f"**FSDP2 on fake ranks**: {len(ratios) - len(too_far)} of {len(ratios)} layouts within {ALLOWED:.0%}.",
        "",
        *grid(heads, worlds),
        "",
    ]
    missed = len(too_far - WHY.keys())
    for title, rows in (
        ("Published and measured memory", list(memory_rows())),
        ("Time, uncalibrated, within 40 %", list(time_rows())),
        ("Phases of a step of verl's, as shares", list(ratio_rows())),
    ):
        text += [f"**{title}**: {sum(row.met for row in rows)} of {len(rows)}.", "", *_table(rows), ""]
        missed += sum(not row.met and not row.reason for row in rows)
    fits = list(fit_rows())
    right = sum(fit.met for fit in fits)
    lines = [
        (fit.source, fit.model, fit.how, f"{fit.count} x {fit.device}", f"{fit.need:.1f}", f"{fit.has:.1f}",
         "yes" if fit.met else "**no**")
        for fit in fits
    ]  # fmt: skip
    text += [f"**What fits elsewhere**: {right} of {len(fits)} verdicts are the same.", ""]
    text += grid(("source", "model", "weights", "devices", "needs, GiB", "has", "same"), lines)
    return "\n".join(text), missed


def _table(rows: Iterable[Row]) -> list[str]:
    lines = [
        (
            row.source,
            row.what,
            f"{row.published:.3g} {row.unit}",
            f"{row.planned:.3g}",
            f"{row.planned / row.published:.2f}",
            "" if row.met else f"missed: {row.reason}",
        )
        for row in rows
    ]
    return grid(("source", "what", "there", "by formula", "ratio", ""), lines)


def cards() -> str:
    """Return the table of what two cards of 24 GB train."""
    lines = []
    for model in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen3-1.7B", "Qwen2.5-3B", "Qwen2.5-7B"):
        words = ["data.train_files=[gsm8k.parquet]", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
        words += [f"actor_rollout_ref.model.path={model}", "trainer.n_gpus_per_node=2", "trainer.device=cuda"]
        planner = Planner(load_config(None, words).config, DEVICES["rtx4090-24g"], DEFAULT_ASSUMPTIONS)
        plan = planner.plan()
        changes = smallest_changes(planner, limit=3) if plan.verdict != "fits" else []
        fits = [
            f"`{change.text}` ({gib(change.plan.peak)}, {gib(total(change.plan.host))} of host memory, a step "
            f"{span(change.plan.step)})"
            for change in changes
        ]
        verdict = f"{plan.verdict}, {gib(plan.peak)}, a step {span(plan.step)}"
        lines.append((model, verdict, "; ".join(fits) or ("" if plan.verdict == "fits" else "nothing that was tried")))
    return "\n".join(grid(("model", "all weights", "what makes it fit, fastest first"), lines))


def seeds() -> str:
    """Return the table of verl's scripts: today's as the recipe samples and as the script does, and those of v0.4."""
    lines = []
    for name, words in SCRIPTS.items():
        recipe = _plan_of(RECIPES / f"{name}.yaml", [], name)
        lines.append((f"`{name}`", *recipe, *_plan_of(None, words, name)))
    lines += [
        (f"`{name.removesuffix('.sh')}`", "", "", *_plan_of(None, words, name))
        for name, words in scripts().items()
        if name.startswith("v0.4")
    ]
    heads = ("script", "recipe (native)", "what makes it fit", "script (vLLM, SGLang)", "what makes it fit", "an epoch")
    rows = [(script, verdict, fix, other, more, hours) for script, verdict, fix, other, more, hours in map(_six, lines)]
    return "\n".join(grid(heads, rows))


def _six(line: Sequence[str]) -> tuple[str, str, str, str, str, str]:
    """Drop the hours of the recipe, which are about those of the script."""
    name, verdict, fix, *others = line
    other, more, hours = others[-3:]
    return name, verdict, fix, other, more, hours


def _plan_of(file: Path | None, words: Sequence[str], name: str) -> tuple[str, str, str]:
    device = DEVICES["ascend910b-64g" if "npu" in name else "h100-80g"]
    options = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--"))
    if "config-name" in options:  # one of verl's files of defaults
        file = Path(options.get("config-path", ".")) / options["config-name"].strip("'\"")
    words = [word for word in words if not word.startswith("--")]
    try:
        config = load_config(file, [*words, "trainer.device=cuda"]).config
    except ConfigError as error:
        return f"is refused: {error.problems[0].path}", "", ""
    planner = Planner(config, device, DEFAULT_ASSUMPTIONS)
    if not config.actor_rollout_ref.model.path:
        return "names its model by a variable that is never set", "", ""
    plan = planner.plan()
    fix = ""
    if plan.verdict != "fits":
        changes = smallest_changes(planner)
        same = next((change for change in changes if not trains_adapters(change.values)), next(iter(changes), None))
        fix = f"`{same.text}`" if same else "more devices"
    hours = ""
    if plan.hours and plan.steps:
        epochs = max(1, config.trainer.total_epochs) if config.trainer.total_training_steps is None else 1
        hours = span(type(plan.hours)(*(h / epochs for h in (plan.hours.low, plan.hours.middle, plan.hours.high))), "h")
    return f"{plan.verdict}, {gib(plan.peak)}", fix, hours


if __name__ == "__main__":
    raise SystemExit(main())
