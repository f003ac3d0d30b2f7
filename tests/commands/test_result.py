"""The result of a run as its files tell it."""

import json
from pathlib import Path

from tether.commands.result import read_result


def test_the_best_step_is_that_of_the_highest_score(tmp_path: Path) -> None:
    scores = {1: 0.2, 2: 0.9, 3: 0.4}
    lines = [json.dumps({"step": step, "val-core/sums/reward/mean@1": score}) for step, score in scores.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    result = read_result(tmp_path, step=3, total_steps=3)
    assert (result.best_step, result.best_score, result.last_score) == (2, 0.9, 0.4)
    assert result.score == "val-core/sums/reward/mean@1"
