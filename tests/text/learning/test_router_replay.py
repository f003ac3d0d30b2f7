"""Experts that an earlier pass chose are chosen again, in one process: nothing else changes, and no way to cut rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.ranks import on_ranks
from tests.text.learning.batches import gradients, make_batch, make_critic, make_engine, same_bits
from tests.text.learning.replayed import REPLAYING, any_experts, in_shards, make_mixture
from tests.text.learning.test_fsdp import FOUR_ROWS, LOSS, ONE_ROW, TOKENS, distance
from tests.tiny import MOE, tiny_model
from tether.batch import TrainBatch
from tether.loop.engine import LossSpec
from tether.text.learning.losses import PolicyForward, PolicyLoss, PolicyOutputs, ReferenceModel
from tether.text.learning.packing import MicroBatching, token_rows
from tether.text.models.expert_choice import ExpertChoice, experts_per_token, follow_choice, recorded_choice
from tether.text.models.layers import Packed, enable_gradient_checkpointing, use_tether_attention
from tether.text.models.lora import LoraOptions, adapter_off, add_lora
from tether.text.models.output import hidden_states

PADDED = MicroBatching(max_rows=2, packed=False)


def outputs(model: PreTrainedModel, batch: TrainBatch, experts: str, *, packed: bool = True) -> PolicyOutputs:
    with torch.no_grad():
        found: PolicyOutputs = PolicyForward(packed=packed, experts=experts)(model, batch)  # type: ignore[arg-type]
    return found


def with_recorded(model: PreTrainedModel, batch: TrainBatch) -> TrainBatch:
    """The batch after its old log-probs were computed and the experts kept (R2)."""
    kept = batch.clone()
    kept.routed_experts = outputs(model, batch, "recorded").routed_experts
    return kept


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model after an update that sends tokens to other experts."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", MOE)
def test_a_models_own_choice_changes_no_bit(name: str, packed: bool) -> None:
    model = make_mixture(name)
    batch = make_batch(model, make_critic())
    own, recorded = outputs(model, batch, "chosen", packed=packed), outputs(model, batch, "recorded", packed=packed)
    assert torch.equal(own.log_probs, recorded.log_probs)
    batch.routed_experts = recorded.routed_experts
    assert torch.equal(own.log_probs, outputs(model, batch, "replayed", packed=packed).log_probs)
    batch.routed_experts = torch.where(batch.routed_experts >= 0, 3 - batch.routed_experts, -1)
    assert not torch.allclose(own.log_probs, outputs(model, batch, "replayed", packed=packed).log_probs, atol=0.1)


@pytest.mark.parametrize("name", MOE)
def test_gradients_of_a_models_own_choice_are_the_same_bits(name: str) -> None:
    batch = with_recorded(make_mixture(name), make_batch(make_mixture(name), make_critic()))
    found = []
    for loss in (LOSS, REPLAYING):
        engine = make_engine(make_mixture(name), FOUR_ROWS)
        engine.accumulate_gradients(batch, loss)
        found.append(gradients(engine.model))
    assert same_bits(*found)


@pytest.mark.parametrize("name", MOE)
def test_the_choice_outlasts_an_update_and_its_weights_do_not(name: str) -> None:
    model = make_mixture(name)
    batch = with_recorded(model, make_batch(model, make_critic()))
    free = outputs(moved(model), batch, "recorded").routed_experts
    assert (free != batch.routed_experts).float().mean() > 0.05
    rows = token_rows(batch, packed=True, experts="replayed")
    choice = ExpertChoice(rows.experts, records=True)
    with torch.no_grad():
        hidden_states(model, rows.input_ids, rows.position_ids, rows.layout, choice)
    assert torch.equal(rows.by_row(recorded_choice(model, choice)), batch.routed_experts)
    engine = make_engine(model, FOUR_ROWS)
    engine.accumulate_gradients(batch, REPLAYING)
    gates = {name: grad for name, grad in gradients(model).items() if name.endswith("mlp.gate.weight")}
    assert gates
    assert all(grad.norm() > 0 for grad in gates.values())


@pytest.mark.parametrize("name", MOE)
def test_replay_is_the_formula(name: str) -> None:
    """A layer's experts by hand: the scores of the given ones, normalised where the model does so."""
    model = make_mixture(name, num_hidden_layers=2)
    ids = torch.arange(9)[None] * 7 + 4
    layout = Packed((9,))
    experts = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(n))[:2] for n in range(18)])
    choice = ExpertChoice(experts.view(9, 2, 2).to(torch.int16))
    follow_choice(model)
    seen: list[Any] = []
    gate = model.model.layers[1].mlp.gate
    gate.register_forward_hook(lambda _, given, out: seen.append((given[0], out)))
    hidden_states(model, ids, layout.position_ids(), layout, choice)
    states, (_, weights, chosen) = seen[0]
    logits = (states.view(9, -1) @ gate.weight.T).float() if name == "deepseek_v3" else states @ gate.weight.T
    scores = logits.sigmoid() if name == "deepseek_v3" else logits.float().softmax(-1)
    expected = scores.gather(1, experts.view(9, 2, 2)[:, 1])
    if name != "qwen2_moe":
        expected = expected / expected.sum(-1, keepdim=True)
    expected = expected * getattr(model.config, "routed_scaling_factor", 1.0)
    assert torch.equal(chosen, experts.view(9, 2, 2)[:, 1])
    torch.testing.assert_close(weights.double(), expected.double(), rtol=1e-5, atol=1e-7)


def test_no_way_to_cut_rows_changes_the_gradient() -> None:
    batch = any_experts(make_batch(make_mixture(), make_critic()), layers=2)

    def replayed(micro: MicroBatching | None, recomputed: bool = False) -> dict[str, Tensor]:
        model = make_mixture()
        if recomputed:
            enable_gradient_checkpointing(model)
        forward = PolicyForward(packed=micro is not PADDED, with_entropy=True, experts="replayed")
        make_engine(model, micro).accumulate_gradients(
            batch, LossSpec(forward, PolicyLoss(entropy_coeff=0.03, kl_coef=0.2))
        )
        return gradients(model)

    whole, free = replayed(None), make_engine(make_mixture(), FOUR_ROWS)
    for micro, recomputed in ((ONE_ROW, False), (FOUR_ROWS, True), (TOKENS, True), (PADDED, False)):
        assert distance(replayed(micro, recomputed), whole) < 1e-7, micro
    free.accumulate_gradients(batch, LOSS)
    assert distance(gradients(free.model), whole) > 1e-2


def test_a_reference_in_the_same_model_chooses_by_itself() -> None:
    """Also while the policy's layers wait to be recomputed."""
    batch = any_experts(make_batch(make_mixture(), make_critic()), layers=2)
    found = []
    for recomputes in (False, True):
        model = make_mixture()
        torch.manual_seed(0)
        add_lora(model, LoraOptions(rank=2, alpha=4))
        if recomputes:
            enable_gradient_checkpointing(model)
        reference = ReferenceModel(model, inference_context=adapter_off)
        forward = PolicyForward(with_full_kl=True, experts="replayed")
        engine = make_engine(model, FOUR_ROWS, reference=reference)
        engine.accumulate_gradients(batch, LossSpec(forward, PolicyLoss(kl_coef=0.2, kl_kind="full")))
        found.append(gradients(model))
    assert max(float((found[1][name] - grad).abs().max()) for name, grad in found[0].items()) < 1e-7
    assert max(float(grad.abs().max()) for grad in found[0].values()) > 1e-3
    with torch.no_grad(), adapter_off(model):
        plain = PolicyForward()(model, batch).log_probs
        again = PolicyForward(with_full_kl=True, experts="replayed")(model, batch, reference)
    assert again.full_kl.abs().max() > 1e-2  # the policy replays, the reference does not
    assert not torch.allclose(again.log_probs, plain)


@pytest.mark.parametrize("sharding", [{}, {"sequence": 2}], ids=["rows on each rank", "ranks share rows"])
def test_shards_replay_as_one_process_does(sharding: dict[str, int], tmp_path: Path) -> None:
    found = on_ranks(tmp_path, 2, in_shards, sharding)
    assert max(found["replayed"].values()) < 1e-7 < 1e-2 < found["chosen"]
    assert found["recorded"]


def test_tokens_without_a_choice_are_the_routers() -> None:
    model = make_mixture()
    batch = with_recorded(model, make_batch(model, make_critic()))
    own = outputs(model, batch, "chosen")
    batch.routed_experts = torch.full_like(batch.routed_experts, -1)
    assert torch.equal(own.log_probs, outputs(model, batch, "replayed").log_probs)
    batch.routed_experts = None
    assert torch.equal(own.log_probs, outputs(model, batch, "replayed").log_probs)


def test_a_copy_and_a_pickle_replay_too(tmp_path: Path) -> None:
    model = make_mixture()
    batch = any_experts(make_batch(model, make_critic()), layers=2)
    expected = outputs(model, batch, "replayed").log_probs
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(outputs(loaded, batch, "replayed").log_probs, expected)
    assert torch.equal(outputs(loaded, batch, "chosen").log_probs, outputs(model, batch, "chosen").log_probs)


def test_models_without_a_known_router_are_refused() -> None:
    batch = make_batch(make_mixture(), make_critic())
    dense = tiny_model("llama", dtype=torch.float64)
    use_tether_attention(dense)
    with pytest.raises(ValueError, match="LlamaForCausalLM: has no router that tether supports"):
        outputs(dense, batch, "recorded")


def test_a_router_that_chooses_by_other_means_is_refused() -> None:
    class SortingRouter(nn.Module):
        def __init__(self, router: Any) -> None:
            super().__init__()
            self.weight, self.top_k, self.num_experts = router.weight, router.top_k, router.num_experts

        def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            probs = (states @ self.weight.T).softmax(-1)
            values, indices = probs.sort(-1, descending=True)
            return probs, values[:, : self.top_k], indices[:, : self.top_k]

    model = make_mixture()
    batch = any_experts(make_batch(model, make_critic()), layers=2)
    model.model.layers[1].mlp.gate = SortingRouter(model.model.layers[1].mlp.gate)
    with pytest.raises(ValueError, match=r"SortingRouter: does not choose its experts with one torch\.topk"):
        outputs(model, batch, "replayed")


DEEPSEEK_V2 = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "eos_token_id": 3},
    "granitemoe": {"num_local_experts": 4},
    "glm4_moe": {**GROUPS, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "deepseek_v2": {**GROUPS, **DEEPSEEK_V2, "num_key_value_heads": 4, "topk_method": "greedy"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_classes_of_transformers_replay(name: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2}
    config = CONFIG_MAPPING[name](**{**sizes, **heads, "pad_token_id": 0, **OTHERS[name]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    use_tether_attention(model)
    assert experts_per_token(config) == 2
    layout = Packed((5, 7))
    states, choices = [], [ExpertChoice(), ExpertChoice(records=True)]
    for number in range(4):
        with torch.no_grad():
            ids = torch.arange(12)[None] + 4
            states.append(hidden_states(model, ids, layout.position_ids(), layout, choices[number]))
        if number == 1:
            own = recorded_choice(model, choices[1])
            other = torch.where(own >= 0, (own + 1) % 4, own)
            choices += [ExpertChoice(own), ExpertChoice(other, records=True)]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert (states[0] - states[3]).abs().max() > 0.1
    assert torch.equal(recorded_choice(model, choices[3]), other)
