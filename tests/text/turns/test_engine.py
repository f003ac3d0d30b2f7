"""Conversations in the native engine: who answers is a script, so that every token is known."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.text.sampling.test_native import PROMPTS, packed_logits, responses, route_one_by_one
from tests.tiny import tiny_model
from tether.batch import RolloutBatch, WeightUpdate, as_token_ids
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.kv_cache import Decode, PrefixCache
from tether.text.sampling.protocol import FinishedResponse, NoiseKey, SamplingParams

KEY = NoiseKey(seed=1, step=2)
ENDS = frozenset(range(60, 120))  # so that turns are a few tokens long
SAMPLING = SamplingParams(max_new_tokens=40, n=2)


@dataclass
class Script:
    """Answers turn t of row r by t + r tokens, up to `turns` times."""

    turns: int = 3
    heard: dict[int, list[list[int]]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def submit_turn(self, row, token_ids):
        assert [token in ENDS for token in token_ids] == [False] * (len(token_ids) - 1) + [True]
        self.heard.setdefault(row, []).append(token_ids)

    def wait_reply(self, row, room):
        self.order.append(row)
        said = answers(row, len(self.heard[row]))
        return said if len(self.heard[row]) <= self.turns and len(said) <= room else None


def answers(row, turn):
    return [200 + turn] * (turn + row % 3)


def engine(slots=256, name="llama", **options):
    return NativeEngine(tiny_model(name), eos_token_ids=ENDS, max_num_seqs=slots, **options)


@pytest.mark.parametrize(
    ("name", "kept"),
    [("llama", 0), ("llama", 40), ("llama", 65536), ("gemma2", 65536), ("mistral", 65536), ("deepseek_v3", 65536)],
)
def test_a_conversation_is_sampled_as_if_it_had_been_a_prompt(name, kept):
    """Whether the cache of all rows, of some or of none is kept while they are answered."""
    script, model = Script(), tiny_model(name, dtype=torch.float64)
    route_one_by_one(model)
    batch = NativeEngine(model, eos_token_ids=ENDS, max_kept_tokens=kept).generate(
        PROMPTS, SAMPLING, KEY, responder=script
    )
    logits = packed_logits(model, batch)
    turns = 0
    for row, (ids, mask) in enumerate(zip(responses(batch), batch.response_mask.tolist(), strict=True)):
        expected, own = [], []
        for turn, said in enumerate(script.heard.get(row, []), start=1):
            follows = len(expected) + len(said) < len(ids)
            answered = answers(row, turn) if follows else []
            expected += said + answered
            own += [True] * len(said) + [False] * len(answered)
            turns += follows
        assert ids[: len(expected)] == expected
        assert mask == [*own, *[True] * (len(ids) - len(own)), *[False] * (len(mask) - len(ids))]
        found = logits[row].log_softmax(-1)[torch.arange(len(ids)), ids]
        sampled = torch.tensor(mask[: len(ids)])
        torch.testing.assert_close(
            batch.rollout_log_probs[row, : len(ids)][sampled], found[sampled], atol=1e-10, rtol=0
        )
    assert turns > 20


class Counted(NativeEngine):
    """Counts the tokens that go through the model more than one at a time."""

    prefilled = 0

    def _by_transformers(self, ids, positions, layout, keep):
        self.prefilled += 0 if isinstance(layout, Decode) else ids.numel()
        return super()._by_transformers(ids, positions, layout, keep)


def test_what_is_kept_is_not_prefilled_again():
    def sampled(kept: int) -> tuple[int, RolloutBatch]:
        model = tiny_model("deepseek_v3")  # which transformers runs
        counted = Counted(model, eos_token_ids=ENDS, max_kept_tokens=kept)
        return (counted.generate(PROMPTS, SAMPLING, KEY, responder=Script()), counted.prefilled)[::-1]

    (whole, batch), (some, of_some), (pieces, of_all) = (sampled(kept) for kept in (0, 40, 65536))
    first = sum(map(len, PROMPTS))
    contexts = 0
    for row, mask in enumerate(batch.response_mask.tolist()):
        begins = [at for at in range(1, len(mask)) if mask[at] and not mask[at - 1]]  # of turns after an answer
        contexts += sum(len(PROMPTS[row // SAMPLING.n]) + at for at in begins)
    told = int((~batch.response_mask & (batch.response_ids > 0)).sum())
    turns = int((batch.response_mask[:, 1:] & ~batch.response_mask[:, :-1]).sum())
    assert whole == first + contexts
    assert pieces == first + told + turns  # of each turn before, the last token was not in the cache
    assert pieces < some < whole
    for other in (of_some, of_all):
        assert responses(other) == responses(batch)
        torch.testing.assert_close(other.rollout_log_probs, batch.rollout_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("slots", [2, 256])
def test_a_later_call_continues_the_caches_of_rows_that_ended(slots):
    """Only the new tokens of a prompt that continues a kept row are prefilled; the samples stay the same."""
    sampling, later = SamplingParams(max_new_tokens=5, record_kept=False), NoiseKey(seed=1, step=3)
    model = tiny_model("deepseek_v3", dtype=torch.float64)
    route_one_by_one(model)
    counted = Counted(model, eos_token_ids=ENDS, max_num_seqs=slots)
    with counted.caching_prefixes() as prefixes:
        first = counted.generate(PROMPTS, sampling, KEY)
        ends = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, responses(first), strict=True)]
        prompts = [[*ids, 201, 202] for ids in ends]
        prompts[2:2] = [[7, 8, 9], [*ends[0], 203]]  # continues none; the second one that continues the first
        prefixes.forget(as_token_ids(ends[-1][:-1], "a row"))
        counted.prefilled = 0
        batch = counted.generate(prompts, sampling, later)
        new = [3] * len(prompts)
        new[2], new[3], new[-1] = (len(prompts[row]) for row in (2, 3, -1))
        assert counted.prefilled == sum(new)
        counted.load_weights(WeightUpdate(1, []))
        counted.generate([[*prompts[0], *responses(batch)[0], 204]], sampling, later)
        assert counted.prefilled == sum(new) + len(prompts[0]) + len(responses(batch)[0]) + 1
    alone = NativeEngine(model, eos_token_ids=ENDS).generate(prompts, sampling, later)
    assert responses(batch) == responses(alone)
    torch.testing.assert_close(batch.rollout_log_probs, alone.rollout_log_probs, atol=1e-10, rtol=0)


def test_no_more_is_kept_than_there_is_room_for():
    prefixes, prefix = PrefixCache(5), {0: (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))}
    ids = as_token_ids([1, 2], "ids")
    for _ in range(2):
        assert prefixes.has_room(2)
        prefixes.add(ids, prefix)
    assert not prefixes.has_room(2)
    assert prefixes.pop(ids) is None, "a prompt leaves a token to compute"
    assert [prefixes.pop(as_token_ids([1, 2, last], "ids")) is prefix for last in (3, 4, 5)] == [True, True, False]
    assert prefixes.has_room(5)


@pytest.mark.parametrize("slots", [1, 3, 14])
def test_conversations_do_not_depend_on_the_rows_beside_them(slots):
    together, others = (engine(n).generate(PROMPTS, SAMPLING, KEY, responder=Script()) for n in (256, slots))
    assert responses(together) == responses(others)
    assert torch.equal(together.response_mask, others.response_mask)


def test_the_same_answers_give_the_same_bits():
    first, second = (engine(3).generate(PROMPTS, SAMPLING, KEY, responder=Script()) for _ in range(2))
    assert torch.equal(first.rollout_log_probs, second.rollout_log_probs)


def test_conversations_interleave():
    """While some wait for an answer, others are sampled: nobody waits for the longest turn of a round."""
    script = Script()
    engine(4).generate(PROMPTS, SAMPLING, KEY, responder=script)
    rounds = [script.order[: place + 1].count(row) for place, row in enumerate(script.order)]
    assert rounds != sorted(rounds)


def test_a_partner_that_says_nothing_changes_nothing():
    alone = engine().generate(PROMPTS, SAMPLING, KEY)
    silent = engine().generate(PROMPTS, SAMPLING, KEY, responder=Script(turns=0))
    assert torch.equal(alone.response_ids, silent.response_ids)
    assert torch.equal(alone.rollout_log_probs, silent.rollout_log_probs)
    assert torch.equal(alone.truncated, silent.truncated)


@pytest.mark.parametrize("limit", [{"max_new_tokens": 12}, {"max_length": 20}])
def test_an_answer_without_room_ends_the_conversation(limit):
    sampling = replace(SAMPLING, **limit)
    finished: dict[int, list[int]] = {}

    def finish(response: FinishedResponse) -> None:
        finished[response.row] = response.token_ids

    batch = engine().generate(PROMPTS, sampling, KEY, finish, responder=Script(turns=9))
    length = batch.response_length + (batch.prompt_length if "max_length" in limit else 0)
    assert int(length.max()) == limit.popitem()[1]
    last = batch.response_length - 1
    assert batch.response_mask[torch.arange(len(last)), last].all(), "the last token is always the policy's"
    assert [finished[row] for row in range(len(last))] == responses(batch)


def test_truncated_sampling_records_what_was_kept_of_sampled_tokens():
    batch = engine().generate(PROMPTS, replace(SAMPLING, top_k=5), KEY, responder=Script())
    assert batch.kept is not None
    assert torch.equal(batch.kept.count > 0, batch.response_mask)
