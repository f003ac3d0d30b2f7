from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import record, write_jsonl
from tether.data.custom import load_custom_dataset, rows_of_object
from tether.data.prompts import PromptDataset, PromptOptions
from tether.data.rows import Rows
from tether.runtime.objects import PREFIX, holding

CODE = '''
from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tether.batch import Prompt


@dataclass
class Doubled:
    """Each row of the files twice: once as a row, once tokenized by itself, backwards."""

    data_files: list[str]
    tokenizer: Any
    config: dict[str, Any]

    def __post_init__(self):
        self.rows = [json.loads(line) for file in self.data_files for line in open(file)]

    def __len__(self):
        return 2 * len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index // 2]
        if index % 2 == 0:
            return row
        text = row["prompt"][0]["content"][::-1] + self.config["ending"]
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return Prompt(ids, data_source="backwards", ground_truth=7)


class Endless:
    def __init__(self, **arguments):
        pass

    def __getitem__(self, index):
        return {}


class Empty(Endless):
    def __len__(self):
        return 0


class Wrong(Endless):
    def __len__(self):
        return 2


value = 3
'''


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def load(path: Path, name: str, tokenizer: PreTrainedTokenizerFast, files: list[str] | None = None) -> Rows:
    return load_custom_dataset(str(path), name, files=files or [], tokenizer=tokenizer, config={"ending": "!"})


def test_items_are_rows_or_prompts(module: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write_jsonl(module.with_name("a.jsonl"), [record("ab"), record("cd")])
    rows = load(module, "Doubled", tokenizer, [file])
    dataset = PromptDataset(rows, tokenizer, PromptOptions(20))
    assert [tokenizer.decode(prompt.token_ids) for prompt in dataset] == [
        "<bos><|user|>ab<|end|><|assistant|>",
        "ba!",
        "<bos><|user|>cd<|end|><|assistant|>",
        "dc!",
    ]
    assert [prompt.data_source for prompt in dataset] == ["toy", "backwards", "toy", "backwards"]
    assert [prompt.ground_truth for prompt in dataset] == ["2", 7, "2", 7]
    assert [prompt.index for prompt in dataset] == [0, 1, 2, 3]
    assert rows[2].place == f"{module}:Doubled row 2"


def test_rows_that_may_have_been_read_from_columns_are_marked(module: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A class may read Parquet, and a `datasets.Dataset` is columns; a list has the rows as they were written."""
    file = write_jsonl(module.with_name("a.jsonl"), [record()])
    assert load(module, "Doubled", tokenizer, [file])[0].from_columns
    import datasets

    for dataset, marked in (([record()], False), (datasets.Dataset.from_list([record()]), True)):
        with holding({"data": dataset}):
            assert rows_of_object(f"{PREFIX}data")[0].from_columns == marked


def test_the_length_limit_holds_for_prompts_too(module: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write_jsonl(module.with_name("a.jsonl"), [record("abcdef")])
    options = PromptOptions(4, truncation="left")
    dataset = PromptDataset(load(module, "Doubled", tokenizer, [file]), tokenizer, options)
    assert tokenizer.decode(dataset[1].token_ids) == "cba!"
    assert dataset.report.num_cut == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Double", r"data.custom_cls.name: .*mine.py has no class `Double`. Did you mean Doubled\?"),
        ("value", "mine.py has no class `value`"),
        ("Endless", "data.custom_cls: `Endless` of .*mine.py has no __len__"),
        ("Empty", "mine.py:Empty: no rows"),
        ("Wrong", "mine.py:Wrong row 1: no `prompt`"),
    ],
)
def test_refusals(module: Path, tokenizer: PreTrainedTokenizerFast, name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load(module, name, tokenizer)


def test_a_file_that_is_missing_or_is_no_python(module: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    broken = module.with_name("broken.py")
    broken.write_text("x = 1\nclass Doubled(:\n")
    other = module.with_name("mine.txt")
    other.write_text(CODE)
    with pytest.raises(ValueError, match=r"data.custom_cls.path=.*broken.py, line 2: "):
        load(broken, "Doubled", tokenizer)
    with pytest.raises(ValueError, match=r"data.custom_cls.path=.*mien.py: no such file. Did you mean .*mine.py\?"):
        load(module.with_name("mien.py"), "Doubled", tokenizer)
    with pytest.raises(ValueError, match=r"data.custom_cls.path=.*mine.txt: is not a Python file"):
        load(other, "Doubled", tokenizer)
