"""The engine on tiny models of the real classes, against transformers' own generate and plain packed forwards."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tests.text.sampling.test_sampling import expected_distribution
from tests.tiny import EOS_ID, TINY_CONFIGS, VOCAB_SIZE, tiny_model
from tether.batch import RolloutBatch, WeightUpdate
from tether.text.models.layers import Packed
from tether.text.sampling.engine import NativeEngine, eos_token_ids
from tether.text.sampling.protocol import FinishedResponse, NoiseKey, RolloutProgress, SamplingParams

KEY = NoiseKey(seed=1, step=2)
NO_EOS: frozenset[int] = frozenset()


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts(3, 9, 1, 6, 14, 2, 5)


def responses(batch: RolloutBatch) -> list[list[int]]:
    return [ids[:n].tolist() for ids, n in zip(batch.response_ids, batch.response_length, strict=True)]


def packed_logits(model: PreTrainedModel, batch: RolloutBatch) -> list[Tensor]:
    """Logits [length, V] that each row's response was sampled from, by one plain packed forward."""
    rows = [
        ids[:p].tolist() + out
        for ids, p, out in zip(batch.prompt_ids, batch.prompt_length, responses(batch), strict=True)
    ]
    lengths = [len(row) for row in rows]
    with torch.no_grad():
        logits = model(
            torch.tensor([list(itertools.chain.from_iterable(rows))]),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            use_cache=False,
            attention_layout=Packed(tuple(lengths)),
        ).logits[0]
    return [row[-int(n) - 1 : -1] for row, n in zip(logits.split(lengths), batch.response_length, strict=True)]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_greedy_equals_transformers_generate(name: str) -> None:
    """Ragged prompts, fewer slots than rows, and responses that end by themselves after different times."""
    length = 10
    theirs, ours = tiny_model(name), tiny_model(name)
    theirs.generation_config.eos_token_id = None
    free = [
        theirs.generate(torch.tensor([p]), max_new_tokens=length, do_sample=False)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    eos = frozenset({free[0][3], free[3][7]})  # two tokens that the model is known to produce
    expected = [row[: next((i + 1 for i, t in enumerate(row) if t in eos), length)] for row in free]
    engine = NativeEngine(ours, eos_token_ids=eos, max_num_seqs=4, max_num_batched_tokens=16)
    batch = engine.generate(PROMPTS, SamplingParams(length, n=2, temperature=0.0), KEY)
    assert responses(batch) == [row for row in expected for _ in range(2)]
    assert batch.truncated.tolist() == [row[-1] not in eos for row in expected for _ in range(2)]
    assert len({len(row) for row in expected}) > 1


def route_one_by_one(model: PreTrainedModel) -> None:
    """Let DeepSeek's routers see one token at a time.

    transformers computes them in float32 even in a float64 model, and a matrix product may round a row differently
    with the number of rows beside it. That alone moves the log-probs of decoding and of a packed forward 3e-7 apart.
    """
    for router in (module for module in model.modules() if isinstance(module, DeepseekV3TopkRouter)):

        def forward(hidden: Tensor, plain: Callable[[Tensor], tuple[Tensor, ...]] = router.forward) -> list[Tensor]:
            tokens = hidden.flatten(0, -2).split(1)
            return [torch.cat(parts) for parts in zip(*map(plain, tokens), strict=True)]

        router.forward = forward


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_log_probs_equal_a_plain_packed_forward(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    route_one_by_one(model)
    engine = NativeEngine(model, eos_token_ids=frozenset(range(0, VOCAB_SIZE, 12)), max_num_seqs=5)
    batch = engine.generate(PROMPTS, SamplingParams(10, n=2, temperature=0.7), KEY)
    assert len(set(batch.response_length.tolist())) > 3
    for row, logits in enumerate(packed_logits(model, batch)):
        n = len(logits)
        expected = (logits / 0.7).log_softmax(-1).gather(-1, batch.response_ids[row, :n, None])[:, 0]
        assert torch.allclose(batch.rollout_log_probs[row, :n], expected, atol=1e-10, rtol=0)
        assert (batch.rollout_log_probs[row, n:] == 0).all()
        assert batch.response_mask[row].tolist() == [True] * n + [False] * (batch.response_mask.shape[1] - n)


@pytest.mark.parametrize(("top_k", "top_p"), [(10, 1.0), (-1, 0.6), (20, 0.8)])
def test_log_probs_under_truncated_sampling_are_renormalised(top_k: int, top_p: float) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    sampling = SamplingParams(8, temperature=1.3, top_k=top_k, top_p=top_p)
    batch = NativeEngine(model, eos_token_ids=NO_EOS).generate(PROMPTS, sampling, KEY)
    for row, logits in enumerate(packed_logits(model, batch)):
        distribution = expected_distribution(logits, sampling)
        expected = distribution.gather(-1, batch.response_ids[row, :, None])[:, 0].log()
        assert torch.allclose(batch.rollout_log_probs[row], expected, atol=1e-10, rtol=0)
        assert torch.equal(batch.kept.count[row], (distribution > 0).sum(-1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(4),
        SamplingParams(4, top_k=VOCAB_SIZE),
        SamplingParams(4, temperature=0.0, top_k=5, top_p=0.5),
        SamplingParams(4, top_p=0.5, record_kept=False),
    ],
    ids=["everything", "top_k of everything", "greedy", "not asked for"],
)
def test_nothing_is_recorded_where_nothing_is_cut(sampling: SamplingParams) -> None:
    assert NativeEngine(tiny_model("llama"), eos_token_ids=NO_EOS).generate(PROMPTS, sampling, KEY).kept is None


def test_greedy_log_probs_are_those_of_the_plain_softmax() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    batch = NativeEngine(model, eos_token_ids=NO_EOS).generate(PROMPTS, SamplingParams(6, temperature=0.0), KEY)
    for row, logits in enumerate(packed_logits(model, batch)):
        expected = logits.log_softmax(-1).amax(-1)
        assert torch.allclose(batch.rollout_log_probs[row], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_samples_do_not_depend_on_the_batch(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    eos = frozenset(range(0, VOCAB_SIZE, 15))
    sampling = SamplingParams(12, n=2)
    expected = responses(NativeEngine(model, eos_token_ids=eos).generate(PROMPTS, sampling, KEY))
    for slots, prefill in ((1, 8192), (3, 1), (8, 20)):
        engine = NativeEngine(model, eos_token_ids=eos, max_num_seqs=slots, max_num_batched_tokens=prefill)
        assert responses(engine.generate(PROMPTS, sampling, KEY)) == expected
    alone = [
        row
        for i, prompt in enumerate(PROMPTS)
        for row in responses(engine.generate([prompt], sampling, replace(KEY, first_sample=2 * i)))
    ]
    assert alone == expected


def test_each_part_of_the_key_changes_the_samples() -> None:
    engine = NativeEngine(tiny_model("llama"), eos_token_ids=NO_EOS)
    sampling = SamplingParams(10, n=2)
    keys = [NoiseKey(0, 0), NoiseKey(1, 0), NoiseKey(0, 1), NoiseKey(0, 0, first_sample=14)]
    drawn = [responses(engine.generate(PROMPTS, sampling, key)) for key in keys]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert drawn[0] == responses(engine.generate(PROMPTS, sampling, keys[0]))
    assert drawn[0][0] != drawn[0][1]  # two samples of one prompt


def test_the_batch_is_ordered_by_prompt_then_response() -> None:
    engine = NativeEngine(tiny_model("llama"), eos_token_ids=NO_EOS, max_num_seqs=3)
    batch = engine.generate([[5, 6, 7], [8]], SamplingParams(4, n=2), KEY)
    assert batch.uid.tolist() == [0, 0, 1, 1]
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [5, 6, 7], [8, 0, 0], [8, 0, 0]]
    assert batch.prompt_length.tolist() == [3, 3, 1, 1]
    assert batch.response_length.tolist() == [4] * 4
    assert batch.batch_size == (4,)


def test_ignore_eos_and_the_length_limit() -> None:
    model = tiny_model("llama")
    all_tokens = frozenset(range(VOCAB_SIZE))
    engine = NativeEngine(model, eos_token_ids=all_tokens)
    short = engine.generate(PROMPTS, SamplingParams(5), KEY)
    assert short.response_mask.tolist() == [[True]] * len(PROMPTS)  # the end token itself is sampled, and counts
    assert not short.truncated.any()
    full = engine.generate(PROMPTS, SamplingParams(5, ignore_eos=True), KEY)
    assert full.response_mask.all()
    assert full.response_mask.shape == (len(PROMPTS), 5)
    assert full.truncated.all()
    one = engine.generate(PROMPTS, SamplingParams(1), KEY)
    assert not one.truncated.any()  # it ended by itself, at the limit


def test_a_cap_on_prompt_and_response_together_cuts_each_row_by_itself() -> None:
    engine = NativeEngine(tiny_model("llama"), eos_token_ids=NO_EOS, max_num_seqs=4)
    free = engine.generate(PROMPTS, SamplingParams(5, n=2), KEY)
    capped = engine.generate(PROMPTS, SamplingParams(5, n=2, max_length=16), KEY)
    room = [5, 5, 5, 5, 2, 5, 5]  # prompts of 3, 9, 1, 6, 14, 2 and 5 tokens
    assert capped.response_length.tolist() == [most for most in room for _ in range(2)]
    assert capped.truncated.all()
    assert responses(capped) == [row[: room[at // 2]] for at, row in enumerate(responses(free))]
    with pytest.raises(ValueError, match=r"prompts\[4\]: 14 prompt tokens leave no room .* 14 tokens"):
        engine.generate(PROMPTS, SamplingParams(5, max_length=14), KEY)


def test_finished_responses_are_handed_over_at_once_and_progress_is_told() -> None:
    events: list[FinishedResponse | RolloutProgress] = []
    engine = NativeEngine(tiny_model("llama"), eos_token_ids=frozenset(range(0, VOCAB_SIZE, 9)), max_num_seqs=4)
    batch = engine.generate(PROMPTS, SamplingParams(30, n=2), KEY, on_finished=events.append, on_progress=events.append)
    finished = [e for e in events if isinstance(e, FinishedResponse)]
    progress = [e for e in events if isinstance(e, RolloutProgress)]
    assert sorted(e.row for e in finished) == list(range(14))
    assert {e.row: e.token_ids for e in finished} == dict(enumerate(responses(batch)))
    done = 0
    for event in events:  # progress always counts exactly the responses already handed over
        done += isinstance(event, FinishedResponse)
        if isinstance(event, RolloutProgress):
            assert (event.finished, event.total) == (done, 14)
    assert progress[-1].tokens == int(batch.response_length.sum())
    assert 0 < progress[len(progress) // 2].finished < 14


def test_modes_are_restored_and_results_can_enter_autograd() -> None:
    model = tiny_model("llama").train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    batch = NativeEngine(model, eos_token_ids=NO_EOS).generate(PROMPTS, SamplingParams(3), KEY)
    assert [module.training for module in model.modules()] == before
    weight = torch.ones((), requires_grad=True)
    (weight * batch.rollout_log_probs).square().sum().backward()
    ids = batch.response_ids[:1]
    model(
        ids, position_ids=torch.arange(3)[None], use_cache=False, attention_layout=Packed((3,))
    ).logits.sum().backward()


def test_dropout_is_off_while_sampling() -> None:
    model = tiny_model("llama").train()
    model.model.norm = nn.Sequential(model.model.norm, nn.Dropout(0.5))
    sampling = SamplingParams(6, temperature=0.0)
    engine = NativeEngine(model, eos_token_ids=NO_EOS)
    assert responses(engine.generate(PROMPTS, sampling, KEY)) == responses(engine.generate(PROMPTS, sampling, KEY))


def flip_head(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()


def test_shared_weights_follow_the_trainer_at_once() -> None:
    model = tiny_model("llama")
    engine = NativeEngine(model, eos_token_ids=NO_EOS, dtype=torch.float32)
    before = responses(engine.generate(PROMPTS, SamplingParams(6, temperature=0.0), KEY))
    flip_head(model)
    assert responses(engine.generate(PROMPTS, SamplingParams(6, temperature=0.0), KEY)) != before


def test_a_copy_in_another_dtype_follows_at_sync() -> None:
    model = tiny_model("qwen2")  # its head is tied to its embedding
    engine = NativeEngine(model, eos_token_ids=NO_EOS, dtype=torch.bfloat16)
    sampling = SamplingParams(6, temperature=0.0)
    before = responses(engine.generate(PROMPTS, sampling, KEY))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert responses(engine.generate(PROMPTS, sampling, KEY)) == before
    engine.load_weights(WeightUpdate(1, model.state_dict().items()))
    after = engine.generate(PROMPTS, sampling, KEY)
    assert responses(after) != before
    assert after.policy_version.tolist() == [1] * len(after)
    fresh = NativeEngine(model, eos_token_ids=NO_EOS, dtype=torch.bfloat16).generate(PROMPTS, sampling, KEY)
    assert torch.equal(after.response_ids, fresh.response_ids)
    assert torch.equal(after.rollout_log_probs, fresh.rollout_log_probs)
    assert after.rollout_log_probs.dtype == torch.float32
    copied = engine._model
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copied.buffers()} == {torch.float32}  # RoPE frequencies keep their precision
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_eos_token_ids_are_all_those_of_the_generation_config() -> None:
    model = tiny_model("llama")
    assert eos_token_ids(model) == {EOS_ID}
    model.generation_config.eos_token_id = [7, 9]
    assert eos_token_ids(model) == {7, 9}
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model) == frozenset()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: the list is empty"),
        ([[5], []], r"prompts\[1\]: no tokens"),
        (
            [[5], [6] * 25],
            r"prompts\[1\]: 25 prompt tokens \+ 8 new tokens .* 32.*max_prompt_length.*max_response_length",
        ),
    ],
)
def test_bad_prompts_are_refused(prompts: list[list[int]], message: str) -> None:
    engine = NativeEngine(tiny_model("llama", max_position_embeddings=32), eos_token_ids=NO_EOS)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, SamplingParams(8), KEY)
    engine.generate([[6] * 24], SamplingParams(8), KEY)  # exactly full is fine


def test_logits_that_are_not_finite_name_the_sample() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    engine = NativeEngine(model, eos_token_ids=NO_EOS)
    with pytest.raises(
        ValueError, match=r"sample 12 \(response 0 to prompts\[1\]\), token 0.*with a lower .*optim\.lr"
    ):
        engine.generate([[5, 6], [7, 77]], SamplingParams(4, n=2), NoiseKey(0, 0, first_sample=10))
