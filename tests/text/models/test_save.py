"""Exported models are read by transformers 4, which many servers and evaluations run with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, AutoTokenizer, PreTrainedModel

from tests.tiny import EOS, IM_START, tiny_model, tiny_tokenizer
from tether.text.models.critic import critic_from, value_head_of
from tether.text.models.save import save_tokenizer, write_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
ROPES = {
    "llama": LLAMA3,
    "qwen2": {"rope_type": "default", "rope_theta": 1000.0},
    "mistral": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    "qwen3": {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 64},
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1000.0},
    "gemma3": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
READ = """
import sys, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import AutoModelForTokenClassification, AutoTokenizer
assert transformers.__version__.startswith("4."), transformers.__version__
for folder in sys.argv[1:]:
    architecture = AutoConfig.from_pretrained(folder).architectures[0]
    autos = (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification)
    (auto,) = (auto for auto in autos if architecture.endswith(auto.__name__.removeprefix("AutoModel")))
    model = auto.from_pretrained(folder).eval()
    assert model.dtype == torch.float32, model.dtype
    ids = (torch.arange(150) * 7919 + 101) % 260
    with torch.no_grad():
        torch.save(model(ids[None]).logits[0], folder + "/logits.pt")
    if auto is AutoModelForCausalLM:
        assert model.generate(ids[None, :9], max_new_tokens=2, do_sample=False).shape[1] > 9
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer("<|im_start|>a")["input_ids"][0] == 2
    assert "token_type_ids" not in tokenizer("a")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
"""


def write_all(folder: Path) -> dict[Path, PreTrainedModel]:
    models = {folder / name: tiny_model(name, rope_parameters=rope) for name, rope in ROPES.items()}
    for path, model in models.items():
        write_model(model, path)
        save_tokenizer(tiny_tokenizer(), path)
    return models


def save_other_kinds(folder: Path) -> dict[Path, PreTrainedModel]:
    """Save a critic, a reward model, and a policy and a critic with adapters, as runs do."""
    from tests.text.models.test_lora import trained_lora
    from tether.text.learning.build import save_model

    critic, scored = critic_from(tiny_model("qwen3")), critic_from(tiny_model("llama"))
    reward_model = critic_from(tiny_model("qwen2"), (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,))
    for one in (critic, scored, reward_model):
        torch.nn.init.normal_(value_head_of(one).weight)
    models = {
        folder / "critic": critic,
        folder / "reward_model": reward_model,
        folder / "lora" / "actor": trained_lora(tiny_model("qwen3_moe")),
        folder / "lora" / "critic": trained_lora(scored),
    }
    for path, model in models.items():
        save_model(tiny_tokenizer(), model, path)
    return models


def test_renamed_settings_have_both_names(tmp_path: Path) -> None:
    """And transformers 5 reads what it wrote."""
    for path, model in write_all(tmp_path).items():
        assert AutoConfig.from_pretrained(path).rope_parameters == model.config.rope_parameters, path
    configs = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ROPES}
    assert configs["llama"]["rope_theta"] == 500000.0
    assert configs["llama"]["rope_scaling"] == {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    assert configs["llama"]["torch_dtype"] == configs["llama"]["dtype"] == "float32"
    assert configs["qwen2"]["rope_scaling"] is None
    assert configs["qwen3_moe"]["num_experts"] == 4
    gemma = configs["gemma3"]
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"], gemma["rope_scaling"]["factor"]) == (1e6, 500.0, 8.0)

    tokenizer = json.loads((tmp_path / "llama" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    assert not isinstance(tokenizer.get("extra_special_tokens"), list)
    again = AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert again.eos_token == EOS
    assert again(f"{IM_START}a")["input_ids"] == tiny_tokenizer()(f"{IM_START}a")["input_ids"]


def test_a_model_without_rotary_positions_is_written_as_it_is(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    write_model(model, tmp_path)
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.skipif(
    "TETHER_TEST_TRANSFORMERS_4" not in os.environ,
    reason="needs transformers 4 in a folder: bash scripts/test_transformers_4.sh",
)
def test_transformers_4_computes_the_same(tmp_path: Path) -> None:
    models = write_all(tmp_path) | save_other_kinds(tmp_path)
    environment = os.environ | {"PYTHONPATH": os.environ["TETHER_TEST_TRANSFORMERS_4"]}
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, models)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ids = (torch.arange(150) * 7919 + 101) % 260
    for path, model in models.items():
        with torch.no_grad():
            expected = model.eval()(ids[None]).logits[0]
        torch.testing.assert_close(torch.load(path / "logits.pt"), expected, rtol=1e-3, atol=1e-3)
