"""Runs that are kept are not made again; tables stand between their marks; curves become a table."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calculator import problem, tokenizer
from benchmarks.resumable import all_runs, write_between
from benchmarks.servers import Asked, Curve, table


def test_runs_in_the_file_are_not_made_again(tmp_path: Path) -> None:
    file, made = tmp_path / "runs" / "all.jsonl", list[int]()

    def make(seed: int) -> dict[str, Any]:
        made.append(seed)
        if seed == 3:
            raise RuntimeError("interrupted")
        return {"score": seed / 10}

    asked = [{"seed": 1}, {"seed": 2}, {"seed": 3}]
    with pytest.raises(RuntimeError, match="interrupted"):
        all_runs(make, asked, file, made_only=False)
    assert all_runs(make, asked, file, made_only=True) == [{"score": 0.1}, {"score": 0.2}, None]
    assert all_runs(make, [{"seed": 2}, {"seed": 4}], file, made_only=False) == [{"score": 0.2}, {"score": 0.4}]
    assert made == [1, 2, 3, 4]


def test_a_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<begin>\nold\n<end>\nbelow\n")
    write_between(page, "<begin>", "<end>", "| new |")
    assert page.read_text() == "above\n<begin>\n| new |\n<end>\nbelow\n"
    with pytest.raises(ValueError, match=r"page\.md: no <start>"):
        write_between(page, "<start>", "<end>", "")


def test_curves_of_an_engine_are_a_line() -> None:
    """Of two seeds at steps 1, 2 and 4: means, least and largest by hand."""
    curves = (Curve([0.0, 0.2, 0.4, 0.6], [0.0, 0.7], 1e-14), Curve([0.2, 0.4, 0.6, 0.8], [0.1, 0.9], 3e-14))
    runs = {Asked("spell", "GRPO", "vllm", seed, 4): curve for seed, curve in zip((1, 2), curves, strict=True)}
    cells = table(runs).splitlines()[-1].strip("| ").split(" | ")
    assert cells[:3] == ["GRPO, vllm", "2", "4"]
    assert cells[3:6] == ["0.10 (0.00 to 0.20)", "0.30 (0.20 to 0.40)", "0.70 (0.60 to 0.80)"]
    assert cells[6:] == ["0.40 (0.30 to 0.50)", "0.80 (0.70 to 0.90)", "3e-14"]


def test_every_word_of_a_question_is_a_token() -> None:
    words, draws = tokenizer(), random.Random(0)
    for _ in range(50):
        one = problem(draws)
        ids = words.encode(f"{one.question}\n{one.expression}\n#### {one.answer}", add_special_tokens=False)
        assert words.convert_tokens_to_ids("<unk>") not in ids
        assert words.decode(ids) == f"{one.question}\n{one.expression}\n#### {one.answer}"
