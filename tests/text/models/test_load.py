"""Loading: what comes out is ready for training, and every bad path gives one clear error."""

import io
import json
import os
import shutil
import struct
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2_5_VLConfig, T5Config

from tests.tiny import save_tiny, tiny_model, tiny_tokenizer
from tether.runtime.objects import register_objects
from tether.text.models.critic import critic_from, load_critic
from tether.text.models.lazy_weights import sources_of
from tether.text.models.load import load_causal_lm, load_config, load_tokenizer
from tether.text.models.model_path import resolve_model_path
from tether.text.models.output import hidden_states


@pytest.fixture
def tiny_dir(tmp_path):
    return save_tiny(tmp_path / "tiny", "llama")


def test_a_directory_loads_and_saves_back_bit_for_bit(tiny_dir, tmp_path, packed):
    model = load_causal_lm(tiny_dir, dtype=torch.float32)
    assert not model.training
    assert hidden_states(model, *packed).shape == (packed[0].shape[1], 32)
    model.save_pretrained(tmp_path / "again")
    for key, value in load_file(tiny_dir / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[key], value), key
    ids = packed[0]
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert torch.equal(again(ids).logits, AutoModelForCausalLM.from_pretrained(tiny_dir)(ids).logits)


def test_ranks_read_the_file_that_one_process_reads(tiny_dir, tmp_path):
    """The folder has one file with all weights, and shards with different ones."""
    tiny_model("llama").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    for file in (tmp_path / "shards").glob("model*"):
        shutil.copy(file, tiny_dir)
    whole = {tiny_dir / "model.safetensors"}
    unread = load_causal_lm(tiny_dir, dtype=torch.float32, lazy_device=torch.device("cpu"))
    assert {file for file, _ in filter(None, sources_of(unread))} == whole
    read = load_causal_lm(tiny_dir, dtype=torch.float32).state_dict()
    assert all(torch.equal(read[key], value) for key, value in load_file(*whole).items())


def test_float32_weights_stand_where_computed_ones_would(tiny_dir):
    """Or products of one row round otherwise, on processors where MKL's depend on the address."""

    def addresses(model):
        return {parameter.data_ptr() % 64 for parameter in model.parameters()}

    assert addresses(load_causal_lm(tiny_dir, dtype=torch.float32)) == {0}
    assert addresses(AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)) != {0}


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"hidden_size": 64}, r"has the shape \(260, 32\), and its config asks for \(260, 64\).*override_config"),
        ({"rms_norm_eps": "small"}, "override_config.rms_norm_eps='small': .*expected float, got str"),
        ({"attention_dropout": 0.5}, "override_config.attention_dropout=0.5: dropout is always off"),
        ({"dtype": "float16"}, "override_config.dtype: set fsdp_config.dtype"),
        ({"num_hidden_layers": 3}, "lacks 9 weights"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(tiny_dir, entry, says):
    with pytest.raises(ValueError, match=says):
        load_causal_lm(tiny_dir, dtype=torch.float32, override_config=entry)


def test_a_model_of_fewer_layers(tmp_path):
    """A list in the config has an entry for each layer."""
    tiny_model("gemma3").save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, dtype=torch.float32, override_config={"num_hidden_layers": 1})
    assert len(model.model.layers) == len(model.config.layer_types) == 1
    model.save_pretrained(tmp_path / "saved")  # transformers compares the list with the number when it saves


def test_override_config(tiny_dir):
    model = load_causal_lm(tiny_dir, dtype=torch.float32, override_config={"max_position_embeddings": 64})
    assert model.config.max_position_embeddings == 64
    with pytest.raises(ValueError, match=r"override_config.rope_thetta.*|override_config.max_positions.*mean max_pos"):
        load_causal_lm(tiny_dir, dtype=torch.float32, override_config={"max_positions": 64})


def test_weights_that_lack_are_refused(tiny_dir):
    weights = load_file(tiny_dir / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tiny_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 weights of LlamaForCausalLM, such as model.layers.1.mlp.up_proj.weight"
    ):
        load_causal_lm(tiny_dir, dtype=torch.float32)


def test_quantized_weights_and_models_for_pictures_are_refused_by_their_kind(tiny_dir, tmp_path):
    file = tiny_dir / "config.json"
    plain = json.loads(file.read_text())
    for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8"):
        file.write_text(json.dumps(plain | {"quantization_config": {"quant_method": method}}))
        for load in (load_causal_lm, load_critic):
            with pytest.raises(ValueError, match=rf"weights are quantized \({method}\), .* Name the plain model"):
                load(tiny_dir, dtype=torch.float32)
    Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a vision-language model .* text alone"):
        load_causal_lm(tmp_path, dtype=torch.float32)
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a T5ForConditionalGeneration; AutoModelForCausalLM .* no class for t5"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_damaged_weights_file_is_refused(tiny_dir):
    file = tiny_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{tiny_dir}: its weights could not be loaded"):
        load_causal_lm(tiny_dir, dtype=torch.float32)


class Runs:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def stored(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


NO_OBJECTS = (b"", b"{", b"[]", b'"x"', b"3", b"null", b"\xff\xfe\xfa", b"[" * 100_000)
BROKEN = {
    "config.json": NO_OBJECTS,
    "tokenizer.json": NO_OBJECTS,
    "tokenizer_config.json": (*NO_OBJECTS, b'{"tokenizer_class": 3}', b'{"eos_token": 3}'),
    "model.safetensors": (b"", b"x" * 100, b"\xff" * 200),
    "pytorch_model.bin": (
        b"",
        b"x" * 100,
        stored({"x": Runs()}),
        stored([1]),
        stored({})[:60],
        stored({1: torch.ones(2)}),
    ),
    "model.safetensors.index.json": (*NO_OBJECTS, b'{"weight_map": 3}', b'{"weight_map": {"a": "../x"}}'),
}
BROKEN_ENTRIES = (
    {"hidden_size": "x"}, {"hidden_size": -1}, {"architectures": 3}, {"rope_parameters": "x"}, {"vocab_size": [1]},
    {"dtype": "nonsense"}, {"auto_map": 3}, {"quantization_config": 3}, {"hidden_act": "nope"},
)  # fmt: skip


def test_broken_files_of_a_model_are_one_sentence(tiny_dir, monkeypatch, tmp_path):
    """And a pickle in them runs nothing."""
    monkeypatch.chdir(tmp_path)
    cases = [(name, content) for name, contents in BROKEN.items() for content in contents]
    config = json.loads((tiny_dir / "config.json").read_text())
    cases += [("config.json", json.dumps(config | entry).encode()) for entry in BROKEN_ENTRIES]
    faults = []
    for name, content in cases:
        folder = shutil.copytree(tiny_dir, tmp_path / "broken", dirs_exist_ok=True)
        if name.startswith(("pytorch_model", "model.safetensors.")):
            (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)
        load = load_tokenizer if "tokenizer" in name else partial(load_causal_lm, dtype=torch.float32)
        try:
            load(folder)
        except ValueError as error:
            said = str(error)
            if type(error) is not ValueError or not said.startswith(str(folder)) or "weights_only" in said:
                faults.append((name, content[:40], repr(error)))
        except Exception as error:  # noqa: BLE001
            faults.append((name, content[:40], repr(error)))
        shutil.rmtree(folder)
    assert faults == []
    assert not (tmp_path / "harmed").exists()


def test_a_broken_gguf_file_is_one_sentence(tmp_path):
    pytest.importorskip("gguf")
    file = tmp_path / "x.gguf"
    begin = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    for content in (b"", b"x" * 100, b"GGUF", begin, begin + b"\xff" * 40, b"GGUF" + struct.pack("<IQQ", 99, 1, 1)):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{file}: .*Copy the file again$"):
            resolve_model_path(file, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache/gguf").iterdir()] == [".lock"] * 6  # no half of a model stays


def test_a_critic_is_no_policy(tmp_path):
    critic_from(tiny_model("qwen2")).save_pretrained(tmp_path)  # tied: without the check it would load silently
    with pytest.raises(ValueError, match=r"is a critic or classifier \(Qwen2ForTokenClassification\)"):
        load_causal_lm(tmp_path, dtype=torch.float32)


def test_a_hub_id_that_is_nowhere(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no-such-org/no-such-model: no model config could be loaded"):
        load_causal_lm("no-such-org/no-such-model", dtype=torch.float32)
    with pytest.raises(ValueError, match="no-such-org/no-such-model: no tokenizer could be loaded"):
        load_tokenizer("no-such-org/no-such-model")


def test_tokenizer(tiny_dir):
    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer.pad_token_id == 0


def edit_tokenizer_config(directory, **entries):
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_tokenizer_without_padding_token_pads_with_end_of_sequence(tiny_dir):
    edit_tokenizer_config(tiny_dir, pad_token=None)
    tokenizer = load_tokenizer(tiny_dir)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_tokenizer_without_end_of_sequence_is_refused(tiny_dir):
    edit_tokenizer_config(tiny_dir, eos_token=None)
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        load_tokenizer(tiny_dir)


def test_a_directory_without_tokenizer_is_refused(tiny_dir):
    for file in tiny_dir.glob("*token*"):
        file.unlink()
    shutil.rmtree(tiny_dir / "x", ignore_errors=True)
    with pytest.raises(ValueError, match=f"{tiny_dir}: no tokenizer could be loaded"):
        load_tokenizer(tiny_dir)


def test_an_object_is_copied_and_keeps_its_rotary_frequencies():
    mine = tiny_model("llama")
    with register_objects({"model": mine}):
        copied = load_causal_lm("object:model", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in mine.parameters()} == {torch.float32}
    name = "model.rotary_emb.inv_freq"
    assert torch.equal(copied.get_buffer(name), mine.get_buffer(name))
    assert copied.lm_head.weight.data_ptr() != mine.lm_head.weight.data_ptr()


OWN_CODE = """
from transformers import PreTrainedConfig


class AuthorsConfig(PreTrainedConfig):
    model_type = "llama"
"""


def ships_code(folder):
    """A model whose author ships a config, and a model for an older transformers."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.AuthorsConfig", "AutoModelForCausalLM": "own_model.AuthorsForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    (folder / "own_model.py").write_text("from transformers import what_there_was_once")


def test_an_authors_code_that_does_not_run_is_named_and_transformers_own_class_is_offered(tiny_dir):
    ships_code(tiny_dir)
    for unread in (None, torch.device("cpu")):
        with pytest.raises(ValueError, match=r"what_there_was_once.* own for llama: leave model\.trust"):
            load_causal_lm(tiny_dir, dtype=torch.float32, trust_remote_code=True, lazy_device=unread)
    assert load_causal_lm(tiny_dir, dtype=torch.float32).config.model_type == "llama"


def test_a_checkpoint_names_no_code_that_is_not_beside_it(tiny_dir, tmp_path):
    ships_code(tiny_dir)
    assert type(load_config(tiny_dir, trust_remote_code=True)).__name__ == "AuthorsConfig"
    load_causal_lm(tiny_dir, dtype=torch.float32).save_pretrained(tmp_path / "saved")
    load_config(tiny_dir, trust_remote_code=True, own_class=True).save_pretrained(tmp_path / "own")
    for folder in (tmp_path / "saved", tmp_path / "own"):
        assert isinstance(load_config(folder, trust_remote_code=True), LlamaConfig)
