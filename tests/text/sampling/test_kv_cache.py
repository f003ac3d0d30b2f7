"""The cache and its two layouts, against attention over plain whole sequences."""

import pytest
import torch
from torch import Tensor

from tether.kernels.causal_attention import AttentionSpec
from tether.text.models.layers import Packed
from tether.text.sampling.kv_cache import Decode, KVCache, Prefill

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, VALUE_SIZE = 6, 2, 4, 3
SPECS = {
    "plain": AttentionSpec(layer=0, scale=0.5),
    "window": AttentionSpec(layer=0, scale=0.5, sliding_window=3),
    "softcap": AttentionSpec(layer=0, scale=0.5, softcap=2.0),
    "window and softcap": AttentionSpec(layer=0, scale=0.5, sliding_window=3, softcap=2.0),
}


def random_tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, VALUE_SIZE))
    drawn = (torch.randn(1, h, count, d, dtype=torch.float64, generator=generator) for h, d in shapes)
    query, key, value = (x.bfloat16().double() for x in drawn)  # numbers of both dtypes
    return query, key, value


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("garbage", [0.0, 1e9, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_decoding_token_by_token_equals_whole_sequences(
    spec: AttentionSpec, garbage: float | None, dtype: torch.dtype, tolerance: float
) -> None:
    """Two sequences of 5 and 8 tokens: prompts of 2 and 5, then three decoding steps.

    Whatever finite numbers stand in unused places are never seen; without them (None) the cache grows as it goes.
    """
    query, key, value = random_tokens(13)
    whole = Packed((5, 8)).attend(query, key, value, spec)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    prompt = torch.tensor([0, 1, 5, 6, 7, 8, 9])
    cache = KVCache(num_slots=3, max_length=20, device=CPU)
    if garbage is not None:
        shape = (3, KV_HEADS, 20)
        cache._layers[0] = (key.new_full((*shape, SIZE), garbage), value.new_full((*shape, VALUE_SIZE), garbage))
    prefill = Prefill.plan(cache, lengths=[2, 5], copies=[1, 1], first_slot=0)
    out = prefill.attend(query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], spec)
    assert torch.allclose(out.double(), whole[:, :, prompt], atol=tolerance)
    for step in range(3):
        token = torch.tensor([2 + step, 10 + step])
        layout = Decode(cache, torch.tensor([2 + step, 5 + step]), length=6 + step)
        new = (x[0, :, token].transpose(0, 1).unsqueeze(2) for x in (query, key, value))
        out = layout.attend(*new, spec)
        assert torch.allclose(out[:, :, 0].transpose(0, 1).double(), whole[0, :, token], atol=tolerance)


def test_prefill_writes_each_prompt_to_all_its_slots() -> None:
    cache = KVCache(num_slots=5, max_length=6, device=CPU)
    layout = Prefill.plan(cache, lengths=[2, 3], copies=[3, 1], first_slot=1)
    assert layout.source.tolist() == [0, 1, 0, 1, 0, 1, 2, 3, 4]
    assert layout.slot.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert layout.position.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 2]


def test_move_copies_a_slot_in_every_layer() -> None:
    cache = KVCache(num_slots=3, max_length=4, device=CPU)
    slot, position = torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0])
    for layer in (0, 1):
        content = torch.arange(3.0).view(3, 1, 1) + 10 * layer
        cache.write(layer, slot, position, 1, content, -content)
    cache.move(torch.tensor([2]), torch.tensor([0]), length=1)
    for layer in (0, 1):
        keys, values = cache.read(layer, rows=3, length=1)
        assert (keys.flatten() - 10 * layer).tolist() == [2, 1, 2]
        assert torch.equal(values, -keys)


def test_capacity_follows_the_lengths_that_occur_up_to_the_limit() -> None:
    cache = KVCache(num_slots=1, max_length=200, device=CPU)
    capacities = []
    for position in (0, 64, 65, 131, 140, 199):
        token = torch.full((1, 1, 2), float(position))
        cache.write(0, torch.tensor([0]), torch.tensor([position]), position + 1, token, token)
        capacities.append(cache._layers[0][0].shape[2])
    assert capacities == [96, 96, 96, 224, 224, 224]  # of 32 at a time
    written = cache.read(0, rows=1, length=200)[0][0, 0, :, 0].tolist()
    assert written == [position if position in (0, 64, 65, 131, 140, 199) else 0 for position in range(200)]
