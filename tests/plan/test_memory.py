"""Sizes and memory: numbers worked by hand, and what has to hold for any model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tether.integrations.megatron import MegatronLayout
from tether.plan.architecture import KNOWN, architecture_of, from_config, known_name
from tether.plan.memory import PREFILLED, Model, idle_memory, kv_cache, megatron_state, total, update

# Two layers of hidden size 4: attention 2 heads and 1 key head of size 2, MLP of width 8, 10 tokens.
TINY = from_config(
    {
        "model_type": "llama",
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": 8,
        "vocab_size": 10,
        "tie_word_embeddings": False,
    },
    "tiny",
)
# queries 4 x 4, keys and values 4 x 2 each, output 4 x 4; gate, up and down 4 x 8 each; two norms of 4.
LAYER = 16 + 8 + 8 + 16 + 3 * 32 + 8
OUTSIDE = 40 + 40 + 4


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.134515),
        ("qwen2.5-0.5b", 0.494033),
        ("qwen2.5-7b", 7.615617),
        ("qwen2.5-72b", 72.706204),
        ("qwen3-0.6b", 0.596050),
        ("qwen3-30b-a3b", 30.532123),
        ("llama-3-8b", 8.030261),
        ("deepseek-llm-7b", 6.910365),
        ("gemma-2-2b", 2.614342),
        ("qwen1.5-moe-a2.7b", 14.315784),
    ],
)
def test_known_models_have_the_weights_that_were_published(name: str, billions: float) -> None:
    assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=1e-5)


def test_weights_of_a_model_worked_by_hand() -> None:
    assert TINY.layer(0) == LAYER
    assert TINY.parameters == 2 * LAYER + OUTSIDE
    assert TINY.critic_parameters == TINY.parameters - 40 + 4  # a vector in the place of the output head
    assert TINY.kv_per_token == 2 * 2 * 1 * 2
    assert TINY.adapter(3) == 2 * 3 * ((4 + 4) + (4 + 2) + (4 + 2) + (4 + 4) + 3 * (4 + 8))


def test_names_of_hubs_lead_to_known_models_and_others_to_one_line() -> None:
    assert known_name("Qwen/Qwen2.5-0.5B-Instruct") == "qwen2.5-0.5b"
    assert known_name("~/models/Skywork-Reward-V2-Llama-3.2-3B") == "llama-3.2-3b"
    assert known_name("modelscope:deepseek-ai/deepseek-llm-7b-chat") == "deepseek-llm-7b"
    with pytest.raises(ValueError, match=r"^critic.model.path=Qwen/Qwen2.5-6B: the sizes .* Did you mean .*$"):
        architecture_of("Qwen/Qwen2.5-6B", "critic.model.path")
    with pytest.raises(ValueError, match=r"not known\. Run `hf download a/new-model config\.json`, give a folder"):
        architecture_of("a/new-model", "critic.model.path")
    with pytest.raises(ValueError, match=r"not known\. Give a folder with its config\.json"):
        architecture_of("models/of/mine", "critic.model.path")


def test_a_config_json_that_is_downloaded_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is tied where a class of models has it so and the file does not say."""
    file = tmp_path / "models--a--new-model/snapshots/0/config.json"
    file.parent.mkdir(parents=True)
    written = {"model_type": "smollm3", "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2}
    file.write_text(json.dumps(written | {"intermediate_size": 8, "vocab_size": 10}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    sizes = architecture_of("a/new-model", "critic.model.path")
    assert (sizes.source, sizes.tied) == ("sizes of its config.json", True)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-3B-Instruct-GPTQ-Int4", "llama-3-8b-bnb-4bit", "Qwen/Qwen3-8B-FP8"])
def test_quantized_models_are_refused_as_training_refuses_them(name: str) -> None:
    with pytest.raises(ValueError, match=r"its weights are quantized \(\w+\), and quantized weights are not trained"):
        architecture_of(name, "actor_rollout_ref.model.path")
    with pytest.raises(ValueError, match=r"^m: its weights are quantized \(awq\)"):
        from_config({"quantization_config": {"quant_method": "awq"}}, "m")


def test_what_one_device_keeps() -> None:
    """bfloat16 weights, float32 masters and two moments; gradients only while it is updated."""
    one = Model("actor", TINY)
    parameters = TINY.parameters
    assert idle_memory(one)[0] == {
        "actor weights": 2 * parameters,
        "actor masters": 4 * parameters,
        "actor optimizer": 8 * parameters,
    }
    assert update(one, 16)["actor gradients"] == 4 * parameters
    assert idle_memory(replace(one, trained=False))[0] == {"actor weights": 2 * parameters}
    assert idle_memory(replace(one, number=4))[0] == {
        "actor weights": 4 * parameters,
        "actor optimizer": 8 * parameters,
    }
    adapted = idle_memory(replace(one, adapter=100))[0]
    assert adapted["actor optimizer"] == 800
    assert adapted["actor masters"] == 400, "frozen weights have none"


def test_shards_divide_what_is_kept_and_offloading_moves_it() -> None:
    parameters = TINY.parameters
    shards = Model("actor", TINY, ranks=4, shards=4, sharded=True)
    assert idle_memory(shards)[0] == {"actor weights": parameters, "actor optimizer": 2 * parameters}
    moved, host = idle_memory(replace(shards, offload_optimizer=True, offload_weights=True))
    assert (moved, host) == ({}, {"actor weights": parameters, "actor optimizer": 2 * parameters})
    local = update(replace(shards, offload_optimizer=True, offload_weights=True), 16)
    assert (local["actor weights"], local["actor optimizer"]) == (parameters, 2 * parameters)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-7b", "qwen3-30b-a3b", "moonlight-16b-a3b"])
def test_more_devices_tokens_and_recomputation_never_work_the_wrong_way(name: str) -> None:
    def peak(shards: int, tokens: int, *, recompute: bool = True) -> float:
        model = Model("actor", KNOWN[name], ranks=shards, shards=shards, sharded=True, recompute=recompute)
        return total(idle_memory(model)[0]) + total(update(model, tokens))

    by_devices = [peak(shards, 4096) for shards in (2, 4, 8, 64, 1024)]
    assert by_devices == sorted(by_devices, reverse=True)
    by_tokens = [peak(8, tokens) for tokens in (256, 1024, 4096, 16384)]
    assert by_tokens == sorted(by_tokens)
    assert peak(8, 4096) < peak(8, 4096, recompute=False)


def test_megatrons_ranks_hold_what_is_documented() -> None:
    """Two replicas in bfloat16: 2 + 4 bytes of each weight, and 12 shared by the two."""
    assert megatron_state(TINY, MegatronLayout(), 2, 2) == pytest.approx(TINY.parameters * (2 + 4 + 12 / 2))
    assert megatron_state(TINY, MegatronLayout(), 1, 4) == pytest.approx(TINY.parameters * (4 + 4 + 8))
    norms = 2 * 2 * 4 + 4  # not divided by tensor parallelism
    split = (TINY.parameters - norms) / 2 + norms
    assert megatron_state(TINY, MegatronLayout(tensor=2), 2, 4) == pytest.approx(split * 16)
    stage = LAYER + 40 + 4  # the last of two stages: a layer, the head and the last norm
    assert megatron_state(TINY, MegatronLayout(pipeline=2), 2, 4) == pytest.approx(stage * 16)


def test_megatrons_ranks_train_their_shards_of_adapters() -> None:
    """TINY has inputs of 4, and outputs of 4, 2, 2, 4 and 8, 8, 8: half of these on each of two ranks."""
    whole = Model("actor", TINY, ranks=4, number=4, layout=MegatronLayout(tensor=2))
    adapted = replace(whole, adapter=TINY.adapter(3))
    own = 2 * 3 * ((4 + 2) + (4 + 1) + (4 + 1) + (4 + 2) + 3 * (4 + 4))
    assert idle_memory(adapted)[0]["actor weights"] == idle_memory(whole)[0]["actor weights"] + 4 * own
    assert idle_memory(adapted)[0]["actor optimizer"] == 8 * own / 2
    assert update(adapted, 16)["actor gradients"] == 4 * own
    stage = update(replace(adapted, layout=MegatronLayout(pipeline=2)), 16)
    assert stage["actor gradients"] == 4 * TINY.adapter(3) / 2


def test_the_native_engine_reads_as_many_prompts_together_as_is_planned() -> None:
    from inspect import signature

    from tether.text.sampling.engine import NativeEngine

    assert signature(NativeEngine.__init__).parameters["max_num_batched_tokens"].default == PREFILLED


def test_keys_and_values_of_the_native_cache() -> None:
    assert kv_cache(TINY, slots=3, length=33, number=2) == 3 * 64 * TINY.kv_per_token * 2
