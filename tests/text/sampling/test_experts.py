"""The native engine tells which experts each token went to, and what it tells is what the trainer finds."""

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import MOE, VOCAB_SIZE, tiny_model
from tether.batch import RolloutBatch, TrainBatch, WeightUpdate
from tether.text.learning.losses import PolicyForward
from tether.text.models.layers import use_tether_attention
from tether.text.sampling.concat import join_rollouts
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams

PROMPTS = [[5, 6, 7, 22], [8, 30], [9, 1, 2, 3, 4, 5]]
SAMPLING, KEY = SamplingParams(12, n=3, record_experts=True), NoiseKey(0, 0)
EOS = frozenset(range(0, VOCAB_SIZE, 9))


class Echo:
    """Answers each turn with some of its tokens, twice."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}

    def submit_turn(self, row: int, token_ids: list[int]) -> None:
        self.turns[row] = self.turns.get(row, 0) + 1

    def wait_reply(self, row: int, room: int) -> Sequence[int] | None:
        return [11, 12, 13][:room] if self.turns[row] <= 2 and room > 0 else None


def known(batch: RolloutBatch) -> torch.Tensor:
    """[B, W] all tokens but the last, which nothing follows."""
    length = batch.prompt_length + batch.response_length
    return torch.arange(batch.routed_experts.shape[1]) < length[:, None] - 1


def agrees(model: PreTrainedModel, batch: RolloutBatch) -> bool:
    """Whether the trainer's routers send the tokens to the same experts."""
    use_tether_attention(model)
    with torch.no_grad():
        found = PolicyForward(experts="recorded")(model, TrainBatch.assemble(batch, torch.ones(len(batch))))
    here = known(batch)
    assert (batch.routed_experts[~here] == -1).all()
    own, theirs = (experts[here].sort(-1).values for experts in (batch.routed_experts, found.routed_experts))
    return torch.equal(own, theirs)


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("slots", [2, 9])
def test_the_trainer_finds_the_same_experts(name: str, slots: int) -> None:
    model = tiny_model(name, dtype=torch.float64)
    engine = NativeEngine(model, eos_token_ids=EOS, max_num_seqs=slots, max_num_batched_tokens=7)
    batch = engine.generate(PROMPTS, SAMPLING, KEY)
    assert batch.routed_experts.shape == (9, 6 + batch.response_ids.shape[1], 2, 2)
    assert agrees(model, batch)
    assert not agrees(tiny_model(name, dtype=torch.float64, seed=1), batch)


def test_recording_changes_no_sample() -> None:
    engine = NativeEngine(tiny_model("qwen2_moe"), eos_token_ids=EOS)
    recorded, plain = engine.generate(PROMPTS, SAMPLING, KEY), engine.generate(PROMPTS, SamplingParams(12, n=3), KEY)
    assert torch.equal(recorded.response_ids, plain.response_ids)
    assert torch.equal(recorded.rollout_log_probs, plain.rollout_log_probs)
    assert plain.routed_experts is None


@pytest.mark.parametrize("room", [0, 65536], ids=["prefilled again", "kept"])
def test_what_a_partner_says_goes_to_experts_too(room: int) -> None:
    model = tiny_model("qwen2_moe", dtype=torch.float64)
    engine = NativeEngine(model, eos_token_ids=EOS, max_num_seqs=4, max_kept_tokens=room)
    batch = engine.generate(PROMPTS, SamplingParams(40, n=3, record_experts=True), KEY, responder=Echo())
    inside = torch.arange(batch.response_ids.shape[1]) < batch.response_length[:, None]
    assert (inside & ~batch.response_mask).any()
    assert agrees(model, batch)


def test_weights_that_come_meanwhile_choose_for_the_whole_context() -> None:
    model, other = tiny_model("qwen2_moe", dtype=torch.float64), tiny_model("qwen2_moe", dtype=torch.float64, seed=1)
    engine = NativeEngine(model, eos_token_ids=frozenset(), max_num_seqs=9)

    def change(progress: object) -> None:
        if progress.tokens == 9 * 4:  # type: ignore[attr-defined]
            engine.load_weights(WeightUpdate(1, other.state_dict().items()))

    batch = engine.generate(PROMPTS, SAMPLING, KEY, on_progress=change)
    assert batch.token_versions is not None
    assert agrees(other, batch)


def test_rollouts_of_other_widths_are_joined() -> None:
    model = tiny_model("qwen2_moe", dtype=torch.float64)
    engine = NativeEngine(model, eos_token_ids=EOS)
    short = engine.generate(PROMPTS[1:2], SamplingParams(3, n=2, record_experts=True), KEY)
    long = engine.generate(PROMPTS, SAMPLING, KEY)
    joined = join_rollouts([short, long], [7, 8])
    joined.uid = torch.arange(len(joined))
    assert joined.routed_experts.shape[1] == joined.prompt_ids.shape[1] + joined.response_ids.shape[1]
    assert agrees(model, joined)


def test_a_model_without_experts_is_refused() -> None:
    engine = NativeEngine(tiny_model("llama"), eos_token_ids=EOS)
    with pytest.raises(ValueError, match="LlamaForCausalLM: has no router that tether supports"):
        engine.generate(PROMPTS, SAMPLING, KEY)
