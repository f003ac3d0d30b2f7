"""`tether data pull` through huggingface_hub itself, from a local endpoint that speaks a hub's HTTP."""

import errno
import hashlib
import io
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.text.data.hub_server import COMMIT, HubServer, serving
from tests.text.data.modelscope_server import ModelScopeServer, modelscope_server
from tether.commands.data import pull
from tether.integrations.hubs import catalogue
from tether.integrations.hubs.catalogue import DATASETS, boxed, gsm8k, searched
from tether.integrations.hubs.pull import pull_dataset
from tether.runtime.user_files import raised_by_tether
from tether.text.data.pairs import load_pairs
from tether.text.data.sources import load_rows
from tether.text.rewards.rules.search import exact_match

Record = dict[str, object]


def parquet(records: list[Record]) -> bytes:
    target = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), target)
    return target.getvalue()


def sums(count: int) -> list[Record]:
    return [{"question": f"{n} + {n}?", "answer": f"They are <<{n}+{n}={2 * n}>>.\n#### {2 * n}"} for n in range(count)]


GSM8K = {
    "README.md": b"# GSM8K",
    "main/test-00000-of-00001.parquet": parquet(sums(3)),
    "main/train-00000-of-00002.parquet": parquet(sums(40)),
    "main/train-00001-of-00002.parquet": parquet(sums(2)),
    "socratic/train-00000-of-00001.parquet": b"not read",
}


@pytest.fixture
def hub(ask: Callable[[str], None]) -> Iterator[HubServer]:
    with serving("openai/gsm8k", GSM8K) as server:
        ask(server.url)
        yield server


def test_rows_are_written_in_the_layout_once(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pull("gsm8k", tmp_path / "rows")
    assert capsys.readouterr().out == f"{tmp_path}/rows/train.parquet: 42 rows\n{tmp_path}/rows/test.parquet: 3 rows\n"
    rows = load_rows(str(tmp_path / "rows" / "train.parquet"))
    assert [row.ground_truth for row in rows][38:] == ["76", "78", "0", "2"]  # of both files, in their order
    assert rows[1].data_source == "openai/gsm8k"
    assert rows[1].messages[0]["content"].startswith("1 + 1? Let's think step by step")
    assert rows[41].extra_info == {"split": "train", "index": 41, "question": "1 + 1?", "answer": sums(2)[1]["answer"]}
    note = json.loads((tmp_path / "rows" / "pulled.json").read_text())
    read = {name: hashlib.sha256(GSM8K[name]).hexdigest() for name in GSM8K if name.startswith("main/")}
    assert (note["revision"], note["read"]) == (COMMIT, read)

    asked = len(hub.asked)
    pull("gsm8k", tmp_path / "rows")
    assert len(hub.asked) == asked
    assert "already" in capsys.readouterr().out
    (tmp_path / "rows" / "test.parquet").unlink()
    pull("gsm8k", tmp_path / "rows")  # of what was downloaded
    assert [request for request in hub.asked[asked:] if "main" in request[1]] == []
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 3


@pytest.mark.slow  # the imports of another process
def test_a_pull_that_was_killed_goes_on(hub: HubServer, tmp_path: Path) -> None:
    """In a process that is killed while a file is on its way; nothing is written before all is there."""
    hub.cut = 700
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    small = "import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 100"  # of what is written at once
    code = f"{small}; from tether.commands.cli import main; main()"
    arguments = ["data", "pull", "gsm8k", "--out", str(tmp_path / "rows")]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment)
    assert hub.is_cut.wait(100)
    deadline = time.monotonic() + 60
    while not (found := [file for file in tmp_path.rglob("*.partial") if file.stat().st_size]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    begun = found[0].stat().st_size
    process.kill()
    process.wait()
    assert not (tmp_path / "rows").exists()
    hub.cut = None
    pull("gsm8k", tmp_path / "rows")
    assert ("GET", f"/lfs/main/{found[0].name.removesuffix('.partial')}", f"bytes={begun}-") in hub.asked
    assert len(load_rows(str(tmp_path / "rows" / "train.parquet"))) == 42


def test_two_pulls_at_once_download_once(hub: HubServer, tmp_path: Path) -> None:
    said: list[str] = []
    hub.cut = 700

    def rows(name: str) -> int:
        pull_dataset(DATASETS["gsm8k"], "openai/gsm8k", tmp_path / name, tmp_path / "cache", None, said.append)
        return len(load_rows(str(tmp_path / name / "train.parquet")))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rows, "first")
        assert hub.is_cut.wait(20)
        second = pool.submit(rows, "second")
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        hub.goes_on.set()
        assert (first.result(), second.result()) == (42, 42)
    file = tmp_path / "cache/datasets/openai%2Fgsm8k" / COMMIT / "main/test-00000-of-00001.parquet"
    assert said[0] == f"another process downloads {file}; waiting for it"
    fetched = [path for method, path, _ in hub.asked if method == "GET" and path.startswith("/lfs/")]
    assert sorted(fetched) == [f"/lfs/{name}" for name in sorted(GSM8K) if name.startswith("main/")]


def test_two_pulls_into_one_folder_do_not_mix(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another revision begins while the first one's files take their places."""
    out, replace, begun, said = tmp_path / "rows", Path.replace, threading.Event(), []

    def slow(self: Path, target: Path) -> Path:
        if target == out / "test.parquet" and not begun.is_set():
            begun.set()
            deadline = time.monotonic() + 10
            while not said and time.monotonic() < deadline:
                time.sleep(0.05)
        return replace(self, target)

    def pulled(revision: str | None, say: Callable[[str], None]) -> None:
        pull_dataset(DATASETS["gsm8k"], "openai/gsm8k", out, tmp_path / "cache", revision, say)

    monkeypatch.setattr(Path, "replace", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(pulled, None, lambda line: None)
        assert begun.wait(20)
        newer = {
            f"main/{split}-00000-of-0000{n}.parquet": parquet(sums(7 + n)) for n, split in ((1, "test"), (2, "train"))
        }
        hub.files, hub.commit = GSM8K | newer, "6" * 40
        pool.submit(pulled, "main", said.append).result()
        first.result()
    assert said[0] == f"another process writes to {out}; waiting for it"
    counts = [len(load_rows(str(out / name))) for name in ("train.parquet", "test.parquet")]
    note = json.loads((out / "pulled.json").read_text())
    assert (counts, note["revision"]) == ([11, 8], hub.commit)
    assert [note["written"][name]["rows"] for name in ("train.parquet", "test.parquet")] == counts


def test_what_is_wrong_is_said(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^gsm8: no such dataset; there are gsm8k, .* Did you mean gsm8k"):
        pull("gsm8")
    with pytest.raises(ValueError, match=r"(?s)^HuggingFaceH4/MATH-500: the Hugging Face hub does not give it \("):
        pull("math500", tmp_path / "rows")
    with pytest.raises(ValueError, match=r"^openai/gsm8k: no file for train .*; there are README.md, main/test"):
        pull("eurus2", tmp_path / "rows", repository="openai/gsm8k")


def test_damage_is_found_and_mended_by_another_pull(hub: HubServer, tmp_path: Path) -> None:
    """Half a file and then another's; then the second half of the right one; a later commit with a row too few."""
    hub.lies = {"main/test-00000-of-00001.parquet": bytes(len(GSM8K["main/test-00000-of-00001.parquet"]))}
    with pytest.raises(ValueError, match=r"^openai/gsm8k/main/test-.*the download has the sha256 .* pull again$"):
        pull("gsm8k", tmp_path / "rows")
    hub.lies = {}
    (folder,) = tmp_path.glob("cache/datasets/*/*/main")
    (folder / "test-00000-of-00001.parquet.partial").write_bytes(GSM8K["main/test-00000-of-00001.parquet"][:200])
    pull("gsm8k", tmp_path / "rows")
    assert ("GET", "/lfs/main/test-00000-of-00001.parquet", "bytes=200-") in hub.asked
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 3

    hub.files = GSM8K | {"main/train-00000-of-00002.parquet": parquet([*sums(2), {"question": "1?", "answer": "2"}])}
    hub.commit = "6" * 40
    with pytest.raises(ValueError, match=r"^main/train-00000-of-00002.parquet row 2: no #### number at the end of"):
        pull("gsm8k", tmp_path / "rows", revision="main")
    assert len(load_rows(str(tmp_path / "rows" / "train.parquet"))) == 42  # the earlier one


def test_files_change_together(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file of a later commit is wrong; then it is right, and the process ends between the two files."""
    rows, newer = tmp_path / "rows", {"main/train-00000-of-00002.parquet": parquet(sums(7))}
    pull("gsm8k", rows)
    before = {file.name: file.read_bytes() for file in rows.iterdir()}
    hub.files, hub.commit = (
        GSM8K | newer | {"main/test-00000-of-00001.parquet": parquet([{"question": "1?"}])},
        "6" * 40,
    )
    with pytest.raises(ValueError, match=r"^main/test-00000-of-00001.parquet row 0: no text in `answer`"):
        pull("gsm8k", rows, revision="main")
    assert {file.name: file.read_bytes() for file in rows.iterdir()} == before

    hub.files, hub.commit = GSM8K | newer | {"main/test-00000-of-00001.parquet": parquet(sums(8))}, "7" * 40
    replace = Path.replace

    def dying(self: Path, target: Path) -> Path:
        if target == rows / "test.parquet":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            pull("gsm8k", rows, revision="main")
    assert [len(load_rows(str(rows / name))) for name in ("train.parquet", "test.parquet")] == [9, 3]
    pull("gsm8k", rows, revision="main")
    assert [len(load_rows(str(rows / name))) for name in ("train.parquet", "test.parquet")] == [9, 8]
    assert sorted(file.name for file in rows.iterdir()) == ["pulled.json", "test.parquet", "train.parquet"]


def test_a_pull_that_nobody_reads_of_is_whole(hub: HubServer, tmp_path: Path) -> None:
    """As in `tether data pull gsm8k | true`."""

    def unread(line: str) -> None:
        raise BrokenPipeError(errno.EPIPE, line)

    with pytest.raises(BrokenPipeError):
        pull_dataset(DATASETS["gsm8k"], "openai/gsm8k", tmp_path / "rows", tmp_path / "cache", None, unread)
    asked = len(hub.asked)
    pull("gsm8k", tmp_path / "rows")
    assert len(hub.asked) == asked
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 3


def test_a_folder_is_of_one_dataset(hub: HubServer, tmp_path: Path) -> None:
    pull("gsm8k", tmp_path / "rows")
    says = r"rows: has test.parquet, train.parquet of openai/gsm8k, and a folder is of one dataset. give another folder"
    with pytest.raises(ValueError, match=says):
        pull("dapo_math_17k", tmp_path / "rows")
    note = tmp_path / "rows" / "pulled.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"written": {}}))
    with pytest.raises(ValueError, match=r"train.parquet: is there, and is not of tether data pull"):
        pull("gsm8k", tmp_path / "rows")


@pytest.mark.parametrize("made", ["a file", "a folder", "changed"])
def test_files_of_others_are_left_alone(hub: HubServer, tmp_path: Path, made: str) -> None:
    file = tmp_path / "rows" / "test.parquet"
    if made == "changed":
        pull("gsm8k", tmp_path / "rows")
        file.write_bytes(b"mine")
    else:
        file.parent.mkdir()
        file.mkdir() if made == "a folder" else file.write_bytes(b"mine")
    asked = len(hub.asked)
    what = "was changed since it was pulled" if made == "changed" else "is not of tether data pull"
    with pytest.raises(ValueError, match=rf"^{file}: is there, and {what}. move it away, or give another folder with"):
        pull("gsm8k", tmp_path / "rows")
    assert len(hub.asked) == asked
    assert made == "a folder" or file.read_bytes() == b"mine"


@pytest.mark.parametrize("note", ["", "[1]", '{"a": 1}', '{"written": [1]}', "5", "\xff"])
def test_a_note_that_is_none_is_named(hub: HubServer, tmp_path: Path, note: str) -> None:
    (tmp_path / "pulled.json").write_bytes(note.encode("latin-1"))
    with pytest.raises(ValueError, match=r"pulled.json: is no note of tether data pull"):
        pull("gsm8k", tmp_path)


@pytest.mark.parametrize("left", [1, 100_000])
def test_a_download_that_is_longer_than_its_file_begins_anew(hub: HubServer, tmp_path: Path, left: int) -> None:
    pull("gsm8k", tmp_path / "rows")
    (folder,) = tmp_path.glob("cache/datasets/*/*/main")
    whole = folder / "test-00000-of-00001.parquet"
    content = whole.read_bytes()
    whole.unlink()
    whole.with_name(f"{whole.name}.partial").write_bytes(content + b"x" * left if left > 1 else content)
    pull("gsm8k", tmp_path / "again")
    assert len(load_rows(str(tmp_path / "again" / "test.parquet"))) == 3


def test_folders_that_are_none_are_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x")):
        with pytest.raises(ValueError, match=rf"^{out}.*: cannot be (read|written)"):
            pull("gsm8k", out)
    assert hub.asked == []
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ValueError, match=r"cannot be written \(Not a directory\)\. make room, or name another .*TETHER_CACHE"
    ):
        pull("gsm8k", tmp_path / "rows")


@pytest.mark.parametrize("limit", [300, 1500])
def test_a_full_disk_is_named(hub: HubServer, tmp_path: Path, limit: int) -> None:
    """While a file is downloaded, and while rows are written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit > 1000:
        pull("gsm8k", tmp_path / "other")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(ValueError, match=r"cannot be written \(.*[Ff]ile too large.*\)\. make room, or"):
            pull("gsm8k", tmp_path / "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    pull("gsm8k", tmp_path / "rows")
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 3


def test_a_revision_that_is_not_there_is_named(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^openai/gsm8k at gone: .*it has no such revision\)\. Correct the commit, branch"
    ):
        pull("gsm8k", tmp_path / "rows", revision="gone")
    with pytest.raises(
        ValueError, match=r"^owner/none: .*there is none of that name, or it is private\)\. Correct the name"
    ):
        pull("gsm8k", tmp_path / "rows", repository="owner/none")
    with pytest.raises(ValueError, match=r"^a/b/c: .*\. Correct the name, or"):
        pull("gsm8k", tmp_path / "rows", repository="a/b/c")


def row_of_eurus(**extra: object) -> Record:
    prompt = [{"role": "user", "content": "1 + 1?"}]
    ruled = {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0}}
    return {"data_source": "numina", "prompt": prompt, "ability": "math", **ruled, **extra}


def pulled_eurus(ask: Callable[[str], None], out: Path, *shards: bytes, ending: str = ".parquet") -> list[Record]:
    files = {f"train-{number}{ending}": shard for number, shard in enumerate(shards)}
    with serving("PRIME-RL/Eurus-2-RL-Data", files | {"validation.parquet": shards[0]}) as server:
        ask(server.url)
        pull("eurus2", out)
    rows: list[Record] = pq.read_table(out / "train.parquet").to_pylist()
    return rows


def test_columns_of_any_file_stay(ask: Callable[[str], None], tmp_path: Path) -> None:
    second = row_of_eurus(level=3, extra_info={"split": "train", "index": 1, "source": "b"})
    first, last = pulled_eurus(ask, tmp_path / "rows", parquet([row_of_eurus()]), parquet([second]))
    assert (first["level"], last["level"]) == (None, 3)
    assert (first["extra_info"]["source"], last["extra_info"]["source"]) == (None, "b")


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        (parquet([row_of_eurus(level="hard")]), r"^train-0.parquet, train-1.parquet: differ in the type .*level"),
        (b"no parquet", r"^train-1.parquet: is no parquet file that can be read"),
        (parquet([row_of_eurus(prompt=None)]), r"^train-1.parquet row 0: "),
    ],
)
def test_a_file_that_does_not_fit_is_named(ask: Callable[[str], None], tmp_path: Path, shard: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pulled_eurus(ask, tmp_path / "rows", parquet([row_of_eurus(level=1)]), shard)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: is no JSON"),
        (b'{"question": "\xff"}', "line 2: is no JSON"),
        (b"[1]", r"line 2: is \[1\], not a row of named columns"),
        (b'{"question": "1?"}', "row 1: no text in `answer`"),
        (b'{"question": "1?", "answer": "\\ud800 #### 1"}', "row 1: does not fit into columns .*surrogates"),
    ],
)
def test_a_line_that_is_no_row_is_named(ask: Callable[[str], None], tmp_path: Path, line: bytes, said: str) -> None:
    good = json.dumps(sums(1)[0]).encode()
    with serving("openai/gsm8k", {"train.jsonl": good + b"\n" + line, "test.jsonl": good}) as server:
        ask(server.url)
        with pytest.raises(ValueError, match=rf"^train.jsonl {said}") as error:
            pull("gsm8k", tmp_path / "rows")
    assert raised_by_tether(error.value)


def test_a_hub_that_is_not_there(ask: Callable[[str], None], tmp_path: Path) -> None:
    ask("http://127.0.0.1:9")
    says = (
        r"^openai/gsm8k: the Hugging Face hub does not give it \(http://127.0.0.1:9 cannot be reached: .*\)\. "
        r"Name another hub in HF_ENDPOINT\. The same command then goes on where it stopped$"
    )
    with pytest.raises(ValueError, match=says):
        pull("gsm8k", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_pairs_for_a_reward_model_and_prompts_for_the_run_with_it(ask: Callable[[str], None], tmp_path: Path) -> None:
    dialogues = [
        {"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "response": " yes", "chosen": " yes", "rejected": " no"}
        for n in range(3)
    ]
    files = {f"data/{split}-00000-of-00001-8349d0765e6718df.parquet": parquet(dialogues) for split in ("train", "test")}
    with serving("Dahoas/full-hh-rlhf", files) as server:
        ask(server.url)
        pull("full_hh_rlhf", tmp_path / "rows")
    (row, *_) = load_rows(str(tmp_path / "rows" / "rl" / "train.parquet"))
    pairs = load_pairs([str(tmp_path / "rows" / "rm" / "train.parquet")])
    assert [message["content"] for message in row.messages] == [dialogues[0]["prompt"]]
    assert pairs[0].chosen == [*row.messages, {"role": "assistant", "content": " yes"}]
    assert pairs[0].rejected[-1]["content"] == " no"


def test_questions_of_search_r1_keep_all_their_answers(ask: Callable[[str], None], tmp_path: Path) -> None:
    """The layout of verl's preparation: source, system message, and what the tool `search` is told of the row."""
    questions = [
        {
            "id": f"train_{n}",
            "question": f"who has {n}?",
            "golden_answers": ["Ada", "Ada L."],
            "data_source": source,
            "prompt": [{"role": "user", "content": "another instruction"}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": ["Ada", "Ada L."]}, "style": "rule"},
            "extra_info": {"index": n, "split": "train"},
        }
        for n, source in enumerate(("nq", "hotpotqa"))
    ]
    files = {f"{split}.parquet": parquet(questions) for split in ("train", "test")}
    with serving("PeterJinGo/nq_hotpotqa_train", files) as server:
        ask(server.url)
        pull("search_r1", tmp_path / "rows")
    rows = load_rows(str(tmp_path / "rows" / "test.parquet"))
    assert [row.data_source for row in rows] == ["searchR1_nq", "searchR1_hotpotqa"]
    system, user = rows[1].messages
    assert system == {"role": "system", "content": catalogue.SEARCHES}
    assert user["content"] == f"{catalogue.SEARCH} Question: who has 1?"
    told = {"ground_truth": {"target": ["Ada", "Ada L."]}, "question": "who has 1?", "data_source": "searchR1_hotpotqa"}
    assert rows[1].extra_info["tools_kwargs"] == {"search": {"create_kwargs": told}}
    assert (rows[1].extra_info["split"], rows[1].extra_info["index"]) == ("test", 1)
    assert exact_match("searchR1_nq", "<answer>ada l</answer>", rows[0].ground_truth, {}) == 1.0


@pytest.mark.parametrize("answers", [[], None, ["Ada", " "], "Ada"])
def test_a_question_without_an_answer_is_named(answers: object) -> None:
    record = {"question": "who?", "data_source": "nq", "golden_answers": answers}
    with pytest.raises(ValueError, match=r"^no list of answers in `golden_answers`, but"):
        searched(record, "train", 0)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_rows_of_gsm8k_are_those_of_verl(split: str, test_data: Path) -> None:
    """All of them, made of the published rows here, and by verl's own preparation there."""
    with (test_data / "gsm8k" / f"{split}.jsonl").open() as lines:
        made = [gsm8k(json.loads(line), split, number) for number, line in enumerate(lines)]
    assert made == pq.read_table(test_data / "gsm8k" / f"{split}.parquet").to_pylist()


def test_a_problem_of_math() -> None:
    r"""As in the row that verl makes of it, but for level and type, which nothing reads; MATH-500 names its answer."""
    record = {"problem": "1 + 1?", "level": "Level 1", "solution": r"It is $\boxed{\frac42}$, so $\boxed 2$"}
    row = boxed("a/b")(record, "test", 7)
    assert (
        row["prompt"][0]["content"] == r"1 + 1? Let's think step by step and output the final answer within \boxed{}."
    )
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("a/b", r"\frac42")
    assert boxed("a/b")(record | {"answer": "3"}, "test", 7)["reward_model"]["ground_truth"] == "3"
    with pytest.raises(ValueError, match=r"^no \\boxed\{\.\.\.\} in `solution`$"):
        boxed("a/b")(record | {"solution": "2"}, "test", 7)
    with pytest.raises(ValueError, match=r"^no text in `problem`, but None$"):
        boxed("a/b")({"solution": "2"}, "test", 7)


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelScopeServer:
    pytest.importorskip("modelscope_hub", reason="needs the extra modelscope")
    server = modelscope_server()
    server.serve("datasets", "AI-ModelScope/gsm8k", GSM8K)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VERL_USE_MODELSCOPE", raising=False)
    return server


@pytest.mark.parametrize("by_name", [True, False])
def test_rows_of_modelscope_are_those_of_the_other_hub(
    by_name: bool,
    modelscope: ModelScopeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if by_name:
        repository = "modelscope:AI-ModelScope/gsm8k"
    else:
        monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
        repository = None
    pull("gsm8k", tmp_path / "rows", repository=repository)
    rows = load_rows(str(tmp_path / "rows" / "train.parquet"))
    assert [row.ground_truth for row in rows][38:] == ["76", "78", "0", "2"]
    note = json.loads((tmp_path / "rows" / "pulled.json").read_text())
    assert note["repository"] == "modelscope:AI-ModelScope/gsm8k"
    assert note["revision"].startswith("master@")
    read = {name: hashlib.sha256(GSM8K[name]).hexdigest() for name in GSM8K if name.startswith("main/")}
    assert note["read"] == read
    asked = len(modelscope.asked)
    pull("gsm8k", tmp_path / "rows", repository=repository)
    assert "already" in capsys.readouterr().out
    (tmp_path / "rows" / "test.parquet").unlink()
    pull("gsm8k", tmp_path / "rows", repository=repository)  # of what was downloaded
    assert len(modelscope.asked) == asked


def test_a_download_from_modelscope_that_was_cut_goes_on(modelscope: ModelScopeServer, tmp_path: Path) -> None:
    modelscope.cut = 700
    pull("gsm8k", tmp_path / "rows", repository="modelscope:AI-ModelScope/gsm8k")
    cut = modelscope.asked[0][0]
    assert (cut, "bytes=700-") in modelscope.asked
    assert len(load_rows(str(tmp_path / "rows" / "train.parquet"))) == 42
    assert not list((tmp_path / "cache").rglob("*.modelscope"))


def test_what_modelscope_changed_is_fetched_anew(modelscope: ModelScopeServer, tmp_path: Path) -> None:
    """It names no commits, so that another listing is another revision."""
    pull("gsm8k", tmp_path / "rows", repository="modelscope:AI-ModelScope/gsm8k")
    modelscope.files = GSM8K | {"main/test-00000-of-00001.parquet": parquet(sums(5))}
    pull("gsm8k", tmp_path / "rows", repository="modelscope:AI-ModelScope/gsm8k", revision="master")
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 5


def test_what_modelscope_does_not_give_is_said(modelscope: ModelScopeServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^modelscope:owner/none: ModelScope does not give it \(.*--repository names"):
        pull("gsm8k", tmp_path / "rows", repository="modelscope:owner/none")
    file = "main/test-00000-of-00001.parquet"
    modelscope.lies = {file: bytes(len(GSM8K[file]))}
    with pytest.raises(ValueError, match=r"^modelscope:AI-.*the download has the sha256 .* pull again$"):
        pull("gsm8k", tmp_path / "rows", repository="modelscope:AI-ModelScope/gsm8k")
    assert not (tmp_path / "rows").exists()
    modelscope.lies = {}
    pull("gsm8k", tmp_path / "rows", repository="modelscope:AI-ModelScope/gsm8k")
    assert len(load_rows(str(tmp_path / "rows" / "test.parquet"))) == 3
