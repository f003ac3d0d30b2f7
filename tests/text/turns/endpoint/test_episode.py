"""Calls recorded as the ids that were sampled, whatever a program does to the history that it sends back."""

import json

import pytest
import torch

from tests.runs.turn_run import CALL, ID, tokenizer
from tether.batch import Prompt
from tether.text.learning.episodes import assemble, with_other_beginnings
from tether.text.turns.endpoint.chat import Chat
from tether.text.turns.endpoint.episode import AgentEpisode, RecordedCall, SampledTurn
from tether.text.turns.endpoint.protocol import CallRefused, ChatRequest, Completion, TextRequest
from tether.text.turns.tools import FORMATS

END, UNK = ID["<|im_end|>"], ID["<unk>"]
TOOL = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}


class Talk:
    """An episode whose policy samples what the test says."""

    def __init__(self, max_calls: int = 9) -> None:
        self.chat = Chat(tokenizer(), frozenset({END}), FORMATS["hermes"], None, {})
        self.episode = AgentEpisode(0, Prompt([1], "game", None), 0, max_calls)

    def ask(self, request: ChatRequest | TextRequest, sampled: list[int], *, ended: bool = True) -> Completion:
        context = self.episode.context(request, self.chat, 200)
        turn = SampledTurn(sampled, [-float(token) for token in sampled], [1] * len(sampled), ended)
        return self.episode.record(context, turn, self.chat)

    @property
    def last(self) -> RecordedCall:
        return self.episode.calls[-1]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def ids(text: str) -> list[int]:
    """Ids of a rendered text."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def turn(role: str, text: str) -> list[int]:
    return [*ids("<|im_start|>"), ID[role], ID["\n"], *ids(text), END]


OPENING = [ID["<|im_start|>"], ID["assistant"], ID["\n"]]


def test_a_history_that_is_sent_back_is_the_recorded_ids() -> None:
    """The sampled ids are such that their text has other ids: tokenizing it again would show."""
    talk = Talk()
    odd = [UNK, ID["7"], END]
    answer = talk.ask(ChatRequest((user("?"),)), odd)
    assert tokenizer()(answer.content, split_special_tokens=True, add_special_tokens=False)["input_ids"] != odd[:-1]
    first = talk.last
    assert first.read == [*turn("user", "?"), *OPENING]
    talk.ask(ChatRequest((user("?"), said(answer.content), user("8"))), [ID["1"], END])
    second = talk.last
    assert second.continues is first
    assert second.read == [*turn("user", "8"), *OPENING]
    assert second.token_ids() == [*first.read, *odd, *second.read, ID["1"], END]
    # A second continuation of the first answer is a branch, an edited answer begins another tree.
    talk.ask(ChatRequest((user("?"), said(f"  {answer.content}\n"), user("9"))), [ID["2"], END])
    assert talk.last.continues is first
    talk.ask(ChatRequest((user("?"), said("3"), user("8"))), [ID["4"], END])
    assert talk.last.continues is None
    assert talk.last.read == [*turn("user", "?"), *turn("assistant", "3"), *turn("user", "8"), *OPENING]
    assert [len(branch) for branch in talk.episode.branches()] == [2, 2, 1]
    main = talk.episode.main_branch()
    assert [call.turn.token_ids for call in main] == [odd, [ID["2"], END]], "the latest of those with 5 tokens"


def test_tool_calls_come_back_in_any_layout() -> None:
    talk = Talk()
    answer = talk.ask(ChatRequest((user("?"),), (TOOL,)), [ID["1"], ID[CALL], END])
    assert (answer.content, answer.finish_reason) == ("1", "tool_calls")
    (call,) = answer.tool_calls
    assert (call["function"], len(call["id"])) == ({"name": "ask", "arguments": "{}"}, 9)
    function = {"name": "ask", "arguments": json.loads("{ }")}
    replied = {"role": "tool", "content": "7", "tool_call_id": call["id"]}
    history = (user("?"), said("1") | {"tool_calls": [{**call, "function": function}]}, replied)
    talk.ask(ChatRequest(history, (TOOL,)), [ID["7"], END])
    assert talk.last.continues is talk.episode.calls[0]
    assert talk.last.read == [*turn("tool", "7"), *OPENING]
    talk.ask(ChatRequest(history), [ID["7"], END])
    assert talk.last.continues is None, "without its tools the prompt is another one"
    broken = talk.ask(ChatRequest((user("?"),), (TOOL,)), [ID[CALL]], ended=False)
    assert (broken.tool_calls, broken.finish_reason) == ((), "length")


def test_a_call_with_half_a_surrogate_pair_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy may sample its escape, and no response in UTF-8 can contain it."""
    talk = Talk()
    text = r'<tool_call>{"name": "ask", "arguments": {"half": "\ud83d", "pair": "\ud83d\ude00"}}</tool_call>'
    monkeypatch.setattr(talk.chat, "text", lambda token_ids: text)
    (call,) = talk.ask(ChatRequest((user("?"),), (TOOL,)), [ID["1"], END]).tool_calls
    assert json.loads(call["function"]["arguments"].encode()) == {"half": "?", "pair": "\U0001f600"}


def test_a_turn_that_a_limit_cut_is_ended_for_the_next() -> None:
    talk = Talk()
    answer = talk.ask(ChatRequest((user("?"),)), [ID["1"]], ended=False)
    assert (answer.content, answer.finish_reason) == ("1", "length")
    talk.ask(ChatRequest((user("?"), said("1"), user("8"))), [ID["2"], END])
    assert talk.last.read == [END, *turn("user", "8"), *OPENING]


def test_control_tokens_of_a_program_are_text() -> None:
    talk = Talk()
    talk.ask(ChatRequest((user("<|im_end|>"),)), [END])
    assert talk.last.read.count(END) == 1
    talk.ask(ChatRequest((user("<|im_end|>"), said(""), user("<|im_end|>"))), [END])
    assert talk.last.continues is talk.episode.calls[0]
    assert talk.last.read.count(END) == 1


def test_texts_are_continued_by_their_text_and_ids_by_their_ids() -> None:
    talk = Talk()
    talk.ask(TextRequest("12"), [UNK, ID["3"]], ended=False)
    text = tokenizer().decode([UNK, ID["3"]])
    talk.ask(TextRequest(f"12{text}4"), [END])
    first, second = talk.episode.calls
    assert (second.continues, second.read) == (first, [ID["4"]])
    talk.ask(TextRequest((*second.token_ids(), ID["5"])), [END])
    assert (talk.last.continues, talk.last.read) == (second, [ID["5"]])
    talk.ask(TextRequest("34"), [END])
    assert (talk.last.continues, talk.last.read) == (None, [ID["3"], ID["4"]])


def test_what_leaves_no_room_and_more_calls_than_allowed_are_refused() -> None:
    talk = Talk(max_calls=1)
    for request in (ChatRequest((user("7" * 250),)), ChatRequest((user("7" * 10**6),)), TextRequest((7,) * 200)):
        with pytest.raises(CallRefused, match=r"maximum context length is 200 tokens, and .* leaves no room"):
            talk.ask(request, [END])
    with pytest.raises(CallRefused, match="others than the"):
        talk.ask(TextRequest((10**6,)), [END])
    assert talk.episode.cut_by == "length"
    talk.episode.count_call()
    with pytest.raises(CallRefused, match="has had its 1 calls"):
        talk.episode.count_call()
    talk.episode.is_over = True
    with pytest.raises(CallRefused, match="is over"):
        talk.episode.count_call()
    with pytest.raises(CallRefused, match="is over"):  # a call that was counted before
        talk.ask(ChatRequest((user("?"),)), [END])


def test_noise_depends_on_what_is_read_and_how_often_alone() -> None:
    def draws(*prompts: str) -> list[int]:
        talk = Talk()
        contexts = [talk.episode.context(TextRequest(prompt), talk.chat, 200) for prompt in prompts]
        return [talk.episode.noise(context) for context in contexts]

    first, second, again = draws("1", "2", "1")
    assert draws("2", "1", "1") == [second, first, again]
    assert len({first, second, again}) == 3
    assert all(0 <= index < 2**63 for index in (first, second, again))


def test_a_row_holds_the_recorded_ids_with_their_log_probs_and_versions() -> None:
    talk, other = Talk(), Talk()
    answer = talk.ask(ChatRequest((user("?"),)), [UNK, END])
    talk.ask(ChatRequest((user("?"), said(answer.content), user("8"))), [ID["1"], END])
    other.ask(ChatRequest((user("?8"),)), [ID["2"], END])
    branches = [talk.episode.main_branch(), other.episode.main_branch(), [], []]
    batch = assemble(branches, 2, filler=END)
    shared = turn("user", "?")[:-1]  # the other message goes on
    assert batch.prompt_ids[:, : len(shared)].tolist()[:2] == [shared, shared]
    assert batch.prompt_length.tolist() == [len(shared), len(shared), 1, 1]
    assert batch.uid.tolist() == [0, 0, 1, 1]
    for row, branch in enumerate(branches[:2]):
        length, mask = int(batch.response_length[row]), batch.response_mask[row]
        assert [*shared, *batch.response_ids[row, :length].tolist()] == branch[-1].token_ids()
        sampled = [token for call in branch for token in call.turn.token_ids]
        assert batch.response_ids[row][mask].tolist() == sampled
        assert batch.rollout_log_probs[row][mask].tolist() == [-float(token) for token in sampled]
        assert not batch.rollout_log_probs[row][~mask].any()
    assert not batch.response_mask[2:].any()
    assert batch.truncated.tolist() == [False, False, True, True]
    assert batch.policy_version is not None
    assert torch.equal(batch.policy_version, torch.ones(4, dtype=torch.int64))
    stranger = Talk()
    stranger.ask(TextRequest("5"), [END])
    assert with_other_beginnings([*branches[:2], branches[0], stranger.episode.calls], 2) == [3]
