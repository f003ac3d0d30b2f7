"""Who answers the policy, turn by turn, without an engine."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.runs.turn_run import ID, TOOLS, tokenizer
from tests.text.turns.templates import family
from tether.batch import Prompt, TokenIds
from tether.text.data.prompts import tokenize
from tether.text.rewards.outcome import RewardError
from tether.text.turns.conversations import Conversations, TurnLimits
from tether.text.turns.template import TurnTemplate
from tether.text.turns.tools import FORMATS, EnvironmentSpec, ResponderSpecs, ToolPool, ToolSpec

END = ID["<|im_end|>"]


def conversations(pool: ToolPool) -> Conversations:
    template = TurnTemplate(tokenizer(), frozenset({END}), None, {})
    return Conversations(
        pool=pool,
        tokenizer=tokenizer(),
        template=template,
        tool_template=template,
        turn_end=END,
        limits=TurnLimits(),
        call_format=FORMATS["hermes"],
        default_agent="talks",
        environments_score_alone=True,
    )


def test_a_reply_that_fills_the_room_many_times_is_not_tokenized_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is cut by its length, as with the reply that is one token too long."""
    file = tmp_path / "talks.py"
    file.write_text(
        "class Talks:\n"
        "    def reset(self, messages, row): self.length = row['extra_info']['length']\n"
        "    def step(self, messages):\n"
        "        return '7' * self.length, 0.0, False\n"
    )
    longest = 0

    def watched(texts: list[str], tokens_of: PreTrainedTokenizerBase) -> list[TokenIds]:
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return tokenize(texts, tokens_of)

    monkeypatch.setattr("tether.text.turns.conversations.tokenize", watched)
    monkeypatch.setattr("tether.text.turns.template.tokenize", watched)
    ends = []
    with ToolPool(ResponderSpecs((), {"talks": EnvironmentSpec(f"{file}:Talks")}), num_workers=1, timeout=20) as pool:
        for length in (5, 100, 3_000_000):
            row = {"length": length}
            prompt = Prompt([ID["?"]], "game", None, extra_info=row, messages=({"role": "user", "content": "?"},))
            talk = conversations(pool).begin([prompt], n=1)
            talk.submit_turn(0, [ID["7"], END])
            answer = talk.wait_reply(0, room=40)
            ends.append((answer is None, talk.counts(0)["cut_by_length_limit"]))
    assert ends == [(False, 0.0), (True, 1.0), (True, 1.0)]
    assert longest < 10_000


def test_a_row_whose_environment_fails_has_an_error_and_no_score(tmp_path: Path) -> None:
    """A score of 0 would be learned from."""
    file = tmp_path / "lost.py"
    file.write_text(
        "class Lost:\n"
        "    def reset(self, messages, row): pass\n"
        "    def step(self, messages): raise RuntimeError('the game is gone')\n"
    )
    with ToolPool(ResponderSpecs((), {"lost": EnvironmentSpec(f"{file}:Lost")}), num_workers=1, timeout=20) as pool:
        talk = replace(conversations(pool), default_agent="lost").begin(
            [Prompt([ID["?"]], "game", None, messages=({"role": "user", "content": "?"},))], n=1
        )
        talk.submit_turn(0, [ID["7"], END])
        assert talk.wait_reply(0, room=20) is None, "the conversation is over"
    assert not talk.needs_reward(0)
    outcome = talk.outcome(0)
    assert isinstance(outcome, RewardError)
    assert "the environment failed" in outcome.message
    assert "the game is gone" in outcome.message


def test_a_reply_names_the_call_that_the_model_wrote(tmp_path: Path) -> None:
    """Kimi's template writes the id of the call, and a call that cannot be parsed gets an id, too."""
    (tmp_path / "tools.py").write_text(f"{TOOLS}\n")
    tool = ToolSpec(f"{tmp_path / 'tools.py'}:Ask", {}, None, "tools[0]")
    tokens, end = family("kimi")
    template = TurnTemplate(tokens, frozenset({end}))
    begin, argument = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_argument_begin|>"
    replies = []
    with ToolPool(ResponderSpecs((tool,), {}, "kimi"), num_workers=1, timeout=20) as pool:
        shared = replace(
            conversations(pool),
            **{"tokenizer": tokens, "template": template, "tool_template": template, "turn_end": end},
            call_format=FORMATS["kimi"],
            default_agent="tool_agent",
        )
        for written in ("{}", "{"):
            extra_info = {"tools_kwargs": {"ask": {"truth": "7"}}}
            prompt = Prompt([end], "game", None, extra_info=extra_info, messages=({"role": "user", "content": "?"},))
            talk = shared.begin([prompt], n=1)
            turn = f"{begin}functions.ask:3{argument}{written}<|tool_call_end|><|tool_calls_section_end|>"
            talk.submit_turn(0, [*tokenize([turn], tokens)[0].tolist(), end])
            answer = talk.wait_reply(0, room=1000)
            assert answer is not None
            replies.append(tokens.decode(answer))
    opening = "<|im_end|><|im_assistant|>assistant<|im_middle|>"
    assert replies[0] == f"<|im_system|>ask<|im_middle|>## Return of functions.ask:3\n7{opening}"
    assert replies[1].startswith(
        "<|im_system|>unreadable<|im_middle|>## Return of call_0\nError: the call is not valid"
    )
