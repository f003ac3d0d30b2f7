"""`datasets` takes a folder for a hub repository, so all but the network is tested for real."""

from pathlib import Path

import huggingface_hub
import pytest

from tests.text.data.conftest import record, write_jsonl
from tether.text.data.hub import read_hub
from tether.text.data.rows import Rows
from tether.text.data.sources import load_rows


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def repository(*splits: str) -> str:
    folder = Path("owner/name")
    folder.mkdir(parents=True)
    for split in splits:
        write_jsonl(folder / f"{split}.jsonl", [record(f"{split} 0"), record(f"{split} 1")])
    return "owner/name"


def test_a_split_is_read_lazily_in_the_row_layout() -> None:
    import datasets

    name = repository("train", "test")
    rows = Rows([read_hub(f"{name}?split=test", name, {"split": "test"})])
    assert [row.messages[0]["content"] for row in rows] == ["test 0", "test 1"]
    assert rows[1].place == "owner/name?split=test row 1"
    assert isinstance(rows.sources[0].records, datasets.Dataset)


def test_the_only_split_needs_no_name() -> None:
    assert len(read_hub("owner/name", repository("train"), {}).records) == 2


def test_which_split_must_be_said_where_there_are_several() -> None:
    name = repository("train", "test")
    for options in ({}, {"split": "dev"}):
        with pytest.raises(ValueError, match=r"choose a split, owner/name\?split=\.\.\.; it has train, test"):
            read_hub(name, name, options)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown option `spilt`.*Did you mean split"):
        load_rows("owner/name?spilt=test")


def test_a_dataset_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"^nobody/nothing: neither a file here nor a dataset that the hub gave: "):
        load_rows("nobody/nothing")


def test_a_dataset_of_modelscope_becomes_a_file_first() -> None:
    with pytest.raises(ValueError, match=r"tether data pull NAME --repository modelscope:owner/name, with a NAME"):
        load_rows("modelscope:owner/name?split=train")
