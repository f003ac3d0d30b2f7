"""The rewards of the tasks, as a user writes them: the run loads this file by its path."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Score by `data_source`; ``acc`` is what the table reports."""
    return {"spell": spell, "ledger": ledger}[data_source](solution_str, ground_truth)


def spell(answer: str, truth: str) -> dict[str, float]:
    """Half for the letters of `truth` that stand in their place, half for the right length."""
    letters = sum(given == wanted for given, wanted in zip(answer, truth, strict=False)) / len(truth)
    length = float(len(answer) == len(truth))
    score = (letters + length) / 2
    return {"score": score, "acc": score, "letters": letters, "length": length}


def ledger(answer: str, truth: str) -> dict[str, float]:
    """1 for the first letter of `truth`, plus the number behind it: a worth of the prompt that no answer changes."""
    acc = float(answer == truth[0])
    return {"score": acc + float(truth[1:]), "acc": acc}
