"""Runs the cases, one process a core."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.algorithms.cases import Case
from benchmarks.algorithms.optimum import best_score
from benchmarks.algorithms.reference import learn_by_hand
from benchmarks.algorithms.report import Row
from benchmarks.algorithms.sabotage import SABOTAGES
from benchmarks.algorithms.tasks import Learned, train


def run_seed(case: Case, seed: int) -> Learned:
    """One run of one case."""
    torch.set_num_threads(1)
    disable_progress_bar()
    if case.by_hand:
        return learn_by_hand(case.task, case.steps, seed)
    sabotage = SABOTAGES[case.sabotage] if case.sabotage else None
    with tempfile.TemporaryDirectory() as folder:
        return train(case.task, case.settings, steps=case.steps, seed=seed, folder=Path(folder), sabotage=sabotage)


def run_all(cases: Sequence[Case], processes: int) -> list[Row]:
    """Every seed of every case; says which row is done."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {case: [pool.submit(run_seed, case, seed) for seed in case.seeds] for case in cases}
        best = {
            case: [pool.submit(best_score, case.task, s, case.beta) for s in case.seeds] for case in cases if case.beta
        }
        rows = []
        for case, waiting in runs.items():
            optima = [one.result() for one in best.get(case, ())]
            rows.append(Row(case, [one.result() for one in waiting], optima))
            print(f"{case.group}: {case.name}: {rows[-1].end:.2f}", file=sys.stderr, flush=True)
    return rows
