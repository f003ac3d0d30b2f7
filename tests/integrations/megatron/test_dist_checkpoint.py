"""Checkpoints that Megatron's dist_checkpointing wrote give each rank the bits that Hugging Face directories give."""

import importlib
import json
import pickle
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.installed import needs_megatron
from tests.ranks import on_ranks
from tests.tiny import TINY_CONFIGS, save_tiny, save_tiny_reward_model, tiny_model
from tether.integrations.megatron import MegatronLayout
from tether.text.models.empty import empty_model
from tether.text.models.fused_experts import Unfused

pytestmark = needs_megatron
PADDING = 124  # rows, up to a multiple of 128
CASES = {
    "qwen2": ("qwen2", {}),
    "padded": ("qwen2", {"padding": PADDING}),
    "qwen2_moe": ("qwen2_moe", {}),
    "stacked": ("qwen2_moe", {"stacked": True, "fused_names": True}),
    "deepseek_v3": ("deepseek_v3", {"whole": False, "fused_names": True}),
    "critic": ("critic", {"whole": False, "role": "critic"}),
}


def stored_by_megatron() -> ModuleType:
    """What Megatron does in these tests; the import takes a second, which only a process that runs them spends."""
    return importlib.import_module("tests.integrations.megatron.stored")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each case the Hugging Face directory and Megatron's; the first ones were written by two ranks, too."""
    folder, write_by_megatron = tmp_path_factory.mktemp("stored"), stored_by_megatron().write_by_megatron
    models = {name: save_tiny(folder / name, name) for name in ("qwen2", "qwen2_moe", "deepseek_v3")}
    models["critic"] = save_tiny_reward_model(folder / "critic", "llama")
    found = {name: (models[model], folder / f"of_megatron/{name}") for name, (model, _) in CASES.items()}
    on_ranks(folder / "one", 1, write_by_megatron, MegatronLayout(), [(*found[name], CASES[name][1]) for name in CASES])
    split = {name: (models[name], folder / f"of_two/{name}") for name in ("qwen2", "qwen2_moe")}
    layout = MegatronLayout(tensor=2)  # norms of Megatron itself know no sequence parallelism
    on_ranks(folder / "two", 2, write_by_megatron, layout, [(*split[name], {}) for name in split])
    # A critic out of the checkpoint of a policy has a head of zeros, as out of its Hugging Face directory.
    return found | {f"{name}, by TP 2": split[name] for name in split} | {"critic of a policy": found["qwen2"]}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, MegatronLayout()),
        (2, MegatronLayout(tensor=2, sequence_parallel=True)),
        (2, MegatronLayout(expert=2)),
        (2, MegatronLayout(pipeline=2)),
    ],
    ids=["TP 1", "TP 2", "EP 2", "PP 2"],
)
def test_weights(ranks: int, layout: MegatronLayout, folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    cases = {name: (*paths, "critic" if "critic" in name else "policy") for name, paths in folders.items()}
    cases = {name: case for name, case in cases.items() if layout.expert == 1 or case[0].name == "qwen2_moe"}
    found = on_ranks(tmp_path, ranks, stored_by_megatron().unlike, layout, cases)
    assert {name: tensors for name, tensors in found.items() if tensors} == {}
    assert found.keys() == cases.keys()
    assert len(cases) >= 3


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def stored() -> dict[str, Tensor]:
    return stored_by_megatron().tensors_of(tiny_model("llama"))


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return stored_by_megatron().write(folder, tensors)


def check(folder: Path, prefix: str = "", **overrides: object) -> None:
    """Compare a folder with a tiny Llama, of which a few sizes may be others."""
    from tether.integrations.megatron.dist_checkpoint import DistCheckpoint

    model = empty_model("", TINY_CONFIGS["llama"](**overrides))
    DistCheckpoint(folder, model.config.vocab_size, prefix).check(model.config, "policy", Unfused(model.state_dict()))


def refusal(folder: Path, **overrides: object) -> str:
    with pytest.raises(ValueError) as caught:
        check(folder, **overrides)
    return str(caught.value)


def test_a_checkpoint_of_the_model_is_accepted(stored: dict[str, Tensor], tmp_path: Path) -> None:
    """Also under a prefix, beside other things, and in the folder of an iteration."""
    check(write(tmp_path / "plain", stored))
    extra = {
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.zeros(2),
        "mtp.layers": torch.ones(1),
    }
    check(write(tmp_path / "more", {f"policy.{name}": x for name, x in stored.items()} | extra), "policy.")
    write(tmp_path / "run/iter_0000012", stored)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("12\n")
    check(tmp_path / "run")


def test_a_checkpoint_of_another_model_is_refused(stored: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(tmp_path / "llama", stored)
    message = refusal(folder, num_hidden_layers=3)
    assert "decoder.layers.self_attention.linear_qkv.weight [2, 64, 32], and not [3, 64, 32] and 3 more" in message
    assert "[2, 64, 32], and not [1, 64, 32]" in refusal(folder, num_hidden_layers=1)
    assert "embedding.word_embeddings.weight [260, 32], and not [260, 64]" in refusal(folder, hidden_size=64)
    assert "embedding.word_embeddings.weight [260, 32], and not [262, 32]" in refusal(folder, vocab_size=262)
    assert "linear_fc1.weight [2, 96, 32], and not [2, 80, 32]" in refusal(folder, intermediate_size=40)
    assert "it also has output_layer.weight" in refusal(folder, tie_word_embeddings=True)
    far = 260 + 128 * 64
    padded = stored | {"embedding.word_embeddings.weight": torch.zeros(far, 32)}
    assert f"embedding.word_embeddings.weight [{far}, 32], and not [260, 32]" in refusal(
        write(tmp_path / "far", padded)
    )


def test_tensors_that_are_missing_or_too_many_are_named(stored: dict[str, Tensor], tmp_path: Path) -> None:
    apart = dict(stored)
    for name in [name for name in stored if name.startswith("decoder.layers.")]:
        for layer, tensor in enumerate(apart.pop(name)):
            apart[name.replace("layers.", f"layers.{layer}.")] = tensor
    check(write(tmp_path / "apart", apart))
    lacks = {name: tensor for name, tensor in apart.items() if "layers.1." not in name}
    message = refusal(write(tmp_path / "lacks", lacks))
    assert "it lacks decoder.layers.1." in message
    assert "and 3 more" in message
    third = {name.replace("layers.1.", "layers.2."): x for name, x in apart.items() if "layers.1." in name}
    assert "it also has decoder.layers.2.input_layernorm.weight" in refusal(write(tmp_path / "third", apart | third))
    of_qwen2 = stored | {"decoder.layers.self_attention.linear_qkv.bias": torch.zeros(2, 64)}
    assert "also has decoder.layers.self_attention.linear_qkv.bias" in refusal(write(tmp_path / "bias", of_qwen2))


def test_a_folder_that_is_none_is_refused(stored: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(tmp_path / "whole", stored)
    assert "no such directory" in refusal(tmp_path / "nowhere")
    (tmp_path / "older/mp_rank_00").mkdir(parents=True)
    assert "Megatron's older format (mp_rank_*)" in refusal(tmp_path / "older")
    (tmp_path / "empty").mkdir()
    assert "has no metadata.json" in refusal(tmp_path / "empty")
    zarr = shutil.copytree(folder, tmp_path / "zarr")
    (zarr / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert "is in the format zarr, and only torch_dist is supported" in refusal(zarr)
    for name, what in (("metadata.json", "[]"), (".metadata", "nothing")):
        broken = shutil.copytree(folder, tmp_path / f"broken{name}")
        (broken / name).write_text(what)
        assert f"broken{name}: its metadata could not be read" in refusal(broken)
    short = shutil.copytree(folder, tmp_path / "short")
    (file,) = short.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-9])
    assert f"{file}: is truncated" in refusal(short)
    file.unlink()
    assert f"{file}: is missing" in refusal(short)


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('code of a file was run')",))


def test_no_code_of_a_file_is_run(stored: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", stored)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _Runs()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    check(folder)
    with pytest.raises(SystemExit, match="was run"):
        pickle.loads((folder / ".metadata").read_bytes())
