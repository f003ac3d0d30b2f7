"""Programs that play against the policy: what becomes a row, and what a hostile program costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.runs.turn_run import ID, WORDS, tokenizer
from tests.text.sampling.test_native import packed_logits, responses
from tests.tiny import tiny_model
from tether.batch import Prompt, RolloutBatch
from tether.text.learning.collector import ScoredResponses
from tether.text.learning.episodes import NO_ANSWER, EpisodeCollector
from tether.text.models.truncation_record import KeptSets
from tether.text.rewards.outcome import RewardError, Score
from tether.text.rewards.service import LocalRewards
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.turns.config import EndpointConfig
from tether.text.turns.endpoint.chat import Chat
from tether.text.turns.endpoint.endpoint import AgentEndpoint
from tether.text.turns.endpoint.episode import PendingCall
from tether.text.turns.endpoint.programs import CLIENT_HINT
from tether.text.turns.tools import FORMATS

PLAYERS = Path(__file__).parents[1] / "turns/endpoint/players.py"
END = ID["<|im_end|>"]
KEY = NoiseKey(seed=1, step=2)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=len(WORDS), dtype=torch.float64)


@contextmanager
def episode_collector(model: PreTrainedModel) -> Iterator[EpisodeCollector]:
    engine = NativeEngine(model, eos_token_ids=frozenset({END}))
    options = EndpointConfig(program=f"{PLAYERS}:play", reward="program", timeout=4.0, max_calls=6)
    chat = Chat(tokenizer(), frozenset({END}), FORMATS["hermes"], None, {})
    rewards = LocalRewards(lambda *_: 0.0, 1.0)
    with AgentEndpoint(options, num_workers=4, chat=chat) as endpoint:
        yield EpisodeCollector(engine, rewards, tokenizer(), 1.0, endpoint=endpoint, max_length=60)


@pytest.fixture(scope="module")
def collector(model: PreTrainedModel) -> Iterator[EpisodeCollector]:
    with episode_collector(model) as collector:
        yield collector


def played(collector: EpisodeCollector, *players: str, n: int = 1, **sampling: float) -> ScoredResponses:
    message = {"role": "user", "content": "?"}
    prompts = [Prompt([ID["?"]], "game", player, messages=(message,)) for player in players]
    return collector.collect(prompts, SamplingParams(max_new_tokens=8, n=n, **sampling), KEY)


def test_a_hostile_program_costs_its_own_row(collector: EpisodeCollector) -> None:
    alone = played(collector, "good")
    crowd = (
        "good", "silent", "crashes", "endless", "sends_100_mb", "asks_for_another_model", "uses_another_key",
        "disconnects_in_a_stream", "sends_no_json", "streams", "forks", "pays_itself",
    )  # fmt: skip
    together = played(collector, *crowd)
    outcomes = dict(zip(crowd, together.outcomes, strict=True))
    wrong = {player: outcome for player, outcome in outcomes.items() if isinstance(outcome, RewardError)}
    assert wrong.keys() == {"silent", "crashes", "endless"}
    assert wrong["silent"].message == f"{NO_ANSWER}. {CLIENT_HINT}"
    assert "RuntimeError: no more" in wrong["crashes"].message
    assert "gave no answer within the deadline of 4 s" in wrong["endless"].message
    scores = {player: outcome.value for player, outcome in outcomes.items() if isinstance(outcome, Score)}
    assert scores == dict.fromkeys(scores, 1.0) | {"good": 0.25, "pays_itself": 0.75}
    forked = outcomes["forks"]
    assert isinstance(forked, Score)
    assert (forked.extra["calls"], forked.extra["branches"]) == (6, 4)
    # What is sampled does not depend on who else plays.
    width = int(alone.rollout.response_length[0])
    assert alone.rollout.response_mask.sum() > 3
    assert torch.equal(together.rollout.response_ids[0, :width], alone.rollout.response_ids[0])


def test_a_thread_that_outlives_its_episode_makes_no_calls_in_the_next(
    collector: EpisodeCollector, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = played(collector, *["leaves_a_thread"] * 6).outcomes
    assert [isinstance(outcome, Score) and outcome.extra["calls"] for outcome in outcomes] == [1] * 6
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "players.py:play returned while threads or tasks that it started were running (straggler)" in warning


def test_rows_are_what_the_policy_read_and_sampled(collector: EpisodeCollector, model: PreTrainedModel) -> None:
    """With several branches as well: the log-probs are those of the policy that reads each row from its beginning."""
    batch = played(collector, "good", "forks", n=2).rollout
    assert batch.uid.tolist() == [0, 0, 1, 1]
    logits = packed_logits(model, batch)
    for row, ids in enumerate(responses(batch)):
        sampled = batch.response_mask[row, : len(ids)]
        assert 0 < sampled.sum() < len(ids)
        found = logits[row].log_softmax(-1)[torch.arange(len(ids)), ids].float()
        torch.testing.assert_close(found[sampled], batch.rollout_log_probs[row, : len(ids)][sampled], atol=1e-6, rtol=0)


def test_the_tokens_that_a_cut_kept_stay_with_their_positions(collector: EpisodeCollector) -> None:
    batch = played(collector, "good", n=2, top_k=3).rollout
    assert batch.kept is not None
    assert torch.equal(batch.kept.count > 0, batch.response_mask)
    slots = batch.response_mask.flatten().nonzero().flatten()
    cut = KeptSets.read(batch.kept, slots, len(WORDS)).cut(slice(0, len(WORDS)))
    assert (~cut).sum(dim=-1).tolist() == [3] * len(slots)
    assert not cut[torch.arange(len(slots)), batch.response_ids.flatten()[slots]].any()


class WatchedEndpoint(AgentEndpoint):
    """Keeps the calls of its programs."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        self.received: list[PendingCall] = []

    def calls(self, num_running: int, timeout: float) -> list[PendingCall]:
        calls = super().calls(num_running, timeout)
        self.received += calls
        return calls


class SlowEngine(NativeEngine):
    """Samples until the client of the first call has hung up."""

    endpoint: WatchedEndpoint
    started: Path

    def generate(self, *arguments: Any, **kwargs: Any) -> RolloutBatch:
        rollout = super().generate(*arguments, **kwargs)
        self.started.touch()
        assert self.endpoint.received[0].disconnected.wait(60)
        return rollout


@pytest.mark.parametrize("player", ["hangs_up", "hangs_up_and_repeats"])
def test_an_answer_that_no_client_waits_for_is_not_learned_from(
    player: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLING_STARTED", str(tmp_path / "started"))
    engine = SlowEngine(model, eos_token_ids=frozenset({END}))
    options = EndpointConfig(program=f"{PLAYERS}:play", reward="program", timeout=60.0)
    chat = Chat(tokenizer(), frozenset({END}), FORMATS["hermes"], None, {})
    rewards = LocalRewards(lambda *_: 0.0, 1.0)
    with WatchedEndpoint(options, num_workers=1, chat=chat) as endpoint:
        engine.endpoint, engine.started = endpoint, tmp_path / "started"
        collector = EpisodeCollector(engine, rewards, tokenizer(), 1.0, endpoint=endpoint, max_length=60)
        scored = played(collector, player)
    (outcome,) = scored.outcomes
    if player == "hangs_up":
        assert isinstance(outcome, RewardError)
        assert outcome.message == f"{NO_ANSWER}. {CLIENT_HINT}"
        assert not scored.rollout.response_mask.any()
    else:
        assert isinstance(outcome, Score)
        counts = [outcome.extra[name] for name in ("calls", "undelivered_calls", "branches")]
        assert (outcome.value, counts) == (1.0, [1, 1, 1])
        assert 1 <= scored.rollout.response_mask.sum() <= 3, "the first call may sample 8 tokens"


class FailingEngine(NativeEngine):
    def generate(self, *arguments: Any, **kwargs: Any) -> RolloutBatch:
        raise ValueError("the servers failed")


def test_a_failure_of_sampling_is_one_error(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn would log a traceback for each call that still waits when the run ends."""
    with episode_collector(model) as working:
        collector = replace(working, engine=FailingEngine(model, eos_token_ids=frozenset({END})))
        with pytest.raises(ValueError, match="the servers failed"):
            played(collector, "good", n=3)
    assert not caplog.records
