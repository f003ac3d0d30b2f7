"""Sets of programming problems in the layouts that their authors publish: rows from a hub, or from a file."""

import base64
import contextlib
import gzip
import json
import pickle
import resource
import zlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.text.data.hub_server import serving
from tests.text.data.test_published import Record, parquet
from tether.commands.data import pull
from tether.text.data.sources import load_rows
from tether.text.rewards.router import check_truth
from tether.text.rewards.sandbox import ProgramOptions
from tether.text.rewards.sandbox.bubblewrap import confinement_advice
from tether.text.rewards.sandbox.reward import ProgramReward

HUMANEVAL: Record = {
    "task_id": "HumanEval/53",
    "prompt": 'def add(x: int, y: int):\n    """Add two numbers"""\n',
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(0, 1) == 1",
}
MBPP: Record = {
    "task_id": 11,
    "text": "Write a function to add two numbers.",
    "code": "def add(x, y):\r\n  return x + y",
    "test_list": ["assert add(2, 3) == 5", "assert add(0, 1) == 1"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
SANITIZED: Record = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 2,
    "prompt": "Write a function to add two numbers.",
    "code": "def add(x, y):\n  return x + y",
    "test_imports": ["import math"],
    "test_list": ["assert math.isclose(add(2, 3), 5)"],
}
APPS: Record = {
    "problem_id": 7,
    "question": "Read two numbers and print their sum.",
    "solutions": json.dumps(["print(sum(map(int, input().split())))"]),
    "input_output": json.dumps({"inputs": ["2 3\n"], "outputs": ["5\n"]}),
    "difficulty": "interview",
    "url": "https://example.org",
    "starter_code": "",
}
CALLED: Record = APPS | {
    "starter_code": "\ndef add(x, y):\n\t",
    "solutions": json.dumps(["def add(x, y):\n    return x + y"]),
    "input_output": json.dumps({"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}),
}
TACO: Record = APPS | {"raw_tags": "['Math']", "name": None, "time_limit": "2.0 seconds", "picture_num": None}


def packed(tests: list[Record]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LIVECODEBENCH: Record = {
    "question_title": "Sum",
    "question_content": "Add two numbers.",
    "platform": "leetcode",
    "question_id": "3",
    "starter_code": "class Solution:\n    def add(self, x: int, y: int) -> int:\n        ",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "2\n3", "output": "5", "testtype": "functional"}]),
    "private_test_cases": packed([{"input": "0\n1", "output": "1", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "add"}),
}
READ = LIVECODEBENCH | {
    "starter_code": "",
    "public_test_cases": json.dumps([{"input": "2 3\n", "output": "5\n", "testtype": "stdin"}]),
    "private_test_cases": "[]",
    "metadata": "{}",
}


def lines(*records: Record) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def arrow(records: list[Record]) -> bytes:
    """As `datasets` writes it, and as TACO is published."""
    table, target = pa.Table.from_pylist(records), pa.BufferOutputStream()
    with pa.ipc.new_stream(target, table.schema) as writer:
        writer.write_table(table)
    return target.getvalue().to_pybytes()


SETS: dict[str, tuple[str, dict[str, bytes], str, int]] = {
    "humaneval": (
        "openai/openai_humaneval",
        {"openai_humaneval/test-00000-of-00001.parquet": parquet([HUMANEVAL])},
        "test.parquet",
        1,
    ),
    "mbpp": (
        "google-research-datasets/mbpp",
        {f"full/{split}-00000-of-00001.parquet": parquet([MBPP]) for split in ("train", "test", "validation")}
        | {"sanitized/train-00000-of-00001.parquet": b"not read"},
        "train.parquet",
        1,
    ),
    "apps": ("codeparrot/apps", {"train.jsonl": lines(APPS, CALLED), "test.jsonl": lines(APPS)}, "train.parquet", 2),
    "taco": (
        "BAAI/TACO",
        {"train/data-00000-of-00002.arrow": arrow([TACO]), "train/data-00001-of-00002.arrow": arrow([TACO, TACO])}
        | {"test/data-00000-of-00001.arrow": arrow([TACO])},
        "train.parquet",
        3,
    ),
    "livecodebench": (
        "livecodebench/code_generation_lite",
        {"test.jsonl": lines(LIVECODEBENCH), "test2.jsonl": lines(READ)},
        "test.parquet",
        2,
    ),
}


@pytest.fixture(scope="module")
def reward() -> ProgramReward | None:
    """Runs programs, where this machine lets them."""
    return None if confinement_advice() else ProgramReward(ProgramOptions())


@pytest.mark.parametrize("name", SETS)
def test_a_set_of_a_hub_becomes_rows_that_a_right_answer_solves(
    name: str,
    ask: Callable[[str], None],
    tmp_path: Path,
    reward: ProgramReward | None,
) -> None:
    repository, files, file, count = SETS[name]
    with serving(repository, files) as server:
        ask(server.url)
        pull(name, tmp_path / "rows")
    rows = load_rows(str(tmp_path / "rows" / file))
    assert len(rows) == count
    for row in rows:
        assert row.data_source == repository
        assert "```python" in row.messages[-1]["content"]
        check_truth(row.data_source, row.ground_truth, row.extra_info)
        solution = row.extra_info.get("solution") or (
            "```python\nclass Solution:\n    def add(self, x, y):\n        return x + y\n\n"
            "if __name__ == '__main__':\n    print(sum(map(int, input().split())))\n```"
        )
        if reward:
            assert reward(row.data_source, solution, row.ground_truth, {})["score"] == 1.0


def test_a_prompt_has_what_its_tests_ask_for(tmp_path: Path) -> None:
    """The signature, the assertions of MBPP, or where to read and print."""

    def asked(name: str, record: Record) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        file.write_bytes(lines(record))
        pull(name, tmp_path / f"rows of {file.stem}", source=file)
        return load_rows(str(tmp_path / f"rows of {file.stem}" / f"{file.stem}.parquet"))[0].messages[0]["content"]

    assert 'def add(x: int, y: int):\n    """Add two numbers"""' in asked("humaneval", HUMANEVAL)
    assert "assert add(0, 1) == 1" in asked("mbpp", MBPP)
    assert "assert math.isclose(add(2, 3), 5)" in asked("mbpp", SANITIZED)
    assert "standard input" in asked("apps", APPS)
    assert "def add(x, y):" in asked("apps", CALLED)
    assert "`add`" in asked("apps", CALLED | {"starter_code": ""})
    assert "class Solution" in asked("livecodebench", LIVECODEBENCH)


def test_a_file_that_was_downloaded_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """No hub is asked; a changed file is read again, and the same one is not."""
    file, out = tmp_path / "HumanEval.jsonl", tmp_path / "rows"
    file.write_bytes(lines(HUMANEVAL))
    pull("humaneval", out, source=file)
    assert capsys.readouterr().out == f"{out}/HumanEval.parquet: 1 rows\n"
    pull("humaneval", out, source=file)
    assert "already" in capsys.readouterr().out
    file.write_bytes(lines(HUMANEVAL, HUMANEVAL))
    pull("humaneval", out, source=file)
    assert len(load_rows(str(out / "HumanEval.parquet"))) == 2


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("humaneval", "HumanEval.jsonl.gz", gzip.compress(lines(HUMANEVAL))),
        ("mbpp", "sanitized-mbpp.json", json.dumps([SANITIZED], indent=1).encode()),
    ],
)
def test_a_file_in_another_form(name: str, file: str, content: bytes, tmp_path: Path) -> None:
    """As the authors' repositories have them."""
    (tmp_path / file).write_bytes(content)
    pull(name, tmp_path / "rows", source=tmp_path / file)
    assert len(load_rows(str(tmp_path / "rows" / f"{file.partition('.')[0]}.parquet"))) == 1


def test_a_folder_as_the_hub_has_it(tmp_path: Path) -> None:
    for name, content in SETS["livecodebench"][1].items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "test.jsonl").write_bytes(b"not read")
    pull("livecodebench", tmp_path / "rows", source=tmp_path)
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 2


@pytest.mark.parametrize(("name", "said"), [
    ("gsm8k", r"^made.parquet: .* layout of verl already, .*nothing to pull.*data.train_files"),
    ("full_hh_rlhf", r"^made.parquet: .* pairs already, .*nothing to pull.*tether rm train"),
])  # fmt: skip
def test_a_file_that_needs_no_pull(name: str, said: str, tmp_path: Path) -> None:
    """Verl's preparation, or an earlier pull, made it."""
    published = {"question": "1 + 1?", "answer": "#### 2"}
    if name == "full_hh_rlhf":
        published = {"prompt": "Hi", "chosen": "Yes", "rejected": "No", "response": "Yes"}
    (tmp_path / "train.jsonl").write_bytes(lines(published))
    pull(name, tmp_path / "rows", source=tmp_path / "train.jsonl")
    made = tmp_path / "rows" / ("train.parquet" if name == "gsm8k" else "rm/train.parquet")
    made = made.rename(tmp_path / "made.parquet")
    with pytest.raises(ValueError, match=said):
        pull(name, tmp_path / "again", source=made)
    assert not (tmp_path / "again" / "pulled.json").exists()


def test_problems_without_tests_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """APPS and TACO have some."""
    file = tmp_path / "train.jsonl"
    unread = APPS | {"input_output": json.dumps({"inputs": ["1"], "outputs": []})}
    file.write_bytes(lines(APPS, APPS | {"input_output": ""}, unread, APPS | {"solutions": ""}))
    pull("apps", tmp_path / "rows", source=file)
    said = capsys.readouterr().out
    assert f"{tmp_path}/rows/train.parquet: 2 rows; 2 problems are left out" in said
    assert "train.jsonl row 1: it has no tests" in said
    file.write_bytes(lines(APPS | {"input_output": ""}))
    with pytest.raises(ValueError, match=r"train.jsonl: no rows; 1 problem is left out.*row 0: it has no tests"):
        pull("apps", tmp_path / "others", source=file)


def test_problems_that_a_column_filled_with_null_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}]
    tests = [{"fn_name": "add", "inputs": [[mapping]], "outputs": [2]} for mapping in given]
    file = tmp_path / "train.parquet"
    file.write_bytes(parquet([CALLED | {"input_output": each} for each in tests]))
    pull("apps", tmp_path / "rows", source=file)
    said = capsys.readouterr().out
    assert "train.parquet: 1 rows; 2 problems are left out" in said
    assert "row 0: input 0 has a mapping with null for 'b'" in said


def test_a_set_with_whole_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    """APPS has some."""
    large = "1" * 5000
    called = f'{{"fn_name": "add", "inputs": [[{large}, 0]], "outputs": [{large}]}}'
    (tmp_path / "train.jsonl").write_bytes(lines(CALLED | {"input_output": called}))
    pull("apps", tmp_path / "rows", source=tmp_path / "train.jsonl")
    assert large in str(load_rows(str(tmp_path / "rows" / "train.parquet"))[0].ground_truth)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("touched"),))


def test_no_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    (tmp_path / "test.jsonl").write_bytes(lines(LIVECODEBENCH | {"private_test_cases": evil}))
    with pytest.raises(ValueError, match=r"private_test_cases is neither JSON .*: it is not a pickle of a text"):
        pull("livecodebench", tmp_path / "rows", source=tmp_path / "test.jsonl")
    assert not (tmp_path / "touched").exists()


UNREADABLE = [
    ({"source": "gone.jsonl"}, r"--from gone.jsonl: there is no such file or folder"),
    ({"source": "rows.txt"}, r"--from rows.txt: no .parquet, .jsonl, .jsonl.gz, .json or .arrow file"),
    ({"source": "cut.jsonl.gz"}, r"^cut.jsonl.gz: is no gz file that can be read \(Compressed file ended"),
    ({"source": "no.jsonl.gz"}, r"^no.jsonl.gz: is no gz file that can be read \(Not a gzipped file"),
    ({"source": "one.json"}, r"^one.json: is \{'a': 1\}, not a list of rows"),
    ({"source": "ones.json"}, r"^ones.json row 0: is 1, not a row of named columns"),
    ({"source": "gsm8k.jsonl"}, r"^gsm8k.jsonl row 0: no text in `prompt`"),
    ({"source": "gsm8k.jsonl", "revision": "main"}, r"^--from reads local files: .*--revision"),
    ({"source": "gsm8k.jsonl", "repository": "a/b"}, r"^--from reads local files: .*--repository"),
    ({"source": "."}, r"^file:.*: no file for test at .*: looked for openai_humaneval/test.*; there are .*gsm8k.jsonl"),
]  # fmt: skip


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that may be small, as it is compressed."""
    monkeypatch.setattr("tether.integrations.hubs.pull.LONGEST_LINE", 1 << 20)
    source = tmp_path / "long.jsonl.gz"
    source.write_bytes(gzip.compress(b'{"task_id": "' + b"x" * (50 << 20) + b'"}\n'))
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"^long\.jsonl\.gz line 1: is longer than 1 MiB"):
        pull("humaneval", tmp_path / "out", source=source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 20 << 10  # KiB


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in UNREADABLE:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "rows.txt").write_text("1")
        (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines(HUMANEVAL))[:-9])
        (tmp_path / "no.jsonl.gz").write_bytes(lines(HUMANEVAL))
        (tmp_path / "one.json").write_text('{"a": 1}')
        (tmp_path / "ones.json").write_text("[1]")
        (tmp_path / "gsm8k.jsonl").write_bytes(lines({"question": "1 + 1?", "answer": "#### 2"}))
        with pytest.raises(ValueError, match=said):
            pull("humaneval", tmp_path / "out", **{**arguments, "source": Path(arguments["source"])})
        with contextlib.suppress(FileNotFoundError):
            assert not list((tmp_path / "out").iterdir())
