"""Master weights: what computes in bfloat16, what stays float32, and that neither ties nor saving are lost."""

import torch

from tests.tiny import tiny_model
from tests.training.batches import make_batch, make_critic, make_policy, same_bits
from tether.models.attention import use_tether_attention
from tether.models.critic import value_head_of
from tether.training.forward import PolicyModel
from tether.training.losses import PolicyLoss
from tether.training.master import MasterWeights
from tether.training.protocol import LossSizes


def test_a_critics_head_stays_float32() -> None:
    critic = make_critic().float()
    masters = MasterWeights(critic, torch.bfloat16)
    assert {p.dtype for p in critic.base_model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in value_head_of(critic).parameters()} == {torch.float32}
    assert {p.dtype for p in masters.parameters()} == {torch.float32}
    assert len(masters.parameters()) == len(list(critic.parameters()))


def test_gradients_of_two_passes_add_up_in_float32() -> None:
    batch = make_batch(make_policy(), make_critic())
    policy = make_policy(dtype=torch.float32)
    masters = MasterWeights(policy, torch.bfloat16)

    def backward() -> None:
        PolicyLoss()(PolicyModel(policy)(batch), batch, LossSizes(30, 8)).loss.backward()

    backward()
    once = [p.grad.clone() for p in masters.parameters()]
    backward()
    for parameter, first in zip(masters.parameters(), once, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, 2 * first)
    assert all(p.grad is None for p in policy.parameters())


def test_frozen_and_tied_parameters() -> None:
    model = tiny_model("qwen2")  # its head is tied to its embedding
    use_tether_attention(model)
    model.base_model.norm.weight.requires_grad_(False)
    masters = MasterWeights(model, torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(masters.parameters()) == len(list(model.parameters())) - 1
    assert model.base_model.norm.weight.dtype == torch.bfloat16


def test_saving_sees_the_masters_bit_for_bit() -> None:
    exact = {name: tensor.clone() for name, tensor in tiny_model("llama").state_dict().items()}
    model = tiny_model("llama")
    masters = MasterWeights(model, torch.bfloat16)
    narrow = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with masters.installed():
        assert same_bits(dict(model.state_dict()), exact)
    assert same_bits(dict(model.state_dict()), narrow)
