"""Every allowed form of a model path, and one clear error for everything else, without importing torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tether.text.models.model_path import check_is_text, resolve_model_path, weight_files


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").touch()
    return path


def test_a_known_name_is_the_cached_directory_and_is_found_without_torch(tmp_path):
    cached = model_directory(tmp_path / "smollm2-135m")
    code = f"""
import sys
from pathlib import Path
from tether.text.models.model_path import resolve_model_path
print(resolve_model_path("smollm2-135m", Path({str(tmp_path)!r})))
sys.exit(bool({{"torch", "transformers"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, str(cached)), ended.stderr


def test_local_paths(tmp_path):
    directory = model_directory(tmp_path / "model")
    assert resolve_model_path(directory, tmp_path) == directory
    assert resolve_model_path(str(directory), tmp_path) == directory
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    assert resolve_model_path(str(gguf), tmp_path, fetch=False) == gguf


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = model_directory(tmp_path / "model")
    assert resolve_model_path("~/model", tmp_path) == directory


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2"])
def test_a_hub_id_in_the_cache_stays_as_it_is(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    for file, content in {"refs/main": "abc", "snapshots/abc/config.json": "{}"}.items():
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(content)
    assert resolve_model_path(name, tmp_path) == name


@pytest.mark.parametrize(("offline", "why"), [(True, "HF_HUB_OFFLINE is set"), (False, "cannot be reached: .*")])
def test_a_hub_id_without_network_is_refused_in_one_sentence(offline, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError, match=rf"the Hugging Face hub does not give it \(.*{why}\)\. [A-Z].*`tether model list`\.$"
    ) as error:
        resolve_model_path("nobody/nothing", tmp_path)
    assert str(error.value).startswith("nobody/nothing: no directory here and not in the hub's cache")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "smollm2-135", "smollm-135m"])
def test_a_misspelt_known_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{name}: no such file or directory, .*mean smollm2-135m"):
        resolve_model_path(name, tmp_path)


def test_a_path_that_does_not_exist_names_the_nearest(tmp_path, monkeypatch):
    near = model_directory(tmp_path / "models" / "qwen-0.5b")
    missing = tmp_path / "models" / "qwen-0.5"
    with pytest.raises(ValueError, match=f"{missing}: no such file or directory. .*Did you mean {near}?"):
        resolve_model_path(str(missing), tmp_path)
    monkeypatch.chdir(tmp_path)  # models/... is no hub id where a folder models is
    with pytest.raises(ValueError, match=r"models/qwen-0.5: no such file"):
        resolve_model_path("models/qwen-0.5", tmp_path)
    with pytest.raises(ValueError, match="near: no such file"):
        resolve_model_path("./near", tmp_path)
    with pytest.raises(ValueError, match="Its parent /no/such does not exist either"):
        resolve_model_path("/no/such/model", tmp_path)
    with pytest.raises(ValueError, match=r"qwen.gguf: no such file"):
        resolve_model_path("qwen.gguf", tmp_path)


def test_directories_that_are_no_model(tmp_path):
    actor = model_directory(tmp_path / "global_step_5" / "actor")
    with pytest.raises(ValueError, match=f"global_step_5: is a directory without a config.json.*Did you mean {actor}"):
        resolve_model_path(actor.parent, tmp_path)
    (actor / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{actor}: has a config.json but no weights"):
        resolve_model_path(actor, tmp_path)
    (actor / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: is not JSON \("):
        resolve_model_path(actor, tmp_path)
    pictures = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, "text_config": {}}
    (actor / "config.json").write_text(json.dumps(pictures))
    for weights in (True, False):
        with pytest.raises(ValueError, match=r"actor: is a vision-language model \(qwen2_5_vl.*Name a model of text"):
            resolve_model_path(actor, tmp_path, weights=weights)
    with pytest.raises(ValueError, match="missing: is a model of sound and text"):
        check_is_text("missing", {"model_type": "qwen2_audio", "audio_config": {"d": 1}})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").touch()
    with pytest.raises(
        ValueError, match="It has a LoRA adapter: name its base model, and the adapter in lora_adapter_path"
    ):
        resolve_model_path(adapter, tmp_path)
    with pytest.raises(ValueError, match=r"adapter_config.json: is a file but not a .gguf one"):
        resolve_model_path(adapter / "adapter_config.json", tmp_path)


@pytest.mark.parametrize(("index", "message"), [("{", "is not JSON"), ("{}", "has no weight_map")])
def test_an_index_of_weights_that_cannot_be_read_is_named(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=f"model.safetensors.index.json: {message}.*Copy the model's files again"):
        weight_files(tmp_path)
