"""Runs that Megatron trains: those of one process, checkpoints of any layout, and what is refused before."""

import importlib.util
import json
import re
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.installed import needs_megatron
from tests.runs.forked_group import ForkedGroup
from tests.runs.test_devices import holds, overrides, saved_again
from tests.runs.tiny_run import measured, same, train, weights, write_inputs
from tests.tiny import save_tiny, tiny_model
from tether.config import load_config
from tether.distributed import groups
from tether.integrations.megatron import version as megatron_version
from tether.integrations.megatron.build import check_megatron
from tether.integrations.megatron.version import TESTED
from tether.metrics.loggers.jsonl import read_samples
from tether.runtime.ranks import RankFailed
from tether.text.build import build_run
from tether.text.learning.build import sequence_ranks

ACTOR = "actor_rollout_ref.actor"
SIZES = f"{ACTOR}.megatron"
STRATEGY = f"{ACTOR}.strategy=megatron"
TP, PP = f"{SIZES}.tensor_model_parallel_size", f"{SIZES}.pipeline_model_parallel_size"
EP = f"{SIZES}.expert_model_parallel_size"
STEPS = 10


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def close(found: dict[int, Any], expected: dict[int, Any], steps: int = STEPS) -> None:
    for step in range(1, steps + 1):
        assert found[step]["critic/score/mean"] == expected[step]["critic/score/mean"]
        for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy", "actor/kl_loss"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6)


class Dying(ForkedGroup):
    """Whose last rank is killed with SIGKILL in the middle of a step."""

    updates, last = 0, STEPS // 2

    def call(self, part: str, method: str, arguments: Sequence[tuple[object, ...] | None]) -> list[Any]:
        self.updates += (part, method) == ("actor", "learn")
        if self.updates > self.last:
            self._processes[-1].kill()
            self._processes[-1].join()
        return super().call(part, method, arguments)


@pytest.mark.slow
@needs_megatron
def test_layouts_train_as_one_process_and_resume_each_others_checkpoints(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one process, of TP 2 x PP 2 until a rank is killed, and of PP 2 that continues from there."""
    monkeypatch.setattr(groups, "_start_group", Dying)
    kl = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.optim.lr=1e-4", "critic.optim.lr=1e-4"]
    one = train([*overrides(inputs, tmp_path / "one", 1, STEPS), *kl])
    four = [STRATEGY, f"{TP}=2", f"{PP}=2", *kl]
    with pytest.raises(RankFailed, match="rank 3 ended"):
        train([*overrides(inputs, tmp_path / "split", 4, STEPS), *four])
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    checkpoint = tmp_path / f"split/global_step_{STEPS // 2}"
    assert saved_again(inputs, tmp_path / "split", 1, checkpoint, kl)
    two = [STRATEGY, f"{PP}=2", *kl]
    assert saved_again(inputs, tmp_path / "split", 2, checkpoint, two)
    resumed = train([*overrides(inputs, tmp_path / "split", 2, STEPS), *two])
    assert read_samples(resumed) == read_samples(one)
    close(measured(resumed), measured(one))
    left, right = weights(one / f"global_step_{STEPS}"), weights(resumed / f"global_step_{STEPS}")
    for name in left:
        torch.testing.assert_close(right[name], left[name], rtol=1e-4, atol=1e-5)


class DyingSoon(Dying):
    last = 1


@pytest.mark.slow
@needs_megatron
def test_experts_that_were_dealt_out_resume_undealt(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of experts on EP 2, killed in its second step: the bits go on on two replicas, and in one process."""
    save_tiny(tmp_path / "mixture", "qwen2_moe")
    mixture = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={tmp_path / 'mixture'}"]
    monkeypatch.setattr(groups, "_start_group", DyingSoon)
    with pytest.raises(RankFailed, match="rank 1 ended"):
        train([*overrides(inputs, tmp_path / "split", 2, 2), *mixture, STRATEGY, f"{EP}=2"])
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    checkpoint = tmp_path / "split/global_step_1"
    assert saved_again(inputs, tmp_path / "split", 1, checkpoint, mixture)
    run = build_run(load_config(None, [*overrides(inputs, tmp_path / "split", 2, 2), *mixture, STRATEGY]))
    try:
        assert holds(run, tmp_path / "split/again_2", checkpoint)
        assert any(re.match(r"Megatron-core .*: its own layers on ", line) for line in run.about)
        run.trainer.fit()
    finally:
        run.close()
    assert max(measured(run.directory)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@needs_megatron
def test_ray_runs_the_ranks_and_a_critic_apart_has_its_own_layout(inputs: Path, tmp_path: Path) -> None:
    """Two steps of one process, and of a policy in TP 2 beside a critic that is whole on a device of its own."""
    one = train(overrides(inputs, tmp_path / "one", 1, 2))
    where = "cluster.component_placement={actor: 0-1, rollout: 0-1, inference: 0-1, critic: 2}"
    three = [STRATEGY, f"{TP}=2", "critic.megatron.tensor_model_parallel_size=1", where]
    found, expected = measured(train([*overrides(inputs, tmp_path / "ray", 3, 2), *three])), measured(one)
    for step in (1, 2):
        assert found[step]["critic/score/mean"] == expected[step]["critic/score/mean"]
        for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy"):
            assert found[step][name] == pytest.approx(expected[step][name], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@needs_megatron
def test_weights_of_megatron_are_read_at_the_start_alone(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run whose Hugging Face directories have no weights (actor, reference) or others (critic); it is resumed."""
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    stored = importlib.import_module("tests.integrations.megatron.stored")
    stored.write(tmp_path / "stored", stored.tensors_of(tiny_model("llama")))
    for name in ("bare", "other"):
        shutil.copytree(inputs / "model", tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(save_tiny(tmp_path / "five", seed=5) / "model.safetensors", tmp_path / "other")
    two = [STRATEGY, f"{TP}=2", f"{ACTOR}.use_kl_loss=True"]
    whole = train([*overrides(inputs, tmp_path / "whole", 2, 2), *two])
    read = [
        *(f"actor_rollout_ref.model.path={tmp_path / 'bare'}", f"critic.model.path={tmp_path / 'other'}"),
        *(f"{sizes}.use_dist_checkpointing=True" for sizes in (SIZES, "critic.megatron")),
        *(f"{sizes}.dist_checkpointing_path={tmp_path / 'stored'}" for sizes in (SIZES, "critic.megatron")),
    ]
    for steps in (1, 2):
        halves = train([*overrides(inputs, tmp_path / "halves", 2, steps), *two, *read])
    assert measured(halves) == measured(whole)
    for role in ("actor", "critic"):
        assert same(*(weights(run / "global_step_2", role) for run in (halves, whole)))
    lost = [*overrides(inputs, tmp_path / "halves", 2, 3), *two, *read, f"{SIZES}.dist_checkpointing_prefix=x."]
    with pytest.raises(ValueError, match=r"ref\.megatron\.dist_checkpointing_path=.*it lacks embedding\.word_emb"):
        build_run(load_config(None, lost))


ADAPTERS = [
    *("actor_rollout_ref.model.lora_rank=2", "critic.model.lora_rank=3", f"{ACTOR}.use_kl_loss=True"),
    *("algorithm.use_kl_in_reward=True", f"{ACTOR}.optim.lr=1e-3", "critic.optim.lr=1e-3"),
]


@pytest.mark.slow
@needs_megatron
def test_adapters_train_as_in_one_process_and_resume_exactly(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TP 2 with sequence parallelism; PP 2 holds the bits of one process, and that the bits of TP 2."""
    pytest.importorskip("peft")
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    one = train([*overrides(inputs, tmp_path / "one", 1, 3), *ADAPTERS])
    two = [STRATEGY, f"{TP}=2", *ADAPTERS]
    whole = train([*overrides(inputs, tmp_path / "whole", 2, 3), *two])
    for steps in (2, 3):
        halves = train([*overrides(inputs, tmp_path / "halves", 2, steps), *two])
    assert measured(halves) == measured(whole)
    files = ("actor", "critic", "adapter", "critic_adapter")
    of_one, of_whole, of_halves = (
        {name: {key: value for file in (run / "global_step_3" / name).glob("*model*.safetensors")
                for key, value in load_file(file).items()} for name in files}
        for run in (one, whole, halves)
    )  # fmt: skip
    assert same(of_halves, of_whole)
    assert read_samples(whole) == read_samples(one)
    close(measured(whole), measured(one), steps=3)
    for name in files:
        assert of_whole[name].keys() == of_one[name].keys()
        for key, value in of_one[name].items():
            torch.testing.assert_close(of_whole[name][key], value, rtol=1e-4, atol=1e-5)
        if name.endswith("adapter"):
            left, right = (
                json.loads((run / "global_step_3" / name / "adapter_config.json").read_text()) for run in (one, whole)
            )
            assert set(left.pop("target_modules")) == set(right.pop("target_modules"))  # peft writes a set
            assert left == right
    assert saved_again(inputs, tmp_path / "one", 2, one / "global_step_3", [STRATEGY, f"{PP}=2", *ADAPTERS])
    assert saved_again(inputs, tmp_path / "whole", 1, whole / "global_step_3", ADAPTERS)


@needs_megatron
def test_adapters_of_a_mixture_of_experts_are_refused(inputs: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "mixture", "qwen2_moe")
    given = ["actor_rollout_ref.model.lora_rank=2", f"actor_rollout_ref.model.path={tmp_path / 'mixture'}", STRATEGY]
    with pytest.raises(ValueError, match=r"model\.lora_rank=2: Megatron trains adapters of dense models only, and "):
        build_run(load_config(None, [*overrides(inputs, tmp_path, 2, 1), *given]))


BAD: dict[str, tuple[list[str], str]] = {
    "heads": ([f"{TP}=8", "trainer.n_gpus_per_node=8"], f"{TP}=8 cannot split 4 attention heads"),
    "layers": ([f"{PP}=4"], f"{PP}=4: cannot distribute 2 layers over 4 pipeline ranks"),
    "experts": ([f"{SIZES}.expert_model_parallel_size=2"], f"{SIZES}.expert_model_parallel_size=2: LlamaConfig has no"),
    "unknown key": (
        [f"{SIZES}.override_transformer_config={{recompute_granularty: full}}"],
        f"{SIZES}.override_transformer_config.recompute_granularty",
    ),
    "key set elsewhere": (
        [f"{SIZES}.override_transformer_config={{num_layers: 3}}"],
        f"{SIZES}.override_transformer_config.num_layers=3: follows from the model",
    ),
    "what Megatron itself refuses": (
        [f"{SIZES}.override_transformer_config={{moe_token_dispatcher_type: allgather}}"],
        f"{SIZES}.override_transformer_config: Megatron refuses it: Token dispatcher type: allgather does not support",
    ),
    "what is not installed": (
        [f"{SIZES}.override_transformer_config={{moe_permute_fusion: true}}"],
        f"{SIZES}.override_transformer_config: Megatron refuses it: cannot import name",
    ),
    "layers of the critic, which is apart": (
        [
            "cluster.component_placement={actor: 0-1, rollout: 0-1, inference: 0-1, critic: 2-3}",
            "critic.megatron.override_transformer_config={num_layers_in_first_pipeline_stage: 2}",
            "critic.megatron.pipeline_model_parallel_size=2",
        ],
        "critic.megatron.pipeline_model_parallel_size=2: cannot distribute",
    ),
    "adapters of a layer that Megatron has none in": (
        ["actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.target_modules=[q_proj,lm_head]"],
        "lm_head would get an adapter, which Megatron holds in attention and MLP alone",
    ),
    "adapters of no layer": (
        ["critic.model.lora_rank=2", "critic.model.target_modules=[q_prj]"],
        "target_modules",
    ),
    "layers of a stage": (
        [f"{SIZES}.override_transformer_config={{num_layers_in_last_pipeline_stage: two}}"],
        "num_layers_in_last_pipeline_stage='two': is not a whole number above 0",
    ),
}


@needs_megatron
@pytest.mark.parametrize("name", BAD)
def test_a_layout_that_does_not_fit_is_refused_before_it_starts(name: str, inputs: Path, tmp_path: Path) -> None:
    bad, message = BAD[name]
    with pytest.raises(ValueError) as error:
        build_run(load_config(None, [*overrides(inputs, tmp_path, 4, 1), STRATEGY, *bad]))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [("megatron.context_parallel_size=2", 2), ("megatron.tensor_model_parallel_size=2", 1),
     ("ulysses_sequence_parallel_size=2", 1)],
)  # fmt: skip
def test_tokens_of_a_device_are_those_of_its_share(given: str, ranks: int, inputs: Path, tmp_path: Path) -> None:
    """A micro-batch has as many tokens as all ranks that share them may have; FSDP's ranks are none here."""
    config = load_config(None, [*overrides(inputs, tmp_path, 2, 1), STRATEGY, f"{ACTOR}.{given}"]).config
    assert sequence_ranks(config, config.actor_rollout_ref.actor) == ranks


@needs_megatron
def test_the_check_lets_no_warning_of_megatron_out(inputs: Path, tmp_path: Path) -> None:
    config = load_config(None, [*overrides(inputs, tmp_path, 2, 1), STRATEGY]).config
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_megatron(config, inputs / "model", inputs / "model")
    assert not [str(warning.message) for warning in found]


@needs_megatron
def test_a_model_without_a_mapping_is_refused(inputs: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "gemma", "gemma2")
    given = [*overrides(inputs, tmp_path, 2, 1), STRATEGY, f"actor_rollout_ref.model.path={tmp_path / 'gemma'}"]
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM: has no mapping to Megatron. .*strategy=fsdp"):
        build_run(load_config(None, given))


def test_without_megatron_the_extra_is_named(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("megatron") else found(name))
    with pytest.raises(ValueError, match=r"strategy=megatron: needs .* megatron-core, .*pip install .*\[megatron\]'"):
        build_run(load_config(None, [*overrides(inputs, tmp_path, 2, 1), STRATEGY]))


@needs_megatron
@pytest.mark.parametrize(("installed", "message"), [("0.15.3", "needs 0.16.1 or later"), ("0.18.0", "triton")])
def test_a_version_that_cannot_run_is_refused(
    installed: str, message: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_version, "version", lambda _: installed)
    monkeypatch.setattr(megatron_version, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"megatron-core {installed}: .*{message}.*pip install"):
        build_run(load_config(None, [*overrides(inputs, tmp_path, 2, 1), STRATEGY]))


@pytest.mark.parametrize(("installed", "warned"), [(TESTED[0], False), (TESTED[-1], False), ("0.99.0", True)])
def test_a_version_that_was_not_tested_is_named(
    installed: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(megatron_version, "version", lambda _: installed)
    monkeypatch.setattr(megatron_version, "find_spec", lambda _: object())
    megatron_version.check_version()
    assert (f"megatron-core {installed} was not tested" in caplog.text) == warned


OWN_CONFIG = """
from transformers import PreTrainedConfig


class AuthorsConfig(PreTrainedConfig):
    model_type = "deepseek_v3"

    def __init__(self, vocab_size=260, num_attention_heads=4, **kwargs):
        self.vocab_size, self.num_attention_heads = vocab_size, num_attention_heads
        super().__init__(**kwargs)
"""


@pytest.mark.slow
@needs_megatron
def test_a_model_whose_author_ships_code_is_transformers_own(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Moonlight's hub directory, whose script trusts its code: a config of an older transformers, and no weights."""
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    folder = save_tiny(tmp_path / "moonlight", "deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("rope_")} | {"rope_theta": 5e4}
    config["auto_map"] = {"AutoConfig": "own.AuthorsConfig", "AutoModelForCausalLM": "gone.AuthorsForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CONFIG)
    trust = [f"{part}.trust_remote_code=True" for part in ("data", "actor_rollout_ref.model", "critic.model")]
    settings = [f"{part}.path={folder}" for part in ("actor_rollout_ref.model", "critic.model")] + trust
    run = train([*overrides(inputs, tmp_path / "two", 2, 1), *settings, STRATEGY, f"{EP}=2"])
    assert "auto_map" not in json.loads((run / "global_step_1/actor/config.json").read_text())
    assert set(measured(train([*overrides(inputs, tmp_path / "two", 2, 2), *settings, STRATEGY]))) == {1, 2}
