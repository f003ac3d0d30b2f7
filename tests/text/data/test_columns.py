"""Files as they are published: question and worked solution, and no reward named."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.text.data.conftest import record, write_jsonl
from tests.text.data.test_sources import refusal, write_parquet
from tether.text.data.prompts import PromptDataset, PromptOptions
from tether.text.data.sources import load_rows
from tether.text.rewards.router import find_reward
from tether.text.rewards.sandbox.options import ProgramOptions

GSM8K = {"question": "2 * 600?", "answer": "2 * 600 = <<2*600=1200>>1200\n#### 1,200"}
MATH = {"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"}
MATH_500 = {**MATH, "answer": "\\frac{1}{2}", "unique_id": "a"}
MATH_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
ASK = "%20Let's%20think%20step%20by%20step%20and%20output%20the%20final%20answer%20after%20%22%23%23%23%23%22."


@pytest.mark.parametrize("part", ["train", "test"])
def test_raw_gsm8k_is_what_verls_preprocessing_makes_of_it(test_data: Path, part: str) -> None:
    raw = load_rows(f"{test_data}/gsm8k/{part}.jsonl?suffix={ASK}")
    converted = load_rows(f"{test_data}/gsm8k/{part}.parquet")
    assert len(raw) == len(converted)
    for got, expected in zip(raw, converted, strict=True):
        assert got.messages == expected.messages
        assert (got.ground_truth, got.data_source) == (expected.ground_truth, expected.data_source)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("raw", "question", "truth", "source"),
    [
        (GSM8K, "2 * 600?", "1200", "openai/gsm8k"),
        (MATH, "Half?", "\\frac{1}{2}", MATH_SOURCE),
        (MATH_500, "Half?", "\\frac{1}{2}", MATH_SOURCE),
        ({**MATH, "solution": "So $x=\\boxed 2$."}, "Half?", "2", MATH_SOURCE),
        ({"prompt": "2 * 600?", "answer": GSM8K["answer"]}, "2 * 600?", "1200", "openai/gsm8k"),
    ],
)
def test_published_layouts(
    tmp_path: Path, write: Any, raw: dict[str, str], question: str, truth: str, source: str
) -> None:
    row = load_rows(write(tmp_path / f"a.{write.__name__[6:]}", [raw]))[0]
    assert row.messages == ({"role": "user", "content": question},)
    assert (row.ground_truth, row.data_source) == (truth, source)
    reply = f"#### {truth}" if source == "openai/gsm8k" else f"\\boxed{{{truth}}}"
    assert find_reward(source, ProgramOptions())(source, reply, row.ground_truth, row.extra_info) == 1.0


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt_key": "question", "answer_key": "answer", "data_source": "openai/gsm8k"},
        {"prompt_key": "question"},
        {"answer_key": "answer"},
        {"data_source": "openai/gsm8k"},
    ],
)
def test_naming_the_columns_never_makes_a_solution_the_ground_truth(tmp_path: Path, keys: dict[str, str]) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [GSM8K])
    assert load_rows(file, **keys)[0].ground_truth == "1200"


def test_a_reward_of_ones_own_may_take_the_whole_column(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [GSM8K])
    named = load_rows(f"{file}?question=question&answer=answer&data_source=mine")
    assert (named[0].ground_truth, named[0].data_source) == (GSM8K["answer"], "mine")
    assert named.recognised() == []
    only_source = load_rows(f"{file}?data_source=mine")
    assert (only_source[0].ground_truth, only_source[0].data_source) == ("1200", "mine")


def test_rows_of_verls_layout_keep_their_columns(tmp_path: Path) -> None:
    rows = load_rows(write_jsonl(tmp_path / "a.jsonl", [record("asked") | GSM8K | MATH]))
    assert (rows[0].messages[0]["content"], rows[0].ground_truth) == ("asked", "2")
    assert rows.recognised() == []


def test_a_row_without_the_mark_is_named(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [GSM8K, {"question": "1?", "answer": "one"}, {"question": "2?"}])
    assert refusal(file).splitlines() == [
        f"{file} row 1: no #### number in `answer`, as GSM8K has it. Correct the row, or drop it.",
        f"{file} row 2: no `answer`, so no right answer.",
    ]


@pytest.mark.parametrize("answer", ["Paris", "#### 1 The heading\nParis", "Paris ####"])
def test_question_and_answer_without_marks_are_not_taken_for_gsm8k(tmp_path: Path, answer: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "Capital of France?", "answer": answer}])
    assert f"{file}?question=question&answer=answer&data_source=REWARD" in refusal(file)


def test_each_source_has_options_of_its_own(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [{"q": "1 + 1?", "a": "2"}])
    second = write_jsonl(tmp_path / "b.jsonl", [record()])
    rows = load_rows([f"{first}?question=q&answer=a&data_source=mine&system=Be%20brief.&suffix=%20Now!", second])
    assert rows[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1? Now!"},
    )
    assert (rows[0].ground_truth, rows[0].data_source, rows[0].place) == ("2", "mine", f"{first} row 0")
    assert rows[1].messages == ({"role": "user", "content": "1 + 1?"},)
    assert load_rows(f"{second}?suffix=%0A")[0].messages[-1]["content"] == "1 + 1?\n"


def test_options_that_are_refused(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = write_jsonl(tmp_path / "a.jsonl", [record(prompt=messages)])
    assert "row 0: `prompt` has a system message already" in refusal(f"{file}?system=x")
    assert refusal(f"{file}?sufix=x").endswith("Did you mean suffix?")
    assert "no `nothing`" in refusal(f"{file}?question=nothing")
    assert "what follows the ? must read key=value" in refusal(f"{file}?suffix")
    assert refusal(f"{tmp_path}/b.jsonl?suffix=x").startswith(f"{tmp_path}/b.jsonl: no such file")


def test_a_question_mark_in_a_files_name(tmp_path: Path) -> None:
    assert len(load_rows(write_jsonl(tmp_path / "why?.jsonl", [record()]))) == 1


def test_the_report_says_what_was_recognised(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [GSM8K])
    report = PromptDataset(load_rows(file), tokenizer, PromptOptions(100)).report
    assert str(report).endswith(
        f"tokens; {file} is read as GSM8K (question `question`, ground truth #### number in `answer`, "
        "data_source openai/gsm8k)"
    )
