"""Megatron's models give what those of transformers give, on any layout: outputs, gradients and saved weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.models.megatron.ranks import Case, compare, on_ranks, redirected, refusals, shards
from tests.tiny import save_tiny, save_tiny_reward_model
from tether.models.megatron import Layout

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
LAYERS = {"num_hidden_layers": 4}
LAYOUTS = {
    "tensor": (2, Layout(tensor=2)),
    "fewer key heads than ranks": (4, Layout(tensor=4)),
    "pipeline": (2, Layout(pipeline=2)),
    "data": (2, Layout()),
    "tensor, pipeline": (4, Layout(tensor=2, pipeline=2)),
    "tensor, pipeline, sequence": (4, Layout(tensor=2, pipeline=2, sequence_parallel=True)),
    "uneven stages": (2, Layout(pipeline=2, first_stage_layers=3)),
    "virtual stages": (2, Layout(pipeline=2, virtual_pipeline=2)),
}


def check_cases(folder: Path, ranks: int, layout: Layout, cases: list[Case]) -> None:
    for case, differences in on_ranks(folder, ranks, compare, layout, cases).items():
        for name, difference in differences.items():
            assert difference < TOLERANCE[case.dtype], f"{name} of {case} is {difference} from transformers'"


def test_two_ranks(tmp_path: Path) -> None:
    qwen2 = save_tiny(tmp_path / "qwen2", "qwen2")
    critic = save_tiny_reward_model(tmp_path / "critic", "llama")
    cases = [Case(qwen2), Case(qwen2, dtype=torch.float32), Case(critic, "critic")]
    check_cases(tmp_path / "ranks", 2, Layout(tensor=2, sequence_parallel=True), cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_models(tmp_path: Path, name: str) -> None:
    models = [save_tiny(tmp_path / family, family, **LAYERS) for family in ("llama", "qwen2", "qwen3", "mistral")]
    critic = save_tiny_reward_model(tmp_path / "critic", "llama", **LAYERS)
    recomputed: dict[str, Any] = {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1
    }  # fmt: skip
    cases = [*map(Case, models), Case(models[0], overrides=recomputed), Case(critic, "critic")]
    check_cases(tmp_path / "ranks", *LAYOUTS[name], [*cases, Case(models[1], dtype=torch.float32)])


def test_a_split_vocabulary(tmp_path: Path) -> None:
    for name, difference in on_ranks(tmp_path, 2, shards).items():
        assert difference < 1e-12, name


def test_refusals(tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    messages = on_ranks(tmp_path / "ranks", 1, refusals, tmp_path / "llama")
    assert "Gemma2Config: has no mapping to Megatron" in messages["family"]
    assert "llama, mistral, qwen2" in messages["family"]
    assert "override_transformer_config.recompute_granularty='full'" in messages["unknown"]
    assert "Did you mean recompute_granularity?" in messages["unknown"]
    assert "follows from the model" in messages["set elsewhere"]
    assert "hidden_act='gelu'" in messages["activation"]
    assert "its weights lack model.layers.2.input_layernorm.weight" in messages["lacks"]
    assert "has no model.safetensors" in messages["empty"]
    assert "gate_proj.weight and model.layers.0.mlp.up_proj.weight give (96, 32)" in messages["shape"]
    assert "a process has one Megatron layout" in messages["layout"]


def test_redirections_change_no_number(tmp_path: Path) -> None:
    """Of what runs on the CPU without them, and nothing at all of code that is not Megatron's."""
    found = on_ranks(tmp_path, 1, redirected)
    assert found["sum"] != 0.0
    assert found == {**found, "same bits": True, "type": "torch.FloatTensor", "cuda": "refused", "module": True}
