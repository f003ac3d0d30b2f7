"""Models of ModelScope through its own client, from a local endpoint that answers as its API does."""

import errno
import logging
import os
from pathlib import Path

import pytest

from tests.text.data.modelscope_server import ModelScopeServer, modelscope_server
from tether.config import load_config
from tether.runtime.hubs import uses_modelscope
from tether.text.input_checks import missing_inputs
from tether.text.models.model_path import resolve_model_path

pytest.importorskip("modelscope", reason="needs the extra modelscope")

FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(range(256)) * 40}


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelScopeServer:
    server = modelscope_server()
    server.serve("models", "owner/tiny", FILES)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VERL_USE_MODELSCOPE", raising=False)
    return server


@pytest.mark.parametrize("name", ["modelscope:owner/tiny", "owner/tiny"])
def test_a_model_is_downloaded_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ":" not in name:
        monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert uses_modelscope() == (":" not in name)
    path = Path(resolve_model_path(name, tmp_path / "cache"))
    assert path.is_relative_to(tmp_path / "cache" / "modelscope")
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


def test_looking_for_a_model_downloads_nothing(tmp_path: Path, server: ModelScopeServer) -> None:
    cache = tmp_path / "cache"
    assert resolve_model_path("modelscope:owner/tiny", cache, fetch=False) == "owner/tiny"
    assert not list(cache.rglob("*.safetensors"))
    with pytest.raises(ValueError, match=r"^owner/none: ModelScope does not give it \("):
        resolve_model_path("modelscope:owner/none", cache, fetch=False)
    resolve_model_path("modelscope:owner/tiny", cache)
    server.lists = False  # it is in the cache, and not asked for again
    assert resolve_model_path("modelscope:owner/tiny", cache, fetch=False) == "owner/tiny"


def test_a_model_that_is_not_there_or_damaged(tmp_path: Path, server: ModelScopeServer) -> None:
    with pytest.raises(ValueError, match=r"^owner/none: ModelScope does not give it \("):
        resolve_model_path("modelscope:owner/none", tmp_path / "cache")
    server.lies = {"model.safetensors": bytes(len(FILES["model.safetensors"]))}
    with pytest.raises(ValueError, match=r"^owner/tiny: ModelScope does not give it \("):
        resolve_model_path("modelscope:owner/tiny", tmp_path / "damaged")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tether.text.models.modelscope.snapshot_download", download)
    says = rf"^{tmp_path}: cannot be written \(No space left on device\)\. make room, .*TETHER_CACHE$"
    with pytest.raises(ValueError, match=says):
        resolve_model_path("modelscope:owner/tiny", tmp_path)


def test_a_folder_wins_and_the_hub_of_hugging_face_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in FILES.items():
        (tmp_path / "owner" / "tiny").mkdir(parents=True, exist_ok=True)
        (tmp_path / "owner" / "tiny" / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert resolve_model_path("owner/tiny", tmp_path / "cache") == Path("owner/tiny")
    monkeypatch.delenv("VERL_USE_MODELSCOPE")
    with pytest.raises(ValueError, match="the Hugging Face hub"):
        resolve_model_path("someone/tiny", tmp_path / "cache")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets no more of ModelScope through, and lists the questions; what this process has learned is forgotten."""
    from modelscope_hub.errors import NetworkError

    from tether.text.models import modelscope

    asked = []

    def refuse(*names: object, **_: object) -> str:
        asked.append(str(names[-1]))
        raise NetworkError("Connection refused")

    monkeypatch.setattr(modelscope, "snapshot_download", refuse)
    monkeypatch.setattr(modelscope.HubApi, "get_model_files", refuse)
    modelscope.modelscope_directory.cache_clear()
    modelscope.check_on_modelscope.cache_clear()
    return asked


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    return Path(resolve_model_path("modelscope:owner/tiny", tmp_path / "cache"))


def test_a_model_in_the_cache_serves_where_the_hub_cannot_be_reached(
    tmp_path: Path, downloaded: Path, unreachable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_model_path("modelscope:owner/tiny", tmp_path / "cache", fetch=False) == "owner/tiny"
    assert not unreachable
    with caplog.at_level(logging.WARNING):
        assert resolve_model_path("modelscope:owner/tiny", tmp_path / "cache") == downloaded
    assert f"owner/tiny: ModelScope cannot be reached (Connection refused); {downloaded} is used" in caplog.text


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_part_of_a_model_does_not_serve(
    damage: str, tmp_path: Path, downloaded: Path, unreachable: list[str]
) -> None:
    """As a download leaves it that was stopped midway, or that was replacing it."""
    if damage == "gone":
        (downloaded / "model.safetensors").unlink()
    else:
        os.utime(downloaded / "model.safetensors", (1, 1))
    for fetch in (False, True):
        with pytest.raises(ValueError, match=r"^owner/tiny: ModelScope does not give it \(.*Connection refused\)\. "):
            resolve_model_path("modelscope:owner/tiny", tmp_path / "cache", fetch=fetch)


def test_a_model_under_several_keys_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreachable: list[str]
) -> None:
    """The client takes seven seconds to give up."""
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    rows = "data.train_files=rows.jsonl"
    config = load_config(None, ["actor_rollout_ref.model.path=modelscope:owner/tiny", rows]).config
    found = missing_inputs(config, ("actor_rollout_ref.model.", "critic.model."))
    assert [problem.path for problem in found] == ["actor_rollout_ref.model.path"]
    assert unreachable == ["owner/tiny"]


def test_a_repository_without_a_model(tmp_path: Path, server: ModelScopeServer) -> None:
    server.serve("models", "owner/tiny", {"README.md": b"none"})
    with pytest.raises(ValueError, match=r"^owner/tiny: has no config\.json on ModelScope, so it is no model"):
        resolve_model_path("modelscope:owner/tiny", tmp_path, fetch=False)
    with pytest.raises(ValueError, match=r"without a config\.json, so not a model"):
        resolve_model_path("modelscope:owner/tiny", tmp_path)
    server.serve("models", "owner/tiny", {"config.json": FILES["config.json"]})
    with pytest.raises(ValueError, match="no weights"):
        resolve_model_path("modelscope:owner/tiny", tmp_path / "other")
    assert resolve_model_path("modelscope:owner/tiny", tmp_path / "other", weights=False)


@pytest.mark.parametrize("value", ["maybe", "ture"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(value: str, tmp_path: Path) -> None:
    for on in ("True", "1", "yes"):
        assert uses_modelscope({"VERL_USE_MODELSCOPE": on})
    for off in ("", "False", "0", "no"):
        assert not uses_modelscope({"VERL_USE_MODELSCOPE": off})
    with pytest.raises(
        ValueError, match=rf"^VERL_USE_MODELSCOPE={value}: is neither true nor false\. Set it to True or"
    ):
        uses_modelscope({"VERL_USE_MODELSCOPE": value})
