"""The speed tables: python -m benchmarks all|TABLE... [--quick] [--write docs/evidence/performance.md]

Each table measures tether beside its peers in one run, taking turns, and says which goals are met. Peers are installed
by pip into environments of their own (runs/peers), and left out with a word where that fails.

python -m benchmarks chaos: kills, hostile reward functions and bad files instead of speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks import decode, memory, profile, ragged, scaling, startup, step, training
from benchmarks.speed.machine import machine_line
from benchmarks.speed.peers.processes import Peers
from benchmarks.speed.setting import SYNTHETIC, Setting
from benchmarks.speed.table import Section, grid, wrapped
from benchmarks.speed.timing import release
from tether.integrations.hubs.registry_download import pull_model
from tether.runtime.cache import cache_dir
from tether.runtime.huge_pages import SWITCH, restart_with_huge_pages
from tether.runtime.machine import set_threads

TABLES: dict[str, Callable[[Setting], Section]] = {
    "decode": decode.measure,
    "ragged": ragged.measure,
    "training": training.measure,
    "step": step.measure,
    "profile": profile.measure,
    "memory": memory.measure,
    "startup": startup.measure,
    "scaling": scaling.measure,
}
KEEPS_PEERS = "decode"
"""The next table asks the same peer again, which takes minutes to start."""
MODEL = "smollm2-135m"
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=["all", *TABLES])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, medians of 2 instead of 5")
    parser.add_argument("--write", type=Path, help="also write the page to this file, before what follows its tables")
    parser.add_argument("--model", type=Path, help=f"directory of a causal LM; default: {MODEL}, fetched once")
    parser.add_argument("--data", default=SYNTHETIC, help="GSM8K as jsonl or parquet; default: questions like its own")
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument(
        "--environment", action="append", default=[], metavar="PEER=FOLDER", help="one that has the peer (trl, vllm)"
    )
    return parser.parse_args()


def main() -> None:
    """Measure, print as tables become ready, and write the page."""
    if sys.argv[1:2] == ["chaos"]:  # counts what is lost, and measures no speed
        from benchmarks.chaos.__main__ import main as chaos  # needs the extra test, which speed does not

        chaos(sys.argv[2:])
        return
    given = arguments()
    os.environ.setdefault(SWITCH, "1")
    restart_with_huge_pages()  # the peers' processes inherit it
    set_threads(given.threads)
    torch.manual_seed(0)
    folders = dict(pair.split("=", 1) for pair in given.environment)
    setting = Setting(
        model=(given.model or pull_model(MODEL, cache_dir(), progress=print)).resolve(),
        data=given.data,
        quick=given.quick,
        runs=2 if given.quick else 5,
        peers=Peers({peer: Path(folder) for peer, folder in folders.items()}),
    )
    names = list(TABLES) if "all" in given.tables else given.tables
    print(f"{machine_line()}; {setting.roofline.rate / 1e9:.0f} GFLOP/s", flush=True)
    start, sections = time.perf_counter(), []
    try:
        for number, name in enumerate(names):
            print(f"{name} ...", flush=True)
            began = time.perf_counter()
            sections.append(TABLES[name](setting))
            if name != KEEPS_PEERS or number + 1 == len(names):
                setting.peers.stop()
            release()  # the next table's peers need the memory
            print(f"\n{sections[-1].markdown()}\n{name}: {(time.perf_counter() - began) / 60:.1f} minutes", flush=True)
    finally:
        setting.peers.stop()
    minutes = (time.perf_counter() - start) / 60
    begin = head(setting, names, minutes)
    print(begin)
    if given.write:
        text = "\n".join(["# Performance", "", summary(sections), begin, BEGIN, *(s.markdown() for s in sections), END])
        text += by_hand(given.write)
        given.write.write_text(text, encoding="utf-8")


def summary(sections: Sequence[Section]) -> str:
    """The goals of all sections in one table: the first thing on the page."""
    goals = [(section.title, goal) for section in sections for goal in section.goals]
    rows = [[title, *goal.row()] for title, goal in goals]
    met = sum(goal.met for _, goal in goals)
    table = grid(("table", "goal", "", "measured", ""), rows)
    return "\n".join(
        ["<!-- summary:begin -->", f"{met} of {len(goals)} goals are met:", "", *table, "<!-- summary:end -->", ""]
    )


def by_hand(page: Path) -> str:
    """The text after the tables of an earlier page, which is written by hand."""
    return page.read_text(encoding="utf-8").partition(END)[2] if page.exists() else "\n"


def head(setting: Setting, names: list[str], minutes: float) -> str:
    """The page's beginning: how it was made, where, and what the machine can do."""
    roof = setting.roofline
    command = " ".join(["python -m benchmarks", *(["all"] if len(names) == len(TABLES) else names)])
    lines = [
        "tether beside what one would use instead, on one machine, in one run, taking turns; medians count. Written by",
        "",
        "```sh",
        f"{command}{' --quick' if setting.quick else ''} --write docs/evidence/performance.md",
        "```",
        "",
        wrapped(
            [
                f"on {date.today()} in {minutes:.0f} minutes, medians of {setting.runs}: {machine_line()}.",
                f"Model: {setting.model.name}. Prompts: {Path(setting.data).name}.",
                f"A large bfloat16 matrix product ran at up to {roof.rate / 1e9:.0f} GFLOP/s and memory was read at up",
                f"to {roof.bandwidth / 1e9:.0f} GB/s; the limits that a table names are of the best until then.",
                f"All sides ran with {SWITCH}={os.environ.get(SWITCH)} (docs/guides/training.md).",
                "No GPU was at hand: nothing is said about one.",
            ]
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
