"""Runs that start from LoRA adapters: they begin with them, resume exactly, and refuse those of other models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs.resume import assert_resume_is_exact
from tests.runs.steps import built
from tests.runs.tiny_run import GAE, LIGHT, base_overrides, same
from tests.tiny import save_tiny
from tether.config import ConfigError, load_config
from tether.text.input_checks import missing_inputs

pytest.importorskip("peft")
from tether.text.models.critic import critic_from
from tether.text.models.lora import LoraOptions, add_lora, save_adapter
from tether.text.models.output import value_head_of

MODEL, CRITIC = "actor_rollout_ref.model", "critic.model"


@pytest.fixture(scope="module")
def adapters(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained adapters of the policy and of a critic."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(3)
    for role in (MODEL, CRITIC):
        model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
        model = model if role == MODEL else critic_from(model)
        add_lora(model, LoraOptions(rank=3, alpha=5, target_modules=("q_proj", "up_proj")))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        if role == CRITIC:
            torch.nn.init.normal_(value_head_of(model).weight)
        save_adapter(model, folder / role)
    return {role: folder / role for role in (MODEL, CRITIC)}


def start_from(adapters: dict[str, Path]) -> list[str]:
    return [*GAE, *(f"{role}.lora_adapter_path={folder}" for role, folder in adapters.items())]


def adapter_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_a_run_begins_with_the_adapters_and_resumes_exactly(
    adapters: dict[str, Path], inputs: Path, tmp_path: Path
) -> None:
    overrides = start_from(adapters)
    with built([*base_overrides(inputs, tmp_path), *overrides, *LIGHT]) as run:
        models = {MODEL: run.trainer.actor.engine.model, CRITIC: run.trainer.critic.engine.model}
        for role, model in models.items():
            save_adapter(model, tmp_path / role)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                assert (tmp_path / role / file).read_bytes() == (adapters[role] / file).read_bytes()
        assert run.loaded.config.actor_rollout_ref.model.lora_rank == run.loaded.config.critic.model.lora_rank == 3
        assert run.loaded.config.critic.model.lora_alpha == 5
        before = {role: adapter_of(model) for role, model in models.items()}
    with built([*base_overrides(inputs, tmp_path / "again"), *overrides, *LIGHT, "trainer.seed=9"]) as run:
        assert same(adapter_of(run.trainer.actor.engine.model), before[MODEL])  # nothing of it is drawn
    assert_resume_is_exact(inputs, tmp_path / "runs", overrides, total=2)


def copied(adapter: Path, folder: Path, **entries: object) -> Path:
    """A copy of an adapter with other entries in its config."""
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | entries))
    return folder


def test_what_cannot_be_started_from_is_said_before_anything_loads(
    adapters: dict[str, Path], inputs: Path, tmp_path: Path
) -> None:
    key, adapter = f"{MODEL}.lora_adapter_path", adapters[MODEL]
    kind = copied(adapter, tmp_path / "kind", peft_type="IA3")
    for settings, words in (
        ([f"{key}={adapter}", f"{MODEL}.lora_rank=8"], f"{adapter}: has r=3, and {MODEL}.lora_rank=8. Leave lora_rank"),
        (
            [f"{key}={adapter}", f"{MODEL}.lora_rank=3", f"{MODEL}.lora_alpha=8"],
            f"{adapter}: has lora_alpha=5, and {MODEL}.lora_alpha=8. Leave lora_alpha out",
        ),
        ([f"{key}={adapter}", f"{MODEL}.lora_alpha=8"], f"has lora_alpha=5, and {MODEL}.lora_alpha=8"),
        ([f"{key}={tmp_path / 'none'}"], "none: no such directory"),
        ([f"{key}={adapter.parent}"], f"holds no LoRA adapter .*Did you mean {adapter} or "),
        ([f"{key}={kind}"], "is an adapter of the kind IA3. Take one of LoRA"),
        ([f"{CRITIC}.lora_adapter_path={tmp_path}", *GAE], f"{CRITIC}.lora_adapter_path: {tmp_path}: holds no LoRA"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_config(None, [*base_overrides(inputs, tmp_path), *settings], missing_inputs)
    # As verl prints it, which takes the adapter's; layers of a fresh one are not named beside it.
    printed = [f"{MODEL}.lora_rank=0", f"{MODEL}.lora_alpha=16", f"{MODEL}.exclude_modules=[v_proj]"]
    loaded = load_config(None, [*base_overrides(inputs, tmp_path), f"{key}={adapter}", *printed], missing_inputs)
    model = loaded.config.actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha) == (3, 5)
    assert [note for note in loaded.notes if f"{MODEL}.exclude_modules=" in note and f"{key} is" in note]


def test_an_adapter_of_another_model_is_refused(adapters: dict[str, Path], inputs: Path, tmp_path: Path) -> None:
    """One of the same shape by its name or by the weights of its base; another copy of the same weights is the same."""
    other, wide = save_tiny(tmp_path / "other", seed=5), save_tiny(tmp_path / "wide", hidden_size=48)
    same_weights = shutil.copytree(inputs / "model", tmp_path / "same")
    gone, adapter = tmp_path / "gone", adapters[MODEL]
    for name, base, words in (
        ("trained_elsewhere", str(other), rf"was trained on {other}, and {MODEL}.path=.* is another model. Set"),
        ("wide", str(wide), "was trained on"),
        ("same", str(same_weights), None),
        ("gone", str(gone), None),
    ):
        settings = [f"{MODEL}.lora_adapter_path={copied(adapter, tmp_path / name / 'a', base_model_name_or_path=base)}"]
        overrides = [*base_overrides(inputs, tmp_path / "run"), *LIGHT, *settings]
        if words is None:
            with built(overrides):
                pass
        else:
            with pytest.raises(ValueError, match=words):
                built(overrides).__enter__()
    moved = copied(adapter, tmp_path / "moved", base_model_name_or_path=str(gone))
    overrides = [*base_overrides(inputs, tmp_path / "run"), *LIGHT, f"{MODEL}.lora_adapter_path={moved}"]
    with pytest.raises(ValueError, match=r"the adapter does not fit LlamaForCausalLM: .*_proj.* has the shape"):
        built([*overrides, f"{MODEL}.path={wide}"]).__enter__()
