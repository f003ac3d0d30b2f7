"""The report at the end of a run, from the files in its folder."""

import io
import json
from pathlib import Path

from tether.commands.report import next_commands, show_report
from tether.runtime.terminal import Screen


def test_scores_stand_beside_the_questions_and_the_most_frequent_answer(tmp_path: Path) -> None:
    def line(step: int, score: float) -> str:
        aux = {"num_distinct": 30.0, "majority_answer": 0.125}
        metrics = {f"val-aux/my/sums/{name}": value for name, value in aux.items()}
        return json.dumps({"step": step, "val-core/my/sums/reward/mean@1": score, **metrics})

    (tmp_path / "metrics.jsonl").write_text(f"{line(0, 0.25)}\n{line(4, 0.75)}\n")
    said = Screen(file=io.StringIO(), width=200)
    show_report(tmp_path, said, "tether train")
    text = said.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("30 distinct", "0.250", "0.750", "+0.500", "most frequent answer", "0.125"):
        assert shown in text


def test_what_is_suggested_fits_the_kind_of_policy(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    assert any("tether play" in line for line in next_commands(tmp_path, "tether train"))
    (tmp_path / "actor" / "config.json").touch()
    assert any("tether generate" in line for line in next_commands(tmp_path, "tether train"))
