import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from tests.text.data.conftest import record, write_jsonl
from tether.config import load_config
from tether.runtime.objects import PREFIX, register_objects
from tether.text.data.custom import load_custom_dataset, rows_of_object
from tether.text.data.prompts import PromptDataset, PromptOptions
from tether.text.data.rows import SINGLE_TURN, Rows
from tether.text.inputs import build_dataset

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
        with register_objects({"data": dataset}):
            assert rows_of_object(f"{PREFIX}data")[0].from_columns == marked


MINE = """
import json

class Mine:
    def __init__(self, data_files, tokenizer, config):
        self.rows = json.loads(open(data_files[0]).read())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]
"""
GSM8K = [{"question": f"{i} + {i}?", "answer": f"Twice {i} is\n#### {2 * i:,}"} for i in (1, 2, 600)]
NAMED = [{"q": f"{i} + {i}?", "a": str(2 * i), "where": "x" if i == 1 else None} for i in (1, 2, 600)]
VERL = [{"prompt": [{"role": "user", "content": f"{i} + {i}?"}], "data_source": "x"} for i in (1, 2, 600)]


@pytest.mark.parametrize("kind", ["list", "datasets", "pandas", "pandas_of_parquet", "pyarrow", "class"])
def test_keys_of_the_data_section_name_the_columns_of_objects_too(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Published layouts, `answer_key`, `data_source`, `prompt_key` and `reward_fn_key`, as for files."""
    import datasets
    import pandas

    def read(rows: list[dict[str, Any]], *more: str) -> PromptDataset:
        files, own = [f"{PREFIX}dataset"], list[str]()
        table = pyarrow.Table.from_pylist(rows)
        if kind == "class":
            (tmp_path / "mine.py").write_text(MINE)
            (tmp_path / "rows.json").write_text(json.dumps(rows))
            files = [str(tmp_path / "rows.json")]
            own = [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine"]
        pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
        objects = {
            "list": lambda: rows, "datasets": lambda: datasets.Dataset.from_list(rows),
            "pandas": lambda: pandas.DataFrame(rows)[::-1].sort_index(), "pyarrow": lambda: table,
            "pandas_of_parquet": lambda: pandas.read_parquet(tmp_path / "rows.parquet"), "class": lambda: None,
        }  # fmt: skip
        usual = ["data.train_files=unused", "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=unused"]
        config = load_config(None, [*usual, "custom_reward_function.path=unused.py", *own, *more]).config
        with register_objects({"dataset": objects[kind]()}):
            return build_dataset(config.data, SINGLE_TURN, tokenizer, files, -1, shuffle=False)

    recognised = read(GSM8K)
    assert [(p.messages[0]["content"], p.ground_truth, p.data_source) for p in recognised] == [
        ("1 + 1?", "2", "openai/gsm8k"), ("2 + 2?", "4", "openai/gsm8k"), ("600 + 600?", "1200", "openai/gsm8k"),
    ]  # fmt: skip
    assert "is read as GSM8K" in str(recognised.report)
    named = read(NAMED, "data.prompt_key=q", "data.answer_key=a", "data.reward_fn_key=where", "data.data_source=y")
    assert [(p.messages[0]["content"], p.ground_truth, p.data_source) for p in named] == [
        ("1 + 1?", "2", "x"), ("2 + 2?", "4", "y"), ("600 + 600?", "1200", "y"),
    ]  # fmt: skip
    usual = read([{**row, "reward_model": {"style": "model", "ground_truth": None}} for row in VERL])
    assert [p.messages for p in usual] == [tuple(row["prompt"]) for row in VERL]
    with pytest.raises(ValueError, match="no `prompt`"):
        read(NAMED)


def test_objects_that_are_no_rows() -> None:
    import pandas

    mixed = pandas.DataFrame({"prompt": ["1", "2"], "answer": [1, "two"]})
    for dataset, says in (
        ("data/train.parquet", "data: a str is no sequence of rows"),
        ({"train": [record()]}, r"data: a dict is no sequence of rows; .*Dataset \(data\['train'\]\)"),
        (mixed, r"data: a DataFrame that cannot be read as a table .*to_dict\('records'\)"),
    ):
        with register_objects({"data": dataset}), pytest.raises(ValueError, match=says):
            rows_of_object(f"{PREFIX}data")


def test_the_length_limit_holds_for_prompts_too(module: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = write_jsonl(module.with_name("a.jsonl"), [record("abcdef")])
    options = PromptOptions(4, truncation="left")
    dataset = PromptDataset(load(module, "Doubled", tokenizer, [file]), tokenizer, options)
    assert tokenizer.decode(dataset[1].token_ids) == "cba!"
    assert dataset.report.num_truncated == 2


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
