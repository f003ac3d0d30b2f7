"""Log-probs and entropy: against the plain formula, for every chunking, and without a [tokens, vocabulary] tensor."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from tests.tiny import TINY_CONFIGS, tiny_model
from tether.kernels import dispatch
from tether.text.models.output import LmHead, LogProbs, lm_head_of, logits_of, token_log_probs
from tether.text.models.truncation_record import KeptRecorder, KeptSets

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 2.0, "softcap": 3.0},
}


def make_head(vocab: int, size: int, *, bias: bool = False, dtype=torch.float64, **rest) -> LmHead:
    weight = torch.randn(vocab, size, dtype=dtype).requires_grad_()
    return LmHead(weight, torch.randn(vocab, dtype=dtype).requires_grad_() if bias else None, **rest)


def kept_sets(kept) -> KeptSets:
    """From [N, V]: each position is the only one of its row."""
    rows = torch.arange(len(kept))
    recorder = KeptRecorder(len(kept), 1, kept.shape[1], kept.device)
    recorder.add(rows, torch.zeros_like(rows), kept)
    return KeptSets.read(recorder.result(1), rows, kept.shape[1])


def plain(hidden, head, targets, temperature, kept=None) -> LogProbs:
    """The formulas as one writes them down."""
    z = logits_of(hidden, head) / temperature
    log_p = (z if kept is None else z.masked_fill(~kept, -torch.inf)).log_softmax(-1)
    p = log_p.exp()
    finite = log_p if kept is None else log_p.masked_fill(~kept, 0.0)
    return LogProbs(log_p.gather(1, targets[:, None])[:, 0], -(p * finite).sum(-1), (p * p).sum(-1))


def test_numbers_worked_by_hand():
    head = LmHead(torch.tensor([[math.log(1.0)], [math.log(2.0)], [math.log(5.0)]], dtype=torch.float64))
    out = token_log_probs(
        torch.ones(2, 1, dtype=torch.float64),
        head,
        torch.tensor([0, 2]),
        with_entropy=True,
        with_sum_pi_squared=True,
        chunk_size=2,
    )
    assert torch.allclose(out.log_probs.exp(), torch.tensor([1 / 8, 5 / 8], dtype=torch.float64), rtol=1e-14)
    entropy = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    assert torch.allclose(out.entropy, torch.full((2,), entropy, dtype=torch.float64), rtol=1e-14)
    assert torch.allclose(out.sum_pi_squared, torch.full((2,), 30 / 64, dtype=torch.float64), rtol=1e-14)


def some_kept(targets, vocab):
    """From the target alone to all but a few; few are stored as ids, many as a bit mask."""
    shares = torch.tensor([0.0, 0.02, 0.03, 0.1, 0.5, 0.95, 0.02])
    return (torch.rand(7, vocab) < shares[:, None]).scatter(1, targets[:, None], True)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_size", [1, 5, 33, 100])
@pytest.mark.parametrize("cut", [False, True])
def test_values_and_gradients_equal_the_plain_formula(kind, chunk_size, cut):
    torch.manual_seed(0)
    head = make_head(70, 4, **HEADS[kind])
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(70, (7,))
    kept = some_kept(targets, 70) if cut else None
    leaves = [hidden, head.weight, *([head.bias] if head.bias is not None else [])]
    g, h = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    ours = token_log_probs(
        hidden,
        head,
        targets,
        temperature=0.7,
        candidates=None if kept is None else kept_sets(kept),
        with_entropy=True,
        with_sum_pi_squared=True,
        chunk_size=chunk_size,
    )
    want = plain(hidden, head, targets, 0.7, kept)
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        assert torch.allclose(getattr(ours, name), getattr(want, name), rtol=1e-12, atol=1e-13), name
    assert not ours.sum_pi_squared.requires_grad
    for loss in (lambda o: o.log_probs @ g, lambda o: o.entropy @ h, lambda o: o.log_probs @ g + o.entropy @ h):
        got = torch.autograd.grad(loss(ours), leaves, retain_graph=True)
        expected = torch.autograd.grad(loss(want), leaves, retain_graph=True)
        for a, b in zip(got, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", HEADS)
def test_gradcheck(kind):
    torch.manual_seed(1)
    head = make_head(6, 3, **HEADS[kind])
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 3, 3])

    def run(hidden, weight, *bias):
        head_ = LmHead(weight, bias[0] if bias else None, head.scale, head.softcap)
        out = token_log_probs(hidden, head_, targets, temperature=1.3, with_entropy=True, chunk_size=4)
        return out.log_probs, out.entropy

    assert torch.autograd.gradcheck(run, (hidden, head.weight, *([head.bias] if head.bias is not None else [])))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 40), st.integers(1, 45), st.integers(0, 2**16), st.floats(0.0, 300.0))
def test_chunking_is_invisible(tokens, vocab, chunk_size, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 3, generator=generator, dtype=torch.float64) * spread  # large logits must not overflow
    head = LmHead(torch.randn(vocab, 3, generator=generator, dtype=torch.float64))
    targets = torch.randint(vocab, (tokens,), generator=generator)
    one, many = (
        token_log_probs(hidden, head, targets, with_entropy=True, with_sum_pi_squared=True, chunk_size=size)
        for size in (vocab, chunk_size)
    )
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        assert torch.allclose(getattr(one, name), getattr(many, name), rtol=1e-12, atol=1e-12), name


def test_frozen_parts_get_no_gradient():
    head = LmHead(torch.randn(9, 3))
    hidden = torch.randn(4, 3, requires_grad=True)
    token_log_probs(hidden, head, torch.zeros(4, dtype=torch.long)).log_probs.sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is None


def test_no_tokens():
    head = make_head(9, 3)
    hidden = torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
    out = token_log_probs(hidden, head, torch.zeros(0, dtype=torch.long), with_entropy=True)
    (out.log_probs.sum() + out.entropy.sum()).backward()
    assert out.log_probs.shape == (0,)
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("chunk_size", [7, 70, 100])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_bfloat16_logits_with_and_without_kernels(monkeypatch, with_kernels, chunk_size, scale):
    """Against the formula in float64 of the very logits that the bfloat16 product gives."""
    if not with_kernels:
        monkeypatch.setattr(dispatch, "backend", lambda *_: dispatch.REFERENCE)
    torch.manual_seed(3)
    hidden = (2 * torch.randn(9, 4)).bfloat16().requires_grad_()
    weight = torch.eye(4).repeat(18, 1)[:70].mul(torch.randn(70, 1)).bfloat16().requires_grad_()  # exact products
    targets = torch.randint(70, (9,))
    options = {"temperature": 0.7, "with_entropy": True, "with_sum_pi_squared": True}
    ours = token_log_probs(hidden, LmHead(weight, scale=scale), targets, chunk_size=chunk_size, **options)
    rounded = (hidden @ weight.T).double().detach().requires_grad_()
    identity = torch.eye(70, dtype=torch.float64)
    want = plain(rounded, LmHead(identity, scale=scale), targets, 0.7)
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        assert torch.allclose(getattr(ours, name).double(), getattr(want, name), rtol=1e-5, atol=2e-6), name
    g, h = torch.randn(9), torch.randn(9)
    (grad,) = torch.autograd.grad(want.log_probs @ g.double() + want.entropy @ h.double(), rounded)
    found = torch.autograd.grad(ours.log_probs @ g + ours.entropy @ h, (hidden, weight))
    expected = (grad @ weight.double(), grad.T @ hidden.double())
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()


def test_autocast_uses_bfloat16_matmuls_and_float32_sums():
    torch.manual_seed(2)
    head = make_head(300, 16, dtype=torch.float32)
    hidden = torch.randn(20, 16, requires_grad=True)
    targets = torch.randint(300, (20,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = token_log_probs(hidden, head, targets, with_entropy=True, chunk_size=64)
    low = token_log_probs(hidden.bfloat16(), LmHead(head.weight.bfloat16()), targets, with_entropy=True, chunk_size=64)
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32
    assert torch.equal(out.log_probs, low.log_probs)
    assert torch.equal(out.entropy, low.entropy)
    exact = plain(hidden, head, targets, 1.0)
    assert (out.log_probs - exact.log_probs).abs().max() < 0.1
    got = torch.autograd.grad(out.log_probs.sum(), (hidden, head.weight))
    want = torch.autograd.grad(exact.log_probs.sum(), (hidden, head.weight))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 0.02


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives back."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, tuple | list) else [out]
        self.numel = max(self.numel, *(t.numel() for t in tensors if isinstance(t, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_no_tensor_of_tokens_times_vocabulary_forward_or_backward(softcap, cut):
    tokens, vocab, size, chunk = 64, 1000, 8, 100
    head = LmHead(torch.randn(vocab, size, requires_grad=True), softcap=softcap)
    hidden = torch.randn(tokens, size, requires_grad=True)
    kept = kept_sets(torch.rand(tokens, vocab) < torch.linspace(0.01, 0.5, tokens)[:, None]) if cut else None
    with LargestTensor() as seen:
        out = token_log_probs(hidden, head, torch.arange(tokens), candidates=kept, with_entropy=True, chunk_size=chunk)
        (out.log_probs.sum() + out.entropy.sum()).backward()
    assert seen.numel == max(tokens * chunk, vocab * size)  # a chunk, or the weight's gradient


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_head_of_real_classes_gives_the_models_own_logits(name):
    model = tiny_model(name, dtype=torch.float64)
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        logits = model(ids).logits[0]
        hidden = model.base_model(ids).last_hidden_state[0]
        head = lm_head_of(model)
        assert torch.allclose(logits_of(hidden, head), logits, rtol=1e-12, atol=1e-12)
        ours = token_log_probs(hidden, head, ids[0], chunk_size=77).log_probs
    assert torch.allclose(ours, logits.log_softmax(-1).gather(1, ids[0, :, None])[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [CohereConfig(logit_scale=0.0625), GraniteConfig(logits_scaling=8.0)])
def test_scaled_heads(config):
    for key, value in {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}.items():
        setattr(config, key, value)
    config.num_attention_heads = config.num_key_value_heads = 2
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    ids = torch.arange(4, 12)[None]
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        assert torch.allclose(logits_of(hidden, lm_head_of(model)), model(ids).logits, rtol=1e-12)


def test_a_head_that_is_not_linear_is_refused():
    model = tiny_model("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="LlamaForCausalLM: its output head is Sequential"):
        lm_head_of(model)
