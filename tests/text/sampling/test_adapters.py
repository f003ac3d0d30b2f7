"""Sampling with LoRA: adapters are merged into a copy, by the fast forward, and follow each update."""

import pytest
import torch
from transformers import PreTrainedModel

from tests.text.models.test_lora import trained_lora
from tests.text.sampling.test_native import KEY, NO_EOS, PROMPTS
from tests.tiny import tiny_model
from tether.batch import TrainBatch, WeightUpdate
from tether.text.learning.losses import PolicyForward
from tether.text.models import lora
from tether.text.sampling.decoder import Decoder
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import SamplingParams

SAMPLING = SamplingParams(8)
TOLERANCE = {torch.float64: 1e-9, torch.bfloat16: 0.06}
"""Mean difference of a token's log-prob; in bfloat16 to a trainer in float32."""


def mismatch(engine: NativeEngine, policy: PreTrainedModel) -> float:
    """The mean difference between the sampler's log-probs and those of the model with its adapters, as trained."""
    rollout = engine.generate(PROMPTS, SAMPLING, KEY)
    with torch.no_grad():
        scored = PolicyForward()(policy, TrainBatch.assemble(rollout, torch.zeros(len(rollout)))).log_probs
    return float((scored - rollout.rollout_log_probs)[rollout.response_mask].abs().mean())


@pytest.mark.usefixtures("compiled_kernels")
def test_the_sampler_has_the_probabilities_of_the_adapters_after_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine shares the trained weights, and where it has a copy of them in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in TOLERANCE.items():
        policy = trained_lora(tiny_model("qwen2", dtype=torch.float64 if dtype == torch.float64 else torch.float32))
        engine = NativeEngine(policy, eos_token_ids=NO_EOS, dtype=dtype)
        assert mismatch(engine, policy) <= tolerance
        assert isinstance(engine._forward, Decoder)  # not by transformers' own
        frozen = {name: p.clone() for name, p in policy.named_parameters() if "lora_" not in name}
        for version in (1, 2):
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_B" in name:
                        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            engine.load_weights(WeightUpdate(version, policy.state_dict().items()))
            assert mismatch(engine, policy) <= tolerance
        assert all(policy.get_parameter(name).equal(value) for name, value in frozen.items())  # merged elsewhere
        with monkeypatch.context() as patch:  # the negative control: adapters of the last update are forgotten
            patch.setattr(lora, "merge_adapters", lambda model, plain: None)
            with torch.no_grad():
                policy.model.layers[0].self_attn.v_proj.lora_B["default"].weight.mul_(-3)
            engine.load_weights(WeightUpdate(3, policy.state_dict().items()))
            assert mismatch(engine, policy) > 2 * tolerance


def test_layers_without_an_adapter_share_their_memory() -> None:
    policy = trained_lora(tiny_model("qwen2"), lora.LoraOptions(rank=2, target_modules=("q_proj",)))
    plain = lora.merged_copy(policy)
    assert plain.state_dict().keys() == tiny_model("qwen2").state_dict().keys()
    own = {
        name for name, p in plain.named_parameters() if p.data_ptr() not in {q.data_ptr() for q in policy.parameters()}
    }
    assert own == {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)}
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    lora.merge_adapters(policy, plain)
    expected = lora.merged_state_dict(policy)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, expected[name])
