"""What a busy process beside tether costs: a training step, decoding, and PyTorch's own matrix products, as a table.

    python -m benchmarks.shared_machine                           # two minutes of two cores
    python -m benchmarks.shared_machine --write docs/evidence/performance.md   # fills the page

The busy process is `while True: pass`. It is stopped and continued between measurements, which take turns, so that
whatever else disturbs the machine disturbs both sides. Where two threads and the busy process divide two cores evenly,
each has two thirds of a core, and the work takes 1.5 times as long. Run it on a machine that is quiet otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.resumable import write_between
from benchmarks.speed.busy_process import busy_process
from benchmarks.speed.machine import machine_line
from benchmarks.speed.peers.processes import Peers
from benchmarks.speed.rollouts import Updater, sampled_batch
from benchmarks.speed.setting import SYNTHETIC, Setting
from benchmarks.speed.table import Goal, Section
from benchmarks.speed.timing import seconds
from tether.integrations.hubs.registry_download import pull_model
from tether.runtime.cache import cache_dir
from tether.runtime.huge_pages import SWITCH, restart_with_huge_pages
from tether.runtime.machine import set_threads
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

MODEL = "smollm2-135m"
BEGIN, END = "<!-- shared:begin -->", "<!-- shared:end -->"
PROMPTS, SAMPLES, RESPONSE_TOKENS, MICRO_TOKENS = 2, 8, 32, 4096
ROWS, NEW_TOKENS = 16, 24
LIMIT = 1.6
STEP, DECODING = "a training step", f"decoding {ROWS} rows"
PRODUCTS = {
    "PyTorch: [2048, 576] x [576, 1536]": (2048, 576, 1536, 60),
    "PyTorch: [2048, 2048]^2": (2048, 2048, 2048, 8),
}
"""Rows, inner size and columns of bfloat16 products, and how many are timed together."""


def measure(sides: Mapping[str, Callable[[], object]], runs: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each side alone and beside the busy process, after one call that does not count."""
    for side in sides.values():
        side()
    alone: dict[str, list[float]] = {name: [] for name in sides}
    beside: dict[str, list[float]] = {name: [] for name in sides}
    with busy_process() as process:
        for _ in range(runs):
            for name, side in sides.items():
                alone[name].append(seconds(side))
            process.resume()
            for name, side in sides.items():
                beside[name].append(seconds(side))
            process.pause()
    return {name: (statistics.median(alone[name]), statistics.median(beside[name])) for name in sides}


def sides_of(setting: Setting) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    batch, updater = sampled_batch(setting, PROMPTS, SAMPLES, RESPONSE_TOKENS), Updater(setting, MICRO_TOKENS)
    engine = NativeEngine(setting.our_model(), eos_token_ids=frozenset(), max_num_seqs=ROWS)
    prompts, sampling = setting.prompts(ROWS), SamplingParams(NEW_TOKENS)
    return {
        STEP: lambda: updater(batch),
        DECODING: lambda: engine.generate(prompts, sampling, NoiseKey(seed=0, step=0)),
        **{name: _products(*sizes) for name, sizes in PRODUCTS.items()},
    }


def _products(rows: int, inner: int, columns: int, count: int) -> Callable[[], None]:
    left, right = torch.randn(rows, inner).to(torch.bfloat16), torch.randn(inner, columns).to(torch.bfloat16)
    out = torch.empty(rows, columns, dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    return multiply


def section(setting: Setting) -> Section:
    """Measure, and return the table."""
    measured = measure(sides_of(setting), setting.runs)
    step_alone, step_beside = measured[STEP]
    return Section(
        "Beside a busy process",
        [
            f"Seconds alone and beside one process that is always busy; medians of {setting.runs} that take turns. The",
            f"step updates on {PROMPTS} prompts with {SAMPLES} responses each; decoding is of {NEW_TOKENS} new tokens.",
            f"By `python -m benchmarks.shared_machine` on {machine_line()}.",
        ],
        ("", "s, alone", "s, beside it", "ratio"),
        [
            [name, f"{alone:.2f}", f"{beside:.2f}", f"{beside / alone:.2f}"]
            for name, (alone, beside) in measured.items()
        ],
        [Goal("a training step: beside / alone", step_beside / step_alone, LIMIT, at_most=True)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shared_machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help=f"directory of a causal LM; default: {MODEL}, fetched once")
    parser.add_argument("--threads", type=int, help="CPU threads; default: OMP_NUM_THREADS, else one per usable core")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", type=Path, help="page that the table is written to, between its two marks")
    args = parser.parse_args()
    os.environ.setdefault(SWITCH, "1")
    restart_with_huge_pages()
    set_threads(args.threads)
    torch.manual_seed(0)
    model = (args.model or pull_model(MODEL, cache_dir(), progress=print)).resolve()
    table = section(Setting(model, SYNTHETIC, quick=True, runs=args.runs, peers=Peers({}))).markdown()
    print(table)
    if args.write:
        write_between(args.write, BEGIN, END, table.rstrip("\n"))


if __name__ == "__main__":
    main()
