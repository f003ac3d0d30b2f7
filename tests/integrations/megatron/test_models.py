"""Megatron's models give what those of transformers give, on any layout: outputs, gradients and saved weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.installed import needs_megatron
from tests.ranks import on_ranks
from tests.tiny import save_tiny, save_tiny_reward_model
from tether.integrations.megatron import MegatronLayout

if TYPE_CHECKING:
    from tests.integrations.megatron.ranks import Case

pytestmark = needs_megatron
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
SINGLE = 2e-6  # in float64, where transformers computes the router or the scaled angles of YaRN in float32
LAYERS = {"num_hidden_layers": 4}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]}
SELECTED_OF_LATENT = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "layernorm", "moe"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 0.8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen2", "qwen3", "mistral", "qwen2_moe", "qwen3_moe", "deepseek_v3")},
    "qwen2_moe_without_biases": ("qwen2_moe", {"qkv_bias": False}),
    "llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": {**YARN, "mscale_all_dim": None}, "tie_word_embeddings": False}),
    "moonlight": ("deepseek_v3", {
        "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "n_shared_experts": 2, "rms_norm_eps": 1e-5, "rope_parameters": YARN,
    }),
}  # fmt: skip
DENSE, SPARSE = ("llama", "qwen2", "qwen3", "mistral"), ("qwen2_moe", "qwen3_moe", "deepseek_v3", "moonlight")
LAYOUTS: dict[str, tuple[int, MegatronLayout, tuple[str, ...]]] = {
    "tensor": (2, MegatronLayout(tensor=2), (*DENSE, "llama3", "qwen2_yarn")),
    "fewer key heads than ranks": (4, MegatronLayout(tensor=4), ("qwen2", "qwen3")),
    "pipeline, data": (4, MegatronLayout(pipeline=2), (*DENSE, "moonlight")),
    "tensor, pipeline": (4, MegatronLayout(tensor=2, pipeline=2), ("qwen2",)),
    "tensor, pipeline, sequence": (4, MegatronLayout(tensor=2, pipeline=2, sequence_parallel=True), ("qwen3", *SPARSE)),
    "uneven stages": (2, MegatronLayout(pipeline=2, first_stage_layers=3), ("qwen2", "moonlight")),
    "virtual stages": (2, MegatronLayout(pipeline=2, virtual_pipeline=2), ("qwen2", "qwen2_moe")),
    "experts": (2, MegatronLayout(expert=2), (*SPARSE, "qwen2_moe_without_biases")),
    "pipeline, experts": (4, MegatronLayout(pipeline=2, expert=2), SPARSE),
    "experts in parts": (4, MegatronLayout(tensor=2, expert=2, sequence_parallel=True), ("qwen2_moe", "moonlight")),
    "context": (2, MegatronLayout(context=2), ("llama", "mistral", "qwen2_moe", "deepseek_v3")),
    "context, tensor": (4, MegatronLayout(context=2, tensor=2, sequence_parallel=True), ("llama", "moonlight")),
}


def save(folder: Path, name: str, **overrides: Any) -> Path:
    """A tiny model whose routers, where it has some that prefer an expert, do so."""
    family, options = MODELS[name]
    path = save_tiny(folder / name, family, **options, **overrides)
    tensors = load_file(path / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith("e_score_correction_bias"):
            tensor += torch.linspace(-0.2, 0.2, len(tensor))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def work() -> ModuleType:
    """What ranks do; its import loads Megatron, which takes a second."""
    return importlib.import_module("tests.integrations.megatron.ranks")


def check_cases(work: ModuleType, folder: Path, ranks: int, layout: MegatronLayout, cases: list[Case]) -> None:
    for case, differences in on_ranks(folder, ranks, work.compare, layout, cases, answers=ranks - 1).items():
        tolerance = TOLERANCE[case.dtype]
        if case.folder.name in ("qwen2_yarn", "qwen3_moe", "deepseek_v3", "moonlight"):
            tolerance = max(tolerance, SINGLE)
        for name, difference in differences.items():
            assert difference < tolerance, f"{name} of {case} is {difference} from transformers'"


def test_two_ranks(work: ModuleType, tmp_path: Path) -> None:
    qwen2, critic = save(tmp_path, "qwen2"), save_tiny_reward_model(tmp_path / "critic", "llama")
    cases = [work.Case(qwen2, dtype=torch.float32), work.Case(critic, "critic"), work.Case(save(tmp_path, "qwen2_moe"))]
    selected = {"qwen3": SELECTED, "deepseek_v3": SELECTED_OF_LATENT}
    cases += [work.Case(save(tmp_path, name), overrides=overrides) for name, overrides in selected.items()]
    check_cases(work, tmp_path / "ranks", 2, MegatronLayout(tensor=2, sequence_parallel=True), cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(work: ModuleType, tmp_path: Path, name: str) -> None:
    ranks, layout, models = LAYOUTS[name]
    folders = [save(tmp_path, model, **LAYERS) for model in models]
    critic = save_tiny_reward_model(tmp_path / "critic", "llama", **LAYERS)
    cases = [
        *map(work.Case, folders),
        work.Case(folders[0], dtype=torch.float32),
        work.Case(folders[-1], overrides=RECOMPUTED),
    ]
    if layout.expert == 1:
        cases.append(work.Case(critic, "critic"))
    check_cases(work, tmp_path / "ranks", ranks, layout, cases)


def test_a_split_vocabulary(work: ModuleType, tmp_path: Path) -> None:
    for name, difference in on_ranks(tmp_path, 2, work.shards).items():
        assert difference < 1e-12, name


def test_refusals(work: ModuleType, tmp_path: Path) -> None:
    save_tiny(tmp_path / "llama", "llama")
    messages = on_ranks(tmp_path / "ranks", 1, work.refusals, tmp_path / "llama")
    assert "Gemma2Config: has no mapping to Megatron" in messages["family"]
    assert "llama, mistral, qwen2, qwen3, qwen2_moe, qwen3_moe, deepseek_v3" in messages["family"]
    assert "override_transformer_config.recompute_granularty='full'" in messages["unknown"]
    assert "Did you mean recompute_granularity?" in messages["unknown"]
    assert "'sinkhorn': sinkhorn chooses experts by what else is in the micro-batch" in messages["unfit"]
    assert "layernorm_epsilon=0.001: changes what the model computes" in messages["other model"]
    assert "it is 1e-06 here. Leave it out." in messages["other model"]
    assert "'aux': is not one of none, aux_loss, seq_aux_loss, global_aux_loss" in messages["balance"]
    assert "recompute_num_layers=0: is not a whole number above 0" in messages["no layers"]
    assert "follows from the model" in messages["set elsewhere"]
    assert "hidden_act='gelu'" in messages["activation"]
    assert "norm_topk_prob=False" in messages["router"]
    assert "its weights lack model.layers.2.input_layernorm.weight" in messages["lacks"]
    assert "has no model.safetensors" in messages["empty"]
    assert "gate_proj.weight and model.layers.0.mlp.up_proj.weight give (96, 32)" in messages["shape"]
    assert "a process has one Megatron layout" in messages["layout"]


@pytest.mark.parametrize(
    ("engine", "cuda", "context", "said"),
    [
        (False, False, 1, "on the CPU, with tether's packed attention"),
        (True, False, 1, "on the CPU, with tether's packed attention"),
        (False, True, 1, "on CUDA, with tether's packed attention"),
        (True, True, 2, "on CUDA, with tether's packed attention"),
        (True, True, 1, "on CUDA, with Transformer Engine's fused attention"),
    ],
)
def test_what_runs_is_said(engine: bool, cuda: bool, context: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.integrations.megatron import attention
    from tether.integrations.megatron.model import describe

    monkeypatch.setattr(attention, "HAS_TRANSFORMER_ENGINE", engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert describe(MegatronLayout(context=context)).endswith(f": its own layers {said} and tether's norms")


def test_redirections_change_no_number(work: ModuleType, tmp_path: Path) -> None:
    """Of what runs on the CPU without them, and nothing at all of code that is not Megatron's."""
    found = on_ranks(tmp_path, 1, work.redirected)
    assert found["sum"] != 0.0
    assert found == {**found, "same bits": True, "type": "torch.FloatTensor", "cuda": "refused", "module": True}
