"""Models of ModelScope through its own client, from a local endpoint that answers as its API does."""

import errno
from pathlib import Path

import pytest

from tests.data.modelscope_server import ModelScopeServer, modelscope_server
from tether.models.language.model_path import resolve_model_path
from tether.runtime.hubs import uses_modelscope

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

    monkeypatch.setattr("tether.models.language.modelscope.snapshot_download", download)
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
