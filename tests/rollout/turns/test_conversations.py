"""Who answers the policy, turn by turn, without an engine."""

from pathlib import Path

from tests.trainer.turn_run import ID, tokenizer
from tether.batch import Prompt
from tether.rewards import RewardError
from tether.rollout.turns import Conversations
from tether.rollout.turns.conversations import TurnLimits
from tether.rollout.turns.template import TurnTemplate
from tether.tools import FORMATS, EnvironmentSpec, Talkers, ToolPool

END = ID["<|im_end|>"]


def test_a_row_whose_environment_fails_has_an_error_and_no_score(tmp_path: Path) -> None:
    """A score of 0 would be learned from."""
    file = tmp_path / "lost.py"
    file.write_text(
        "class Lost:\n"
        "    def reset(self, messages, row): pass\n"
        "    def step(self, messages): raise RuntimeError('the game is gone')\n"
    )
    template = TurnTemplate(tokenizer(), frozenset({END}), None, {})
    with ToolPool(Talkers((), {"lost": EnvironmentSpec(f"{file}:Lost")}), num_workers=1, timeout=20) as pool:
        talk = Conversations(
            pool=pool,
            tokenizer=tokenizer(),
            template=template,
            tool_template=template,
            turn_end=END,
            limits=TurnLimits(),
            find_calls=FORMATS["hermes"],
            default_agent="lost",
            environments_score_alone=True,
        ).begin([Prompt([ID["?"]], "game", None, messages=({"role": "user", "content": "?"},))], n=1)
        talk.submit_turn(0, [ID["7"], END])
        assert talk.wait_reply(0, room=20) is None, "the conversation is over"
    assert not talk.needs_reward(0)
    outcome = talk.outcome(0)
    assert isinstance(outcome, RewardError)
    assert "the environment failed" in outcome.message
    assert "the game is gone" in outcome.message
