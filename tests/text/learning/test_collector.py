"""What sampling and scoring of a batch shows while it goes on."""

from tests.text.sampling.test_native import KEY, PROMPTS
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer
from tether.batch import Prompt
from tether.text.learning.collector import Collector
from tether.text.rewards.service import LocalRewards
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import SamplingParams


def test_the_count_of_responses_never_falls_and_ends_at_all():
    """Responses of different lengths: half of one counts as half, and may turn out to be all of it."""
    engine = NativeEngine(tiny_model("qwen2"), eos_token_ids=frozenset({EOS_ID, 7, 11}), max_num_seqs=8)
    collector = Collector(engine, LocalRewards(lambda *_: 0.0, 1.0), tiny_tokenizer(), 1.0)
    prompts = [Prompt(ids, "tiny", "?", index=row) for row, ids in enumerate(PROMPTS)]
    shown = []
    collector.collect(prompts, SamplingParams(40, n=4), KEY, lambda done, total: shown.append((done, total)))
    counts = [done for done, _ in shown]
    assert {total for _, total in shown} == {28}
    assert counts == sorted(counts)
    assert counts[-1] == 28
    assert 0 < counts[len(counts) // 2] < 28
