"""The networks of a vision-language-action policy: the invariants of their two ways to decode."""

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from tether.control.policies.spec import NUMBERS, PICTURE, TEXT
from tether.integrations.robots.vla.model import PictureEncoder, ValueHead, VlaModel
from tether.integrations.robots.vla.spec import ACTION_BINS, BEGIN, END, FIRST_BYTE, VlaSpec
from tether.observations import ObsPart

SPEC = {
    "layout": (
        ObsPart("hand", "vector", (4,)), ObsPart("image", "image", (8, 12, 3), "uint8"),
        ObsPart("task", "text", (5,), "uint8"),
    ),
    "action_width": 2, "low": (-1.0, -1.0), "high": (1.0, 1.0), "num_action_chunks": 3,
    "hidden_dim": 32, "num_layers": 3, "num_heads": 2,
    "temperature": 0.7,
}  # fmt: skip
KINDS = ("openvla", "openvla_oft")


def make(kind, **changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VlaModel(VlaSpec(model_type=kind, **SPEC | changes)).double()
        for parameter in model.parameters():  # ten times as wide as at the start, so that everything matters
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def inputs(rows=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    text = torch.randint(0, 128, (rows, 5), generator=generator, dtype=torch.uint8)
    picture = torch.randint(0, 256, (rows, 3, 8, 12), generator=generator, dtype=torch.uint8)
    bins = torch.randint(0, ACTION_BINS, (rows, 6), generator=generator)
    noise = torch.empty(rows, 6, ACTION_BINS, dtype=torch.float64).exponential_(generator=generator).log_().neg_()
    return TensorDict({NUMBERS: numbers, PICTURE: picture, TEXT: text}, batch_size=[rows]), bins, noise


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_was_sampled_one_by_one_scores_alike_in_one_pass(kind):
    model = make(kind)
    obs, _, noise = inputs()
    prompt = model.prompt(obs)
    chosen = model.choose(prompt, noise)
    scores, _ = model(prompt, chosen)
    assert torch.equal((scores + noise).argmax(-1), chosen)
    assert torch.equal(model.choose(prompt, None), model(prompt, model.choose(prompt, None))[0].argmax(-1))


@torch.no_grad()
def test_cached_steps_are_the_whole_pass():
    model = make("openvla")
    obs, bins, _ = inputs()
    prompt = model.prompt(obs)
    scores, _ = model(prompt, bins)
    for count in range(bins.shape[1]):  # by hand: the whole sequence so far, each time from its beginning
        tokens = model.language.get_input_embeddings()(model.spec.vocab_size - 1 - bins[:, :count])
        out = model.language(inputs_embeds=torch.cat([prompt.embedded, tokens], dim=1)).logits[:, -1]
        by_id = out[:, model.spec.vocab_size - 1 - torch.arange(ACTION_BINS)] / 0.7
        torch.testing.assert_close(scores[:, count], by_id)


@torch.no_grad()
def test_later_tokens_change_nothing_before_them():
    model = make("openvla")
    obs, bins, _ = inputs()
    prompt = model.prompt(obs)
    other = bins.clone()
    other[:, 2] = (other[:, 2] + 100) % ACTION_BINS
    (one, _), (two, _) = model(prompt, bins), model(prompt, other)
    torch.testing.assert_close(one[:, :3], two[:, :3])
    assert (one[:, 3:] - two[:, 3:]).abs().max() > 1e-3


@torch.no_grad()
def test_parallel_decoding_does_not_depend_on_the_tokens():
    model = make("openvla_oft")
    obs, bins, _ = inputs()
    prompt = model.prompt(obs)
    (one, _), (two, _) = model(prompt, bins), model(prompt, (bins + 1) % ACTION_BINS)
    assert torch.equal(one, two)
    assert (one[:, 0] - one[:, 1]).abs().max() > 1e-3  # but tokens differ from each other


@torch.no_grad()
def test_parallel_decoding_starts_with_placeholders_of_zero():
    with torch.random.fork_rng(devices=[]):
        model = VlaModel(VlaSpec(model_type="openvla_oft", **SPEC))
    assert model.placeholders is not None
    assert model.placeholders.shape == (5, 32)
    assert not model.placeholders.any()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_value_sees_the_prompt_alone(kind):
    model = make(kind)
    obs, bins, _ = inputs()
    prompt = model.prompt(obs)
    alone = model.end_of_prompt(prompt)
    for given in (bins, (bins + 7) % ACTION_BINS):
        torch.testing.assert_close(model(prompt, given)[1], alone)


@pytest.mark.parametrize("change", ["picture", "number", "text"])
@torch.no_grad()
def test_every_part_of_the_prompt_is_read(change):
    model = make("openvla")
    obs, bins, _ = inputs()
    before, _ = model(model.prompt(obs), bins)
    if change == "picture":
        obs[PICTURE] = 255 - obs[PICTURE]
    else:
        obs[NUMBERS if change == "number" else TEXT][:, 3] += 1
    after, _ = model(model.prompt(obs), bins)
    assert (before - after).abs().amax((1, 2)).min() > 1e-3


@torch.no_grad()
def test_the_prompt_is_what_it_is_said_to_be():
    model = make("openvla")
    obs, _, _ = inputs()
    prompt = model.prompt(obs).embedded
    embed = model.language.get_input_embeddings().weight
    pictures = 2 * 3  # 8 x 12, halved twice
    assert prompt.shape == (5, 1 + pictures + 1 + 5 + 1, 32)
    assert torch.equal(prompt[0, 0], embed[BEGIN])
    assert torch.equal(prompt[0, -1], embed[END])
    assert torch.equal(prompt[3, -4], embed[FIRST_BYTE + int(obs[TEXT][3, 2])])


@torch.no_grad()
def test_samples_follow_the_probabilities():
    model = make("openvla", num_action_chunks=1, action_width=1, low=(0.0,), high=(1.0,))
    obs, bins, _ = inputs(rows=1)
    prompt = model.prompt(obs)
    probabilities = model(prompt, bins[:, :1])[0].softmax(-1)[0, 0]
    noise = torch.empty(25_000, 1, ACTION_BINS, dtype=torch.float64)
    noise = noise.exponential_(generator=torch.Generator().manual_seed(0)).log_().neg_()
    chosen = model.choose(prompt, None)  # one row; its scores serve all draws
    assert chosen.shape == (1, 1)
    scores = model(prompt, chosen)[0]
    counts = torch.bincount((scores + noise).argmax(-1).flatten(), minlength=ACTION_BINS) / len(noise)
    torch.testing.assert_close(counts.double(), probabilities, atol=0.01, rtol=0)


def test_action_tokens_are_the_last_ids_and_no_other_is_scored():
    model = make("openvla")
    assert isinstance(model.language, LlamaForCausalLM)
    head = model.language.get_output_embeddings().weight
    assert head.shape[0] == model.spec.vocab_size == 2 + 256 + 256
    hidden = torch.zeros(1, 32, dtype=torch.float64)
    hidden[0, 0] = 1.0
    scores = model.scores(hidden)[0] * 0.7
    torch.testing.assert_close(scores, head.flip(0)[:ACTION_BINS, 0])


@pytest.mark.parametrize(("picture", "tokens"), [((3, 32, 32), 16), ((3, 7, 7), 16), ((1, 3, 3), 4), ((4, 64, 48), 12)])
def test_pictures_of_any_size(picture, tokens):
    assert PictureEncoder(picture, 8)(torch.zeros(2, *picture, dtype=torch.uint8)).shape == (2, tokens, 8)


def test_the_value_head_is_rlinfs():
    head = ValueHead(16, 3)
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [
        (512, 16), (512,), (128, 512), (128,), (3, 128),
    ]  # fmt: skip
    assert head.layers[-1].weight.std().item() == pytest.approx(0.02, rel=0.3)
