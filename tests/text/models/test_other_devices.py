"""Forward passes with fake CUDA tensors: an operation that meets a tensor on another device fails.

Nothing is computed, so this runs without a GPU; it says where tensors are, not what is in them. A PyTorch without CUDA
cannot record gradients for such tensors.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from tests.tiny import VOCAB_SIZE, tiny_model
from tether.kernels import causal_attention, dispatch
from tether.text.models.layers import Packed, use_tether_attention
from tether.text.models.output import hidden_states, lm_head_of, token_log_probs
from tether.text.sampling.decoder import Decoder
from tether.text.sampling.generation import sample_tokens
from tether.text.sampling.kv_cache import Decode, KVCache, Prefill
from tether.text.sampling.protocol import SamplingParams

CUDA = torch.device("cuda:0")
MODELS = ("llama", "qwen3", "gemma2")


INSTEAD = {Tensor.copy_: torch.ops.aten.copy_, Tensor.__invert__: torch.ops.aten.bitwise_not}


class WithoutCuda(TorchFunctionMode):
    """A PyTorch that is built without CUDA refuses ``x[..]`` of a fake CUDA tensor, but not what it comes to."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            view, indices = viewed(*args)
            return torch.ops.aten.index(view, indices) if indices else view
        if func is Tensor.__setitem__:
            view, indices = viewed(*args[:2])
            value = args[2] if isinstance(args[2], Tensor) else view.new_full((), args[2])
            return torch.ops.aten.index_put_(view, indices, value) if indices else torch.ops.aten.copy_(view, value)
        if func in INSTEAD:
            return INSTEAD[func](*args)
        return func(*args, **(kwargs or {}))


def viewed(x: Tensor, key: object) -> tuple[Tensor, list[Tensor | None]]:
    """x with all of the key but its tensors applied, and these by dimension."""
    keys, indices = list(key if isinstance(key, tuple) else (key,)), []
    if any(k is Ellipsis for k in keys):
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        missing = x.dim() - sum(k is not None and k is not Ellipsis for k in keys)
        keys[at : at + 1] = [slice(None)] * missing
    for k in keys:
        if isinstance(k, int):
            x = x.select(len(indices), k)
            continue
        if k is None:
            x = x.unsqueeze(len(indices))
        elif isinstance(k, slice):
            x = torch.ops.aten.slice(x, len(indices), k.start, k.stop, k.step or 1)
        indices.append(k if isinstance(k, Tensor) else None)
    return x, indices if any(k is not None for k in indices) else []


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dispatch.backend.cache_clear()
    monkeypatch.setattr(
        "tether.kernels.cuda.backend.find_spec", lambda _: None
    )  # a real kernel would read their memory
    with FakeTensorMode(), WithoutCuda(), torch.no_grad():
        yield
    dispatch.backend.cache_clear()
    causal_attention.padded_batches.cache_clear()  # they would be found by the next test, in another mode


def model_on_cuda(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    with CUDA, no_init_weights():
        model = tiny_model(name, dtype=dtype)
    use_tether_attention(model)
    assert all(parameter.device == CUDA for parameter in model.parameters())
    return model


def forward(model: PreTrainedModel, ids: Tensor) -> Tensor:
    layout = Packed((3, 2, 1), (None, 0, 0))
    hidden = hidden_states(model, ids, layout.position_ids(CUDA), layout)
    found = token_log_probs(hidden, lm_head_of(model), zeros(6), with_entropy=True, with_sum_pi_squared=True)
    return found.log_probs.sum() + found.entropy.sum()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_stays_on_cuda(name: str, dtype: torch.dtype, fake_cuda: None) -> None:
    model = model_on_cuda(name, dtype)
    assert dispatch.kernels_for(*model.parameters()).name == "cuda"
    assert forward(model, zeros(1, 6)).device == CUDA


@pytest.mark.parametrize("name", MODELS)
def test_prefill_decoding_and_sampling_stay_on_cuda(name: str, fake_cuda: None) -> None:
    decoder = Decoder(model_on_cuda(name))
    cache = KVCache(num_slots=3, max_length=20, device=CUDA)
    prefill = Prefill(cache, Packed((2, 3)), *(zeros(8) for _ in range(3)))
    decoder(zeros(1, 5), prefill.packed.position_ids(CUDA), prefill, None)
    position = torch.full((3,), 3, device=CUDA)
    logits = decoder(zeros(3, 1), position.unsqueeze(1), Decode(cache, position, length=4), None)
    assert (logits.device, logits.shape) == (CUDA, (3, VOCAB_SIZE))
    drawn = sample_tokens(logits, torch.zeros(3, dtype=torch.float64, device=CUDA), SamplingParams(1))
    assert drawn.token.device == drawn.log_prob.device == CUDA


@pytest.mark.parametrize("left_behind", ["ids", "weight of a norm", "weight of the head"])
def test_a_tensor_on_another_device_fails(left_behind: str, fake_cuda: None) -> None:
    """The negative control."""
    model, ids = model_on_cuda("llama"), zeros(1, 6)
    if left_behind == "ids":
        ids = ids.cpu()
    else:
        module = model.base_model.norm if "norm" in left_behind else model.lm_head
        module.weight = torch.nn.Parameter(torch.ones(module.weight.shape, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="cpu"):
        forward(model, ids)
