"""Does a policy learn the same from a server's samples? GRPO and PPO by `native` and by vLLM, three seeds each.

    python -m benchmarks.servers                                    # minutes; vLLM: tether setup vllm
    python -m benchmarks.servers --write docs/evidence/servers.md --plot docs/assets/servers.png
    python -m benchmarks.servers --task quickstart                  # 90 minutes of one core

The task is `spell` of `benchmarks.algorithms`: a random model of two layers learns to spell by four optimizer steps a
rollout, its heads wide enough for vLLM. Or the quickstart recipe, with SmolLM2-135M-Instruct. One server samples for
all runs by vLLM. Runs that are in --results are not made again, so that an interrupted benchmark resumes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.algorithms.cases import ACTOR, ALGORITHM, GRPO, ROLLOUT, SHARED
from benchmarks.algorithms.tasks import SPELL, overrides, tiny_llama, write_inputs
from benchmarks.resumable import QUICKSTART, ROOT, all_runs, arguments_of_runs, plot_scores, schedule, write_between
from tether.config import load_config
from tether.integrations.hubs.registry_download import pull_model
from tether.metrics.loggers.headline import validation_means
from tether.metrics.loggers.jsonl import read_metrics
from tether.runtime.cache import cache_dir
from tether.runtime.machine import computes_in_bfloat16, set_threads
from tether.text.build import build_run

ENGINES = ("native", "vllm")
ALGORITHMS = {"GRPO": (GRPO,), "PPO": (f"{ALGORITHM}.adv_estimator=gae",)}
STEPS = {"spell": {"GRPO": 40, "PPO": 40}, "quickstart": {"GRPO": 24, "PPO": 12}}


@dataclass(frozen=True)
class Asked:
    """One run."""

    task: str
    algorithm: str
    engine: str
    seed: int
    steps: int


@dataclass(frozen=True)
class Curve:
    """Scores of a run, and the distance of sampler and trainer."""

    scores: list[float]
    """Mean score of the training batch of each step."""
    held_out: list[float]
    """Held-out score before the first step and after the last one."""
    mismatch: float
    """Largest KL of a step from sampler to trainer on the same tokens, nats per token (k3)."""


def spell(asked: Asked, folder: Path) -> tuple[Path | None, list[str]]:
    """The task of `benchmarks.algorithms`, with two heads of 32, the narrowest that vLLM takes on a CPU."""
    write_inputs(SPELL, asked.seed, folder)
    tiny_llama(asked.seed, heads=2, head_dim=32).save_pretrained(folder / "model")
    return None, [*overrides(SPELL, asked.steps, asked.seed, folder), *SHARED]


def quickstart(asked: Asked, folder: Path) -> tuple[Path | None, list[str]]:
    """The recipe; GRPO unlearns the task at its learning rate, which was chosen for PPO."""
    rate = [f"{ACTOR}.optim.lr=2e-5"] if asked.algorithm == "GRPO" else []
    return QUICKSTART, [*rate, *schedule(asked.steps, asked.seed, folder)]


def spell_server(folder: Path) -> list[str]:
    """Options of a server for a task: its model, most tokens of prompt and response, format, share of the memory."""
    tiny_llama(0, heads=2, head_dim=32).save_pretrained(folder)
    return [f"--model={folder}", "--max-model-len=16", "--dtype=float32", "--gpu-memory-utilization=0.05"]


def quickstart_server(folder: Path) -> list[str]:
    """See `spell_server`; the format is the one that the recipe computes in here."""
    model = pull_model("smollm2-135m", cache_dir(), progress=print)
    dtype = "bfloat16" if computes_in_bfloat16(torch.device("cpu")) else "float32"
    return [f"--model={model}", "--max-model-len=136", f"--dtype={dtype}", "--gpu-memory-utilization=0.15"]


TASKS = {"spell": spell, "quickstart": quickstart}
SERVERS = {"spell": spell_server, "quickstart": quickstart_server}


def train(asked: Asked, server: str | None) -> Curve:
    """Train once.

    Args:
        asked: which run.
        server: address of the one that samples; None: this process does.
    """
    with tempfile.TemporaryDirectory() as name:
        file, settings = TASKS[asked.task](asked, Path(name))
        engine = [f"{ROLLOUT}.name={asked.engine}"]
        if server is not None:
            engine += [f"{ROLLOUT}.server_urls=[{server}]", f"{ROLLOUT}.server_timeout=1200"]
        run = build_run(load_config(file, [*settings, *ALGORITHMS[asked.algorithm], *engine]))
        try:
            run.trainer.fit()
        finally:
            run.close()
        metrics = read_metrics(run.directory)
    steps = range(1, asked.steps + 1)
    tested = [fmean(validation_means(metrics[step]).values()) for step in (0, asked.steps)]
    return Curve(
        scores=[metrics[step]["critic/score/mean"] for step in steps],
        held_out=tested,
        mismatch=max(metrics[step]["rollout_corr/k3_kl"] for step in steps),
    )


@contextmanager
def server_of(options: Sequence[str]) -> Iterator[str]:
    """The address of a vLLM server that is started as somebody else would; it is ready some time later."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    options = [f"--port={port}", "--load-format=dummy", "--enforce-eager", *options]
    command = [sys.executable, "-m", "tether", "serve", "vllm", *options]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def by_side(runs: Mapping[Asked, Curve]) -> dict[tuple[str, str], list[Curve]]:
    """The curves of all seeds, by algorithm and engine."""
    sides: dict[tuple[str, str], list[Curve]] = {}
    for asked, curve in runs.items():
        sides.setdefault((asked.algorithm, asked.engine), []).append(curve)
    return sides


def spread(values: Sequence[float]) -> str:
    """Their mean, and the least and the largest of several."""
    return f"{fmean(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


def table(runs: Mapping[Asked, Curve]) -> str:
    """A line per algorithm and engine: scores at a quarter, half and the end of the run, their mean, the mismatch."""
    sides = by_side(runs)
    heads = ["", "seeds", "steps", "a quarter", "half", "end", "mean of all steps", "held out", "largest KL of a step"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (algorithm, engine), curves in sides.items():
        steps = len(curves[0].scores)
        at = [max(steps // 4, 1), max(steps // 2, 1), steps]
        cells = [f"{algorithm}, {engine}", str(len(curves)), str(steps)]
        cells += [spread([curve.scores[step - 1] for curve in curves]) for step in at]
        cells += [spread([fmean(curve.scores) for curve in curves]), spread([curve.held_out[-1] for curve in curves])]
        cells += [f"{max(curve.mismatch for curve in curves):.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(runs: Mapping[Asked, Curve], path: Path) -> None:
    """Draw the scores of the training batches, a field per algorithm."""
    sides = by_side(runs)
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for (algorithm, engine), seeds in sides.items():
        curves.setdefault(algorithm, {})[engine] = [one.scores for one in seeds]
    plot_scores(curves, path)


def main() -> None:
    """See the module."""
    parser = arguments_of_runs(__doc__, ROOT / "runs/servers.jsonl")
    parser.add_argument("--task", choices=TASKS, default="spell")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    parser.add_argument("--server", help="address of one that already runs the task's model (tether serve vllm)")
    given = parser.parse_args()
    set_threads(1)
    steps = STEPS[given.task]
    asked = [
        Asked(given.task, algorithm, engine, seed, given.steps or steps[algorithm])
        for seed in given.seeds
        for algorithm in given.algorithms
        for engine in given.engines
    ]
    with ExitStack() as started:

        @cache
        def server() -> str:
            folder = Path(started.enter_context(tempfile.TemporaryDirectory()))
            return given.server or started.enter_context(server_of(SERVERS[given.task](folder)))

        def make(**one: Any) -> dict[str, Any]:
            return asdict(train(Asked(**one), server() if one["engine"] == "vllm" else None))

        found = all_runs(make, list(map(asdict, asked)), given.results, made_only=given.made_only)
    runs = {one: Curve(**curve) for one, curve in zip(asked, found, strict=True) if curve is not None}
    if not runs:
        parser.error(f"{given.results}: holds none of these runs")
    order = [(algorithm, engine) for algorithm in given.algorithms for engine in given.engines]
    runs = dict(sorted(runs.items(), key=lambda pair: order.index((pair[0].algorithm, pair[0].engine))))
    print(shown := table(runs))
    if given.write:
        write_between(given.write, f"<!-- {given.task}:begin -->", f"<!-- {given.task}:end -->", shown)
    if given.plot:
        plot(runs, given.plot)


if __name__ == "__main__":
    main()
