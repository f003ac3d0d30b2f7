"""Published OpenVLA policies: what they compute is what a straightforward reimplementation of their parts computes."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations.robots.vla import published as by_hand
from tests.integrations.robots.vla.published import COLOURS, REAL, SIGLIP, SIZE, STATISTICS, TEXT, write_folder
from tether.control.policies.mlp_policy import load_policy, save_policy
from tether.integrations.robots.action_bins import ActionBins
from tether.integrations.robots.vla.policy import VlaPolicy
from tether.integrations.robots.vla.pretrained import load_weights, ranges, read_published, write_published
from tether.integrations.robots.vla.prompts import PADDING, Prompts
from tether.integrations.robots.vla.published import (
    TOKENS,
    center_crop,
    letterbox,
    llama_config,
    make_networks,
    normalized,
)
from tether.integrations.robots.vla.spec import ACTION_BINS, Network, VlaSpec
from tether.integrations.robots.vla.vit import HEADS, VitSpec
from tether.observations import ObsPart, encode_text

pytestmark = pytest.mark.slow

IMAGE, WRIST = ObsPart("image", "image", (SIZE, SIZE, 3), "uint8"), ObsPart("wrist", "image", (SIZE, SIZE, 3), "uint8")
TASK = ObsPart("task", "text", (12,), "uint8")
KINDS = ("openvla", "openvla_oft")
TASKS = ("push", "pick it up")
LONG = 60
"""Tokens of prompts here, where a letter is one."""


def make(kind, folder, prompt_length=LONG, layout=(IMAGE, TASK), **changes):
    found = read_published(folder, prompt_length)
    fields = {"layout": layout, "action_width": 2, "low": (-1.0, 0.0), "high": (1.0, 3.0), "num_action_chunks": 2}
    policy = VlaPolicy(VlaSpec(model_type=kind, **(fields | found.fields | changes)), seed=0)
    load_weights(policy, folder)
    return policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "tiny"
    return path, write_folder(path)


def shown(rows=4, names=("image",), seed=1):
    generator = torch.Generator().manual_seed(seed)
    pictures = {
        name: torch.randint(0, 256, (rows, SIZE, SIZE, 3), generator=generator, dtype=torch.uint8) for name in names
    }
    texts = np.stack([encode_text(TASKS[row % 2], 12) for row in range(rows)])
    return {**pictures, "task": torch.from_numpy(texts)}


def bins(rows=4, seed=2):
    return torch.randint(0, ACTION_BINS, (rows, 4), generator=torch.Generator().manual_seed(seed))


def log_probs_by_hand(weights, kind, obs, chosen, temperature=1.0, names=("image",), vits=None):
    """Of each row alone, without padding and without a cache: [B, A]."""
    language = by_hand.language_of(weights)
    wide = {name: value.double() for name, value in weights.items()}
    found = []
    for row, task in enumerate(bytes(text).rstrip(b"\0").decode() for text in obs["task"].numpy()):
        pictures = [obs[name][row].permute(2, 0, 1) for name in names]
        given = {"vits": vits} if vits else {}
        prompt = by_hand.prompt_embeddings(wide, language, pictures, task, **given)
        ids = REAL - 1 - chosen[row]
        tokens = language.get_input_embeddings()(ids)
        following = torch.zeros_like(tokens) if kind == "openvla_oft" else tokens
        logits = language(inputs_embeds=torch.cat([prompt, following])[None]).logits[0, len(prompt) - 1 : -1]
        of_actions = logits[:, REAL - ACTION_BINS : REAL] / temperature  # no other token can be chosen
        found.append(of_actions.log_softmax(-1)[torch.arange(len(ids)), ids - (REAL - ACTION_BINS)])
    return torch.stack(found)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_log_probs_are_those_of_a_straightforward_pass(kind, folder):
    path, weights = folder
    policy, obs, chosen = make(kind, path, temperature=1.6).double(), shown(), bins()
    found = policy.log_probs(policy.inputs(obs), chosen)
    torch.testing.assert_close(found, log_probs_by_hand(weights, kind, obs, chosen, 1.6))


@torch.no_grad()
def test_more_pictures_are_more_patches(folder):
    path, weights = folder
    policy = make("openvla_oft", path, layout=(IMAGE, TASK, WRIST)).double()
    obs, chosen = shown(2, names=("image", "wrist")), bins(2)
    found = policy.log_probs(policy.inputs(obs), chosen)
    torch.testing.assert_close(found, log_probs_by_hand(weights, "openvla_oft", obs, chosen, names=("image", "wrist")))


@torch.no_grad()
def test_one_vision_transformer_has_a_projector_of_two_layers(tmp_path):
    changes = {"timm_model_ids": [SIGLIP], "image_sizes": [SIZE], "use_fused_vision_backbone": False}
    weights = write_folder(tmp_path / "one", **changes)
    # Of one, the colours are the first ones that its file names.
    policy, obs, chosen = make("openvla", tmp_path / "one").double(), shown(2), bins(2)
    found = policy.log_probs(policy.inputs(obs), chosen)
    torch.testing.assert_close(found, log_probs_by_hand(weights, "openvla", obs, chosen, vits=(SIGLIP,)))


@torch.no_grad()
def test_the_likeliest_actions_are_those_that_transformers_generates(folder):
    path, weights = folder
    policy, obs = make("openvla", path).double(), shown()
    language = by_hand.language_of(weights)
    wide = {name: value.double() for name, value in weights.items()}
    allowed = list(range(REAL - ACTION_BINS, REAL))
    chosen = policy.act(policy.inputs(obs), None)
    for row in range(4):
        prompt = by_hand.prompt_embeddings(wide, language, [obs["image"][row].permute(2, 0, 1)], TASKS[row % 2])
        ids = language.generate(
            inputs_embeds=prompt[None], max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0,
            prefix_allowed_tokens_fn=lambda *_: allowed,
        )  # fmt: skip
        assert torch.equal(REAL - 1 - ids[0], chosen[row])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_sampled_step_by_step_scores_alike_in_one_pass(kind, folder):
    policy = make(kind, folder[0]).double()
    obs = policy.inputs(shown())
    noise = policy.head.noise((4,), torch.Generator().manual_seed(3)).double()
    chosen = policy.act(obs, noise)
    perturbed = (policy(obs, chosen)[0] + noise).unflatten(1, (4, -1))
    assert torch.equal(perturbed.argmax(-1), chosen)
    torch.testing.assert_close(policy(obs, chosen)[1], policy.values(obs))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_does_not_exist(kind, folder):
    short, long = make(kind, folder[0]).double(), make(kind, folder[0], prompt_length=LONG + 17).double()
    long.critic.load_state_dict(short.critic.state_dict())
    obs, chosen = shown(), bins()
    seen = [policy.inputs(obs) for policy in (short, long)]
    for one, two in zip(short(seen[0], chosen), long(seen[1], chosen), strict=True):
        torch.testing.assert_close(one, two)
    assert torch.equal(short.act(seen[0], None), long.act(seen[1], None))
    prompt = short.model.prompt(seen[0])
    broken = prompt.embedded.masked_fill(~prompt.mask[..., None], 1e9)
    torch.testing.assert_close(
        short.model(type(prompt)(broken, prompt.mask), chosen)[0], short.model(prompt, chosen)[0], rtol=0, atol=0
    )


def test_prompts_end_with_the_token_of_a_space(folder):
    prompts = Prompts(str(folder[0]), LONG)
    (ids,) = prompts(["Push"])  # in small letters
    begin, *expected = by_hand.prompt_ids("push")
    assert begin == TEXT.get("bos_token_id", 1)
    assert ids[: LONG - len(expected)].eq(PADDING).all()
    assert ids[LONG - len(expected) :].tolist() == expected
    with pytest.raises(ValueError, match=r"policy\.max_prompt_length=60: the prompt of 'push.*' has \d+ tokens"):
        prompts(["push the very red block"])


def gradients(policy, obs, chosen):
    passed = policy.run(obs, None, chosen)
    for value in policy.parameters():
        value.grad = torch.zeros_like(value)
    generator = torch.Generator().manual_seed(4)
    outputs = torch.randn(passed.outputs.shape, generator=generator, dtype=torch.float64)
    policy.backward(passed, outputs, torch.ones_like(passed.values))
    return {name: value.grad for name, value in policy.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_no_gradient_and_every_weight_has_one(kind, folder):
    whole, parts = make(kind, folder[0]).double(), make(kind, folder[0]).double()
    parts.critic.load_state_dict(whole.critic.state_dict())
    parts.micro_batch = 3
    obs, chosen = whole.inputs(shown()), bins()
    expected, found = gradients(whole, obs, chosen), gradients(parts, obs, chosen)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
        assert gradient.any(), name


def test_ranges_are_the_statistics_where_the_mask_says_so(folder):
    found = read_published(folder[0], LONG)
    assert ranges(found, "two") == ((-0.5, -1.0), (0.5, 1.0))
    # 255 bins between -1 and 1, the first one at the lowest edge: centre -1 + 1 / 255; number 255 is the last bin.
    columns = ActionBins(*ranges(found, "two")).decode(np.array([[0, 0], [127, 127], [254, 254], [255, 255]]))
    ends = 0.5 * (1 - 1 / 255), 1 - 1 / 255
    np.testing.assert_allclose(columns, [[-ends[0], -ends[1]], [0, 0], ends, ends], atol=1e-6)
    assert len(ranges(found, "seven")[0]) == 7


def test_statistics_of_fine_tuning_stand_beside_the_others(folder, tmp_path):
    write_folder(tmp_path / "tuned", norm_stats=None)
    (tmp_path / "tuned/dataset_statistics.json").write_text(json.dumps({"own_no_noops": STATISTICS["two"]}))
    found = read_published(tmp_path / "tuned", LONG)
    assert ranges(found, None) == ranges(found, "own") == ((-0.5, -1.0), (0.5, 1.0))
    with pytest.raises(ValueError, match=r"policy\.unnorm_key=bridge: .*Name one of own_no_noops"):
        ranges(found, "bridge")
    with pytest.raises(
        ValueError,
        match=r"policy\.unnorm_key: missing, and .* has statistics of several datasets\. Name one of seven, two",
    ):
        ranges(read_published(folder[0], LONG), None)
    write_folder(tmp_path / "bare", norm_stats=None)
    with pytest.raises(ValueError, match=r"Imitate episodes \(tether bc\)"):
        ranges(read_published(tmp_path / "bare", LONG), None)


def vit(mean=(0.5,) * 3, std=(0.25,) * 3, size=SIZE):
    return VitSpec(SIGLIP, size, 14, 48, 2, 40, 0, class_token=False, layer_scale=False, mean=mean, std=std)


def test_colours_are_normalised_for_each_vision_transformer():
    picture = torch.full((1, 3, SIZE, SIZE), 51.0)
    found = normalized(picture, vit(mean=(0.2, 0.1, 0.0), std=(0.5, 0.5, 0.1)), "resize-naive")
    torch.testing.assert_close(found[0, :, 3, 3], torch.tensor([0.0, 0.2, 2.0]))


def test_pictures_are_scaled_as_torchvision_does():
    """Of stripes that are averaged away, and of whole bytes."""
    picture = torch.zeros(1, 3, 4 * SIZE, 2 * SIZE)
    picture[:, :, ::2] = 200.0
    found = normalized(picture, vit(), "resize-naive") * 0.25 + 0.5
    assert found.shape == (1, 3, SIZE, SIZE)
    torch.testing.assert_close(found[0, :, 5:-5, 5:-5], torch.full((3, 18, 18), 100 / 255), atol=1.01 / 255, rtol=0)
    torch.testing.assert_close(found * 255, (found * 255).round())
    boxed = letterbox(torch.ones(1, 3, 4, 8), torch.tensor([7.0, 8.0, 9.0])[:, None, None])
    assert boxed.shape == (1, 3, 8, 8)
    assert boxed[0, :, 1, 0].tolist() == [7, 8, 9]
    assert boxed[0, :, 2:6].eq(1).all()


def test_the_middle_nine_tenths_are_cropped():
    """A ramp: its middle stays, and its corners are those of the part, sqrt(0.9) of each side."""
    ramp = torch.arange(101.0).expand(1, 3, 101, 101) * 2
    found = center_crop(ramp)[0, 0, 50]
    assert found[50] == 100
    assert found[0] == round(100 * (1 - math.sqrt(0.9)))
    assert found[-1] == round(100 * (1 + math.sqrt(0.9)))
    torch.testing.assert_close(center_crop(ramp.transpose(2, 3)), center_crop(ramp).transpose(2, 3))


@torch.no_grad()
def test_a_cropped_picture_is_read(folder):
    plain, cropped = make("openvla", folder[0]), make("openvla", folder[0], center_crop=True)
    obs = shown()
    middle = {**obs, "image": center_crop(obs["image"].permute(0, 3, 1, 2).float()).permute(0, 2, 3, 1).byte()}
    found = cropped.log_probs(cropped.inputs(obs), bins())
    torch.testing.assert_close(found, plain.log_probs(plain.inputs(middle), bins()))
    assert not torch.allclose(found, plain.log_probs(plain.inputs(obs), bins()))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_give_a_policy_back(kind, folder, tmp_path):
    policy = make(kind, folder[0], center_crop=True)
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert loaded.spec == policy.spec
    assert llama_config({**TEXT, "eos_token_id": (2, 3)}).eos_token_id == [2, 3]
    obs = policy.inputs(shown())
    assert torch.equal(loaded.outputs(obs, None, bins()), policy.outputs(obs, None, bins()))


def test_adapters_start_as_the_published_policy_and_are_written_back_merged(tmp_path):
    pytest.importorskip("peft")
    weights = write_folder(tmp_path / "half", dtype=torch.bfloat16)
    plain, adapted = make("openvla", tmp_path / "half"), make("openvla", tmp_path / "half", lora_rank=2)
    obs = plain.inputs(shown())
    torch.testing.assert_close(adapted.outputs(obs, None, bins()), plain.outputs(obs, None, bins()))
    trained = {id(value) for value in adapted.parameter_groups()[0]}
    names = {name for name, value in adapted.named_parameters() if id(value) in trained}
    assert names
    assert all("lora_" in name for name in names)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value += 0.3
    write_published(adapted, tmp_path / "half", tmp_path / "written")
    written = {}
    for file in sorted((tmp_path / "written").glob("*.safetensors")):
        written |= load_file(file)
    assert len({file.stat().st_mode for file in (tmp_path / "written").iterdir()}) == 1  # others can read them all
    assert written.keys() == weights.keys()
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    changed = {name for name, value in written.items() if not torch.equal(value, weights[name])}
    assert changed
    assert all(name.startswith("language_model.model.layers.") for name in changed)
    again = make("openvla", tmp_path / "written")
    assert ranges(read_published(tmp_path / "written", LONG), "tether") == ((-1.0, 0.0), (1.0, 3.0))
    torch.testing.assert_close(
        again.outputs(obs, None, bins()), adapted.outputs(obs, None, bins()), atol=0.05, rtol=0.05
    )


BAD = {
    "another model": ({"model_type": "llava"}, r"config\.json is of model_type llava; only openvla"),
    "another vision transformer": (
        {"timm_model_ids": ["vit_small_patch14_dinov2", SIGLIP]},
        r"timm_model_ids=vit_small_patch14_dinov2; supported: vit_large_patch14_reg4_dinov2\.lvd142m",
    ),
    "another language model": ({"text_config": TEXT | {"model_type": "qwen2"}}, r"text_config\.model_type=qwen2"),
    "other bins": ({"n_action_bins": 512}, r"n_action_bins=512; supported: 256"),
    "another way to scale": ({"image_resize_strategy": "resize-crop"}, r"image_resize_strategy=resize-crop"),
    "another number of sizes": ({"image_sizes": [SIZE]}, r"are of 2, 1, 2, 2 networks"),
    "no list of sizes": ({"image_sizes": None}, r"are of 2, 0, 2, 2 networks"),
    "another width": ({"text_config": TEXT | {"intermediate_size": 64}}, r"mlp\.\w+\.weight has the shape .*network"),
    "another size": ({"image_sizes": [42, SIZE]}, r"pos_embed has the shape \[1, 4, 32\], the network \[1, 9, 32\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_folders_that_are_not_supported_are_refused_by_name(case, folder, tmp_path):
    changes, message = BAD[case]
    path = copy_of(folder[0], tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        read_published(path, LONG)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"interpolations": ["bicubic", "nearest"]},
            r"preprocessor_config\.json has interpolations=nearest; .*bicubic",
        ),
        ({"image_resize_strategy": "letterbox"}, r"image_resize_strategy=letterbox; supported: resize-naive"),
        ({"means": None}, r"are of 2, 2, 0, 2 networks"),
    ],
)
def test_other_pictures_are_refused(changes, message, folder, tmp_path):
    path = copy_of(folder[0], tmp_path)
    pictures = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(pictures | changes))
    with pytest.raises(ValueError, match=message):
        read_published(path, LONG)


def test_the_published_sizes_have_the_published_number_of_parameters():
    """7,541,237,184, as OpenVLA's own fine-tuning says; what follows the second-to-last blocks is not read."""
    ids, widths, perceptrons, blocks = HEADS, (1024, 1152), (4096, 4304), (23, 26)
    vits = tuple(
        VitSpec(
            name, 224, 14, width, depth, mlp, registers=4 * first, class_token=first, layer_scale=first,
            mean=(0.5,) * 3, std=(0.5,) * 3,
        )
        for name, width, mlp, depth, first in zip(ids, widths, perceptrons, blocks, (True, False), strict=False)
    )  # fmt: skip
    text = {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064}
    with torch.device("meta"):
        parts = make_networks(Network(vits, text, 32000, 50, "", "resize-naive"))
    read = sum(value.numel() for part in parts for value in part.parameters())
    unread = 0
    for width, mlp, first in zip(widths, perceptrons, (True, False), strict=True):
        perceptron = 2 * width * mlp + mlp + width
        unread += 4 * width**2 + 4 * width + perceptron + 4 * width + 2 * width * first  # the last block
        unread += 2 * width  # the norm behind it
        unread += 0 if first else width + 4 * width**2 + 4 * width + 2 * width + perceptron  # SigLIP's pooling
    assert read + unread == 7_541_237_184


def copy_of(path, tmp_path):
    """A folder of links, of which some can be replaced."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", r"tokenizer\.json is missing"),
        ("preprocessor_config.json", r"preprocessor_config\.json is missing"),
        ("model-00002-of-00002.safetensors", r"1 of 2 files of weights missing: model-00002-of-00002"),
        ("model.safetensors.index.json", r"1 of 1 files of weights missing: model\.safetensors"),
    ],
)
def test_missing_files_are_named(name, message, folder, tmp_path):
    path = copy_of(folder[0], tmp_path)
    (path / name).unlink()
    with pytest.raises(ValueError, match=message):
        read_published(path, LONG)


def test_missing_and_unknown_weights_damaged_files_and_other_heads_are_named(folder, tmp_path):
    path = copy_of(folder[0], tmp_path)
    shard = path / "model-00001-of-00002.safetensors"
    weights = load_file(shard)
    gone = next(name for name in sorted(weights) if name.startswith("language_model.model.layers.1"))
    save_file({name: value for name, value in weights.items() if name != gone}, shard)
    with pytest.raises(
        ValueError, match=rf"1 weights missing, the first is {gone.replace('language_model', 'language')}"
    ):
        read_published(path, LONG)
    save_file(weights | {"action_head.weight": torch.zeros(3)}, shard)
    with pytest.raises(ValueError, match=r"weights that OpenVLA does not have, such as action_head\.weight"):
        read_published(path, LONG)
    shard.write_bytes(b"no weights")
    with pytest.raises(ValueError, match="damaged, or not safetensors"):
        read_published(path, LONG)
    save_file(weights, shard)
    (path / "action_head--150000_checkpoint.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"action_head--150000_checkpoint\.pt is a part that is not supported"):
        read_published(path, LONG)


def test_a_tokenizer_that_is_not_llamas_is_named(folder, tmp_path):
    path = copy_of(folder[0], tmp_path)
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace('"▁":', '"~":'))
    with pytest.raises(ValueError, match="has no token ▁ of a space"):
        Prompts(str(path), LONG)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        Prompts(str(path), LONG)


def test_the_inputs_of_no_observations(folder):
    policy = make("openvla", folder[0])
    empty = policy.inputs({name: value[:0] for name, value in shown().items()})
    assert empty[TOKENS].shape == (0, LONG)
    assert policy.values(empty).shape == (0, 1)
    assert COLOURS["means"][1] == list(policy.spec.network.vits[1].mean)
