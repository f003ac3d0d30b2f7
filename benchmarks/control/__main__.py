"""Control policies side by side with Stable-Baselines3 and CleanRL: same hyperparameters, seeds and machine.

    python -m benchmarks.control CartPole-v1 Acrobot-v1 --seeds 3
    python -m benchmarks.control MiniGrid-DoorKey-6x6-v0 MiniGrid-MemoryS7-v0   # a CNN, a CNN with an LSTM
    python -m benchmarks.control HalfCheetah-v5 Hopper-v5 Walker2d-v5 --plot control.png
    python -m benchmarks.control --published --seeds 5   # tether alone, beside the returns that others publish
    python -m benchmarks.control --speed --purejaxrl CLONE   # the table of speed (`benchmarks.control.speed`)

The runs of all sides take turns, each in a process of its own. Speed is environment steps of the whole training over
its seconds, without imports and without the test at the end. The peers are fetched from the package registry into
folders of their own, without torch and MuJoCo, so that all sides use the same; PureJaxRL itself has to be cloned. Runs
that are in the file of --results are not made again, and each new one is added: an interrupted benchmark resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.control.published import PUBLISHED, write_published
from benchmarks.control.report import plot, show, thinned, write_table
from benchmarks.control.sides import PEERS, SIDES
from benchmarks.control.speed import MARKS, ROWS, SPEED, table, what_is_missing
from benchmarks.control.tasks import LEARNING, TASKS, Task
from benchmarks.resumable import all_runs, write_between

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("runs/control.jsonl")


def fetch_peer(side: str) -> Path:
    """Install a peer, once per list of packages, into a folder beside this machine's other temporary files."""
    version = zlib.crc32(" ".join(PEERS[side]).encode())
    folder = Path(tempfile.gettempdir()) / f"tether-benchmark-{side}-{version:08x}"
    if not (folder / "complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--upgrade", "--target", str(folder)]
        # Of JAX's packages the dependencies are needed, too.
        jax = side == "purejaxrl"
        pip += ["--constraint", str(ROOT / "constraints.txt")] if jax else ["--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, *PEERS[side]], check=True)
        (folder / "complete").touch()
    return folder


def measure(side: str, name: str, task: Task, seed: int, threads: int) -> dict[str, Any]:
    """One run in a process of its own."""
    path = os.pathsep.join([f"{ROOT}/src", str(ROOT), *([str(fetch_peer(side))] if side in PEERS else [])])
    request = json.dumps({"side": side, "name": name, "task": asdict(task), "seed": seed, "threads": threads})
    command = [sys.executable, "-m", "benchmarks.control", "--one", request]
    path += os.pathsep + os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"curve": thinned(result["curve"])}


def run(
    tasks: Mapping[str, Task], seeds: int, only: Sequence[str], threads: int, file: Path, *, made_only: bool
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Results of each task and side, a seed of all tasks after the other; those in the file are not made again.

    Tasks of which a side has no run yet are left out.
    """

    def make(side: str, name: str, seed: int, threads: int, task: Mapping[str, Any]) -> dict[str, Any]:
        result = measure(side, name, tasks[name], seed, threads)
        print(f"{name} seed {seed} {side}: {result['sps']:,.0f} steps/s, return {result['return']:.1f}", flush=True)
        return result

    asked = [
        {"side": side, "name": name, "seed": seed, "threads": threads, "task": told(task)}
        for seed in range(1, max([seeds, *(task.seeds or 0 for task in tasks.values())]) + 1)
        for name, task in tasks.items()
        if seed <= max(seeds, task.seeds or 0)
        for side in only
        if side in task.sides
    ]
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {
        name: {side: [] for side in only if side in task.sides} for name, task in tasks.items()
    }
    for one, result in zip(asked, all_runs(make, asked, file, made_only=made_only), strict=True):
        if result is not None:
            tables[str(one["name"])][str(one["side"])].append(result)
    return {name: sides for name, sides in tables.items() if all(sides.values())}


def told(task: Task) -> dict[str, Any]:
    """Settings that differ from the defaults, so that a new field makes no run another one."""
    return {field.name: value for field in fields(task) if (value := getattr(task, field.name)) != field.default}


def main() -> None:
    """Parse the command line and take turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {**TASKS, **{name: published.task for name, published in PUBLISHED.items() if name not in TASKS}}
    parser.add_argument("tasks", nargs="*", choices=[*known, []], metavar="TASK", help=", ".join(known))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    parser.add_argument("--value-coeff", type=float, help="instead of the task's own number")
    parser.add_argument("--threads", type=int, default=1, help="torch's, on all sides")
    parser.add_argument("--only", nargs="+", choices=SIDES, default=list(SIDES), help="these sides only")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of runs that are done (JSON lines)")
    parser.add_argument("--learning", action="store_true", help="the tasks of the table of docs/evidence/control.md")
    parser.add_argument("--published", action="store_true", help="tether on the tasks whose returns others published")
    parser.add_argument("--speed", action="store_true", help="the table of speed, without returns")
    parser.add_argument("--purejaxrl", type=Path, help="with --speed: a clone of github.com/luchris429/purejaxrl")
    parser.add_argument("--write", type=Path, help="put the table of returns into this page")
    parser.add_argument("--made-only", action="store_true", help="make no new run, and show those of --results")
    parser.add_argument("--plot", type=Path, help="draw the curves to this PNG")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        asked = json.loads(given.one)
        task = Task(**asked["task"])
        print(json.dumps(SIDES[asked["side"]](asked["name"], task, asked["seed"], asked["threads"])))
        return
    asked_for = {"steps": given.steps, "value_coeff": given.value_coeff}
    changes = {key: value for key, value in asked_for.items() if value is not None}
    if given.speed:
        compare_speed(given)
        return
    if given.published:
        known, given.only = {name: published.task for name, published in PUBLISHED.items()}, ["tether"]
    names = given.tasks or (PUBLISHED if given.published else LEARNING if given.learning else TASKS)
    tasks = {name: replace(known[name], **changes) for name in names}
    tables = run(tasks, given.seeds, given.only, given.threads, given.results, made_only=given.made_only)
    for name, results in tables.items():
        show(name, tasks[name], results)
    if given.write and given.published:
        write_published(given.write, tables)
    elif given.write:
        write_table(given.write, tasks, tables)
    if given.plot:
        plot(tables, given.plot)


def compare_speed(given: argparse.Namespace) -> None:
    """Run the rows of the table of speed that can run here, and print it."""
    if given.purejaxrl:
        if not (given.purejaxrl / "purejaxrl/ppo.py").is_file():
            raise SystemExit(
                f"--purejaxrl={given.purejaxrl}: there is no purejaxrl/ppo.py. Name the folder of a clone."
            )
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str((given.purejaxrl / "purejaxrl").resolve()), os.environ.get("PYTHONPATH", "")]
        )
    missing = {row.title: what_is_missing(row, given.purejaxrl) for row in ROWS}
    tasks = {name: SPEED[name] for name in dict.fromkeys(row.task for row in ROWS if not missing[row.title])}
    if given.steps:  # at least one training step
        tasks = {
            name: replace(task, steps=max(given.steps, task.num_envs * task.rollout)) for name, task in tasks.items()
        }
    tables = run(tasks, given.seeds, list(SIDES), given.threads, given.results, made_only=given.made_only)
    text = table(tasks, tables, missing)
    print(text)
    if given.write:
        write_between(given.write, *MARKS, text)


if __name__ == "__main__":
    main()
