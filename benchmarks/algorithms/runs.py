"""Runs the cases, one process a core."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.algorithms.cases import Case
from benchmarks.algorithms.optimum import best_score
from benchmarks.algorithms.reference import learn_by_hand
from benchmarks.algorithms.report import Row
from benchmarks.algorithms.sabotage import SABOTAGES
from benchmarks.algorithms.tasks import Learned, train


def run_seed(case: Case, seed: int, results: Path | None = None) -> Learned:
    """One run of one case; with `results` it is kept there, and taken from there if it is there already."""
    kept = results / f"{case.group}, {case.name}, seed {seed}.json" if results else None
    if kept and kept.exists():
        return Learned(**json.loads(kept.read_text(encoding="utf-8")))
    learned = _run_seed(case, seed)
    if kept:
        kept.write_text(json.dumps(asdict(learned)), encoding="utf-8")
    return learned


def _run_seed(case: Case, seed: int) -> Learned:
    torch.set_num_threads(1)
    disable_progress_bar()
    if case.by_hand:
        return learn_by_hand(case.task, case.steps, seed)
    sabotage = SABOTAGES[case.sabotage] if case.sabotage else None
    with tempfile.TemporaryDirectory() as folder:
        return train(case.task, case.settings, steps=case.steps, seed=seed, folder=Path(folder), sabotage=sabotage)


def run_all(cases: Sequence[Case], processes: int, results: Path | None = None) -> list[Row]:
    """Every seed of every case; says which row is done."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = [[pool.submit(run_seed, case, seed, results) for seed in case.seeds] for case in cases]
        best = [_optima(case, pool) for case in cases]
        rows = []
        for case, waiting, optima in zip(cases, runs, best, strict=True):
            row = Row(case, [one.result() for one in waiting], [one.result() for one in optima])
            print(f"{case.group}: {case.name}: {row.end:.2f}", file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def _optima(case: Case, pool: Executor) -> list[Future[float]]:
    if case.beta is None:
        return []
    return [pool.submit(best_score, case.task, seed, case.beta) for seed in case.seeds]
