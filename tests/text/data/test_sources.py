import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.text.data.conftest import record, write_jsonl
from tether.text.data.location import SUFFIXES, locate, split_query
from tether.text.data.pairs import load_pairs
from tether.text.data.rows import Rows
from tether.text.data.sources import READERS, load_rows


def write_parquet(path: Path, records: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return str(path)


def contents(rows: Rows) -> list[str]:
    return [row.messages[-1]["content"] for row in rows]


def refusal(files: str | list[str], **keys: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_rows(files, **keys)
    return str(caught.value)


def test_columns_of_maps_are_mappings(tmp_path: Path) -> None:
    truth = pyarrow.struct(
        [("style", pyarrow.string()), ("ground_truth", pyarrow.map_(pyarrow.string(), pyarrow.int64()))]
    )
    table = pyarrow.Table.from_pylist([record(), record()]).drop_columns("reward_model")
    truths = [{"style": "rule", "ground_truth": [("a", 1)]}, {"style": "rule", "ground_truth": [("b", 2)]}]
    pyarrow.parquet.write_table(
        table.append_column("reward_model", pyarrow.array(truths, truth)), tmp_path / "a.parquet"
    )
    found = load_rows(str(tmp_path / "a.parquet"))
    assert [row.ground_truth for row in found] == [{"a": 1}, {"b": 2}]
    assert all(row.from_columns for row in found)


def test_kinds_mix_and_keep_list_order(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [record("a0"), record("a1")])
    table = write_parquet(tmp_path / "b.parquet", [record("b0"), record("b1")])
    listed = tmp_path / "c.json"
    listed.write_text(json.dumps([record("c0")], indent=2))
    rows = load_rows([table, str(listed), lines])
    assert contents(rows) == ["b0", "b1", "c0", "a0", "a1"]
    assert [row.place for row in rows] == [
        f"{table} row 0",
        f"{table} row 1",
        f"{listed} row 0",
        f"{lines} row 0",
        f"{lines} row 1",
    ]
    assert rows[4] == list(rows)[4]
    with pytest.raises(IndexError):
        rows[5]


def test_a_row_is_read_whole(tmp_path: Path) -> None:
    for file in (
        write_jsonl(tmp_path / "a.jsonl", [record("q", level="5")]),
        write_parquet(tmp_path / "a.parquet", [record("q", level="5")]),
    ):
        row = load_rows(file)[0]
        assert row.messages == ({"role": "user", "content": "q"},)
        assert (row.data_source, row.ground_truth, row.extra_info) == ("toy", "2", {"split": "train", "index": 0})


def test_json_keeps_types_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    truths: list[Any] = ["2", 2, {"inputs": ["1"], "outputs": ["2"]}, [1.5]]
    lines = [json.dumps(record(reward_model={"style": "rule", "ground_truth": truth})) for truth in truths]
    path.write_text("\n\n".join(lines))
    assert [row.ground_truth for row in load_rows(str(path))] == truths


def test_a_plain_string_is_one_user_message(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [record(prompt="hello")])
    assert load_rows(file)[0].messages == ({"role": "user", "content": "hello"},)


def test_columns_can_be_called_otherwise(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", [record(prompt=None, data_source=None, chat="hi", origin="mine")])
    row = load_rows(file, prompt_key="chat", reward_fn_key="origin")[0]
    assert (row.messages[0]["content"], row.data_source) == ("hi", "mine")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_files_of_rlinfs_layout(tmp_path: Path, write: Any) -> None:
    rows = [{"prompt": "1 + 1?", "solutions": ["\\boxed{2}"]}, {"prompt": "2 + 2?", "solutions": ["4"]}]
    loaded = load_rows(write(tmp_path / f"a.{write.__name__[6:]}", rows), answer_key="solutions", data_source="math")
    assert [(row.ground_truth, row.data_source) for row in loaded] == [("\\boxed{2}", "math"), ("4", "math")]


def test_a_row_that_names_its_source_keeps_it(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [record(), record(data_source=None)])
    assert [row.data_source for row in load_rows(file, data_source="math")] == [record()["data_source"], "math"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "row 0: no `solution`, so no right answer"),
        ([], "row 0: no `solution`"),
        (["1", "2"], "row 0: `solution` has 2 answers. Rules compare with one"),
    ],
)
def test_answers_that_cannot_be_compared_with(tmp_path: Path, answer: Any, says: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi", "solution": answer}, {"prompt": "hi", "solution": "3"}])
    assert says in refusal(file, answer_key="solution", data_source="math")


def test_nulls_that_parquet_adds_to_messages_are_dropped(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a", "name": "bob"}, {"role": "user", "content": "b"}]
    row = load_rows(write_parquet(tmp_path / "a.parquet", [record(prompt=messages)]))[0]
    assert row.messages == tuple(messages)


def test_rows_of_style_model_need_no_ground_truth(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [record(reward_model={"style": "model"})])
    assert load_rows(file)[0].ground_truth is None


def test_real_parquet_files(test_data: Path) -> None:
    rows = load_rows([str(test_data / "gsm8k/test.parquet"), str(test_data / "math/test.parquet")])
    assert len(rows) == 1319 + 5000
    assert (rows[0].data_source, rows[0].ground_truth) == ("openai/gsm8k", "18")
    assert rows[0].messages[0]["content"].endswith('output the final answer after "####".')
    assert (rows[1319].data_source, rows[1319].ground_truth) == ("DigitalLearningGmbH/MATH-lighteval", "2")
    assert rows[1319].place.endswith("math/test.parquet row 0")


def test_a_layout_that_is_not_known_is_refused_with_its_columns_to_name(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "1 + 1?", "output": "2"}])
    message = refusal(file)
    assert f"{file}: not in the row layout: no `prompt`, `reward_model`, `data_source`; its keys are" in message
    assert len(message.splitlines()) == 1
    advised = message.split('"')[1]
    assert advised == f"{file}?question=instruction&answer=output&data_source=REWARD"
    assert load_rows(advised)[0].ground_truth == "2"
    assert "data.prompt_key=instruction data.answer_key=output data.data_source=REWARD" in message


def test_only_what_is_missing_is_advised(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [record(data_source=None)])
    assert f'"{file}?data_source=REWARD", or for all sources data.data_source=REWARD.' in refusal(file)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (record(prompt=None), "no `prompt`. Give a list of {role, content}"),
        (record(prompt=[]), "no `prompt`"),
        (record(prompt=7), "`prompt` is a int"),
        (record(prompt=[{"role": "user"}]), "`prompt`[0] is {'role': 'user'}. A message is {role, content}"),
        (record(prompt=[{"role": "user", "content": None}]), "`prompt`[0] is"),
        (record(prompt=["hello"]), "`prompt`[0] is 'hello'. A message is"),
        (record(data_source=None), "no `data_source`. It names the reward"),
        (record(data_source="apps\x1b[2J"), r"`data_source` is 'apps\x1b[2J', with a control character"),
        (record(data_source=5), "`data_source` is 5. It names the reward"),
        (record(reward_model=None), "no `reward_model`, so no ground truth"),
        (record(reward_model="4"), "`reward_model` is '4', so no ground truth"),
        (record(reward_model={"style": "rule"}), "no `reward_model.ground_truth`"),
        (record(reward_model={"style": "rule", "ground_truth": math.nan}), "no `reward_model.ground_truth`"),
        (record(extra_info="x"), "`extra_info` is 'x'"),
        (record(images=["cat.png"]), "`images` is not empty, but only text prompts are read"),
        ("text", "a str, not an object with keys"),
    ],
)
def test_a_bad_row_is_named_with_its_file(tmp_path: Path, bad: Any, says: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [record(), bad])
    assert refusal(file).startswith(f"{file} row 1: {says}")


def test_a_null_in_parquet_is_a_missing_value(tmp_path: Path) -> None:
    gone = record(reward_model={"style": "rule", "ground_truth": None})
    file = write_parquet(tmp_path / "a.parquet", [record(), gone])
    assert refusal(file).startswith(f"{file} row 1: no `reward_model.ground_truth`")


def test_all_problems_come_at_once_up_to_ten(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [record(), record(prompt=None, data_source=None)])
    second = write_jsonl(tmp_path / "b.jsonl", [record(), *[record(prompt=None)] * 13])
    missing = str(tmp_path / "c.jsonl")
    lines = refusal([first, missing, second]).splitlines()
    places = [missing, f"{first} row 1", f"{first} row 1", f"{second} row 1"]
    assert [line.split(":")[0] for line in lines[:4]] == places
    assert len(lines) == 11
    assert lines[-1] == "... and 6 more"


def test_missing_files_are_all_named_with_the_nearest(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [record()])
    typo, wrong_folder = folder / "trian.jsonl", tmp_path / "gsm8" / "train.jsonl"
    first, second = refusal([str(typo), str(wrong_folder)]).splitlines()
    assert first == f"{typo}: no such file. Did you mean {folder / 'train.jsonl'}?"
    assert second == f"{wrong_folder}: no such file. Did you mean {folder}?"
    assert f"The nearest folder that exists is {folder}." in refusal(str(folder / "zzz.parquet"))
    (folder / "inter.jsonl").touch()
    assert "Did you mean" not in refusal(str(folder / "nowhere.jsonl"))  # only the ending is alike


@pytest.mark.parametrize(("name", "file"), [("gsm8k", "train.parquet"), ("full_hh_rlhf", "rm/test.parquet")])
def test_a_missing_file_of_a_published_dataset_names_the_command_that_writes_it(tmp_path: Path, name: str, file: str):
    out = tmp_path / "my data" / name
    said = f"`tether data pull {name} --out '{out}'` writes it."
    with pytest.raises(ValueError, match=f"no such file.*{re.escape(said)}"):
        locate(str(out / file))
    with pytest.raises(ValueError) as error:
        locate(str(out / "mine.parquet"))
    assert "tether data pull" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("text", ["", "\n \n", "[]"])
def test_an_empty_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert refusal(str(path)).startswith(f"{path}: no rows.")


def test_an_empty_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([record()])
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    assert refusal(str(path)).startswith(f"{path}: no rows.")


def test_no_file_at_all() -> None:
    assert "the list is empty" in refusal([])


def test_unreadable_files(tmp_path: Path) -> None:
    parquet, lines, binary = tmp_path / "a.parquet", tmp_path / "a.jsonl", tmp_path / "b.json"
    parquet.write_text("not parquet")
    lines.write_text(json.dumps(record()) + "\n{'prompt': 1}\n")
    binary.write_bytes(b"\xff\xfe\x00")
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 5000 + "]" * 5000)
    problems = refusal([str(parquet), str(lines), str(binary), str(deep)]).splitlines()
    assert problems[3] == f"{deep}: nested too deeply to be read"
    assert problems[0].startswith(f"{parquet}: not a readable parquet file:")
    assert problems[1].startswith(f"{lines} line 2: not readable as json:")
    assert problems[2].startswith(f"{binary}")
    assert "is not UTF-8. Save the file as UTF-8." in problems[2]


def test_json_is_not_read_otherwise_than_it_is_written(tmp_path: Path) -> None:
    twice, digits, listed = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.json"
    twice.write_text(f'{json.dumps(record())}\n{json.dumps(record())[:-1]}, "prompt": "another"}}')
    digits.write_text(f'{json.dumps(record())[:-1]}, "extra_info": {{"n": {"1" * 5000}}}}}')
    listed.write_text("[\n" + json.dumps(record()) + "\n}")
    problems = refusal([str(twice), str(digits), str(listed)]).splitlines()
    assert problems[0].startswith(f"{twice} line 2: the key `prompt` stands twice in one object")
    assert problems[1].startswith(f"{digits} line 1: Exceeds the limit (4300 digits)")
    assert problems[2].startswith(f"{listed}: not readable as json: Expecting ',' delimiter at line 3, column 1.")
    marked = tmp_path / "d.jsonl"
    marked.write_text(json.dumps(record("as Windows writes it")), encoding="utf-8-sig")
    assert contents(load_rows(str(marked))) == ["as Windows writes it"]


def test_a_column_that_stands_twice(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([record()])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table.append_column("prompt", table.column("prompt")), path)
    assert refusal(str(path)) == f"{path}: several columns are named `prompt`. Leave one, or rename the others."


def test_patterns_and_folders(tmp_path: Path) -> None:
    """Sorted by name, whatever the order of the disk; options hold for each file; a file's own name counts first."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for name in ("train-00001.parquet", "train-00010.parquet", "train-00000.parquet"):
        write_parquet(shards / name, [record(name)])
    (shards / "README.md").touch()
    (shards / ".train.parquet").touch()
    sharded = ["train-00000.parquet", "train-00001.parquet", "train-00010.parquet"]
    for spec in (shards, shards / "*", shards / "train-*.parquet", shards / "train-[0-9]*.parquet", tmp_path / "**/*t"):
        assert contents(load_rows(str(spec))) == sharded, spec
    rows = load_rows([str(shards / "*1.parquet?suffix=!&data_source=x"), f"{shards}?system=s"])
    assert contents(rows) == ["train-00001.parquet!", *sharded]
    assert [len(row.messages) for row in rows] == [1, 2, 2, 2]
    assert [row.file for row in rows][1] == str(shards / "train-00000.parquet")
    odd = write_jsonl(tmp_path / "a[0]*.jsonl", [record("odd")])
    assert contents(load_rows(odd)) == ["odd"]
    pair = {"chosen": "yes", "rejected": "no"}
    for name in ("p0.jsonl", "p1.jsonl"):
        write_jsonl(tmp_path / name, [pair])
    assert len(load_pairs([str(tmp_path / "p*.jsonl")])) == 2


def test_patterns_and_folders_that_are_refused(tmp_path: Path) -> None:
    """What matches nothing; folders in which training and test data, or the same data twice, would be joined."""
    none = str(tmp_path / "*.parquet")
    assert refusal(none).startswith(f"{none}: no file matches this pattern, looked for from {Path.cwd()}.")
    folder = tmp_path / "gsm8k"
    (folder / "inner").mkdir(parents=True)
    assert refusal(str(folder)) == (
        f"{folder}: a folder without .parquet, .json, .jsonl files. Name one of its folders (inner), or "
        f"{folder}/**/*.parquet."
    )
    write_jsonl(folder / "train.jsonl", [record()])
    write_jsonl(folder / "x_test2.jsonl", [record()])
    assert "files of several splits (test, train): train.jsonl, x_test2.jsonl. Name those" in refusal(str(folder))
    (folder / "x_test2.jsonl").rename(folder / "trained.json")
    assert "files of several formats (.json, .jsonl)" in refusal(str(folder))
    (tmp_path / "t.csv").write_text("q,a\n")
    assert "Convert it" in refusal(str(tmp_path / "*.csv"))
    problems = refusal([none, str(tmp_path / "gone.jsonl")]).splitlines()
    assert len(problems) == 2


def test_other_kinds_of_path(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [record()])
    table = tmp_path / "a.csv"
    table.write_text("prompt\nhello\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl: no regular file" in refusal(str(tmp_path / "pipe.jsonl"))
    assert refusal(str(table)).startswith(f"{table}: not a .parquet, .json, .jsonl file")
    (tmp_path / "a.xlsx").touch()
    assert "Convert it" not in refusal(str(tmp_path / "a.xlsx"))
    assert refusal("nothing").startswith("nothing: not a .parquet, .json, .jsonl file, nor `owner/name` on the hub.")
    assert refusal("s3://bucket/a.jsonl") == "s3://bucket/a.jsonl: an address. Copy the file here, and name its path."
    link = tmp_path / "link.jsonl"
    link.symlink_to("gone.jsonl")
    assert refusal(str(link)) == f"{link}: a link to gone.jsonl, where nothing is."


@pytest.mark.parametrize("text", ["q,a\n1+1?,2\n", "q\ta\n1+1?\t2\n"])
def test_a_table_in_text_comes_with_the_command_that_converts_it(text: str, tmp_path: Path) -> None:
    table = tmp_path / ("a.tsv" if "\t" in text else "a.csv")
    table.write_text(text)
    command, columns = refusal(str(table)).split("Convert it: ")[1].split(", and name its columns: ")
    subprocess.run(command, shell=True, check=True)
    spec = columns.replace("question=COLUMN", "question=q").replace("answer=COLUMN", "answer=a").replace("REWARD", "x")
    (row,) = load_rows(spec)
    assert (row.messages[-1]["content"], row.data_source, row.ground_truth) == ("1+1?", "x", 2)


def test_the_beginning_alone_is_read(tmp_path: Path) -> None:
    records = [record(f"q{number}") for number in range(5)]
    bad = write_jsonl(tmp_path / "bad.jsonl", [*records[:2], "no row"])
    (tmp_path / "list.json").write_text(json.dumps(records, indent=1))
    files = [write_jsonl(tmp_path / "a.jsonl", records), str(tmp_path / "list.json"), bad]
    files.append(write_parquet(tmp_path / "a.parquet", records))
    assert contents(load_rows(files, first=2)) == ["q0", "q1"] * 4
    with pytest.raises(ValueError, match=r"bad.jsonl row 2: a str, not an object with keys"):
        load_rows(bad, first=3)
    empty = write_parquet(tmp_path / "empty.parquet", [])
    with pytest.raises(ValueError, match="no rows"):
        load_rows(empty, first=3)


def test_queries() -> None:
    assert split_query("chain_sum?size=20&suffix=%20a%0Ab&empty=") == (
        "chain_sum",
        {"size": "20", "suffix": " a\nb", "empty": ""},
    )
    assert "what follows the ? must read key=value" in refusal("reasoning_gym:chain_sum?size")
    assert "(size stands twice)" in refusal("reasoning_gym:chain_sum?size=5&size=6")
    assert "size is `many`" in refusal("reasoning_gym:chain_sum?size=many")


def test_every_kind_of_file_has_a_reader():
    assert tuple(READERS) == SUFFIXES
