"""A layout that does not fit is refused before anything loads, with the nearest that does."""

import pytest

from tests.tiny import TINY_CONFIGS
from tether.integrations.megatron import MegatronLayout, check

KEY = "actor_rollout_ref.actor.megatron."


def refusal(layout: MegatronLayout, ranks: int, name: str = "llama", **overrides: object) -> str:
    with pytest.raises(ValueError) as caught:
        check(layout, TINY_CONFIGS[name](**overrides), ranks, KEY)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (MegatronLayout(), 3),
        (MegatronLayout(tensor=2, pipeline=2), 8),
        (MegatronLayout(tensor=4), 4),  # two ranks share each of two key heads
        (MegatronLayout(pipeline=2, virtual_pipeline=2), 2),
        (MegatronLayout(pipeline=3, first_stage_layers=1, last_stage_layers=1), 3),
    ],
)
def test_layouts_that_fit(layout: MegatronLayout, ranks: int) -> None:
    check(layout, TINY_CONFIGS["llama"](num_hidden_layers=4), ranks, KEY)


def test_ranks() -> None:
    message = refusal(MegatronLayout(tensor=2, pipeline=2), 6)
    assert "= 4 does not divide the 6 ranks" in message
    assert "one of [1, 2, 3, 6]" in message


def test_heads() -> None:
    assert f"{KEY}tensor_model_parallel_size=3 cannot split 4 attention heads" in refusal(MegatronLayout(tensor=3), 3)
    assert "nearest that works is 2" in refusal(MegatronLayout(tensor=3), 3)


def test_key_heads() -> None:
    message = refusal(MegatronLayout(tensor=4), 4, num_attention_heads=12, num_key_value_heads=3, hidden_size=96)
    assert "4 cannot split 3 key and value heads" in message
    assert "nearest that works is 3" in message


def test_vocabulary() -> None:
    assert "cannot split 261 tokens of the vocabulary" in refusal(MegatronLayout(tensor=2), 2, vocab_size=261)


def test_layers() -> None:
    message = refusal(MegatronLayout(pipeline=3), 3, num_hidden_layers=4)
    assert "4 layers over 3 pipeline ranks" in message
    assert "pipeline_model_parallel_size=2 works" in message
    uneven = MegatronLayout(pipeline=3, first_stage_layers=1)
    assert "7 layers over 2 pipeline ranks" in refusal(uneven, 3, num_hidden_layers=8)
    message = refusal(MegatronLayout(pipeline=2, virtual_pipeline=2, first_stage_layers=3), 2, num_hidden_layers=4)
    assert f"{KEY}virtual_pipeline_model_parallel_size=2: cannot distribute [3, 1] layers a rank over 2" in message
    assert "nearest that works is 1" in message
    assert "nearest that works is 3" in refusal(MegatronLayout(pipeline=2, virtual_pipeline=4), 2, num_hidden_layers=6)


def test_experts() -> None:
    assert "expert_model_parallel_size=2: LlamaConfig has no experts" in refusal(MegatronLayout(expert=2), 2)
    message = refusal(MegatronLayout(expert=3), 3, "qwen2_moe")
    assert "expert_model_parallel_size=3 cannot split 4 experts" in message
    assert "nearest that works is 2" in message
    assert f"{KEY}sequence_parallel=False" in refusal(MegatronLayout(tensor=2), 2, "qwen2_moe")


@pytest.mark.parametrize(
    ("layers", "layout", "stages"),
    [
        (4, MegatronLayout(pipeline=2), [2, 2]),
        (4, MegatronLayout(pipeline=2, first_stage_layers=3), [3, 1]),
        (7, MegatronLayout(pipeline=3, first_stage_layers=1, last_stage_layers=2), [1, 4, 2]),
    ],
)
def test_layers_of_stages(layers: int, layout: MegatronLayout, stages: list[int]) -> None:
    assert layout.layers_by_stage(layers) == stages
