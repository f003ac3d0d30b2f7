"""The preflight names the cause: for each, a run that has it, and one run that has none."""

import io
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from tests.runs.steps import built
from tests.runs.tiny_run import GAE, LIGHT, held_out, set_eos
from tests.runs.turn_run import ID, ROLLOUT, turn_overrides, write_turn_inputs
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer
from tether.loop.preflight import Preflight
from tether.runtime.objects import register_objects
from tether.text.rewards.outcome import RewardFailure


@pytest.fixture
def unseen(base: list[str], tmp_path: Path) -> list[str]:
    """Return the base overrides, with validation questions that training does not have."""
    return [*base, *LIGHT, held_out(tmp_path)]


def look(overrides: list[str]) -> Preflight:
    with built(overrides) as run:
        return run.preflight()


def with_model(inputs: Path, folder: Path, change: Callable[[Path], None]) -> list[str]:
    """A copy of the model with something spoiled; the critic stays as it is."""
    model = folder / "spoiled"
    shutil.copytree(inputs / "model", model)
    change(model)
    return [f"actor_rollout_ref.model.path={model}"]


@pytest.fixture(scope="module", autouse=True)
def _same_for_all() -> Iterator[None]:
    with register_objects({"half": lambda **_: 0.5, "none": lambda **_: None}):
        yield


def with_reward(name: str) -> list[str]:
    return [f"custom_reward_function.path=object:{name}"]


def with_template(inputs: Path, folder: Path, template: str) -> list[str]:
    return with_model(inputs, folder, lambda model: write(model / "chat_template.jinja", template))


def write(path: Path, text: str) -> None:
    assert path.is_file()
    path.write_text(text)


def says_im_end(model: Path) -> None:
    """A model that ends its turn with <|im_end|>, while its generation config names <pad>."""
    weights = load_file(model / "model.safetensors")
    direction = weights["lm_head.weight"][EOS_ID] / weights["lm_head.weight"][EOS_ID].norm()
    weights["model.embed_tokens.weight"] += 20 * direction  # so every hidden state points there
    weights["lm_head.weight"][EOS_ID], weights["lm_head.weight"][PAD_ID] = direction, -direction
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    set_eos(model, PAD_ID)


TURN = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

Spoil = Callable[[Path, Path], list[str]]
CAUSES: dict[str, tuple[Spoil, bool, str]] = {
    "all_truncated": (
        lambda inputs, tmp: [
            *with_model(inputs, tmp, lambda model: set_eos(model, EOS_ID)),
            "data.max_response_length=2",
        ],
        False,
        "all 16 sampled responses were cut at data.max_response_length=2",
    ),
    "no_eos": (
        lambda inputs, tmp: with_model(inputs, tmp, lambda model: set_eos(model, None)),
        False,
        "generation_config.json",
    ),
    "missed_eos": (
        lambda inputs, tmp: with_model(inputs, tmp, says_im_end),
        False,
        f"'<|im_end|>', which is not among the end-of-sequence tokens [{PAD_ID}]. Add {EOS_ID}",
    ),
    "zero_reward_variance": (
        lambda inputs, tmp: with_reward("half"),
        False,
        "all 16 sampled responses have the reward 0.5",
    ),
    "no_reward": (lambda inputs, tmp: with_reward("none"), True, "no sampled response has a reward"),
    "bos": (
        lambda inputs, tmp: with_template(inputs, tmp, "{{ bos_token }}{{ bos_token }}" + TURN),
        True,
        "doubled BOS",
    ),
    "bos-missing": (
        lambda inputs, tmp: with_model(inputs, tmp, lambda model: tiny_tokenizer(add_bos=True).save_pretrained(model)),
        False,
        "missing BOS",
    ),
    "prompt_cut": (
        lambda inputs, tmp: ["data.max_prompt_length=16", "data.truncation=left"],
        False,
        "prompt cut: 10 of 10 prompts lost their beginning",
    ),
    "template_not_applied": (lambda inputs, tmp: with_template(inputs, tmp, BARE), True, "data.chat_template"),
    "no_opening": (
        lambda inputs, tmp: with_template(inputs, tmp, TURN.removesuffix("<|im_start|>")),
        False,
        "add_generation_prompt",
    ),
    "repeated_questions": (
        lambda inputs, tmp: [f"data.val_files={inputs / 'val.jsonl'}"],
        False,
        "validation: 5 of 7 prompts are distinct, and 7 are in the training data",
    ),
    "clipping_inactive": (
        lambda inputs, tmp: ["actor_rollout_ref.actor.ppo_mini_batch_size=4"],
        False,
        "lower ppo_mini_batch_size",
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_named(name: str, unseen: list[str], inputs: Path, tmp_path: Path):
    spoil, refuses, message = CAUSES[name]
    found = look([*unseen, *GAE, *spoil(inputs, tmp_path)])
    assert [finding.cause for finding in found.findings] == [name.partition("-")[0]]
    assert message in found.findings[0].message
    assert found.refused == refuses
    console = Console(width=200, record=True, file=io.StringIO())
    found.show(console)
    screen = " ".join(console.export_text().replace("│", " ").split())
    assert ("refused: " if refuses else "warning: ") + found.findings[0].message.split(":")[0] in screen


def test_what_the_template_writes_between_turns_is_no_missed_end(tmp_path: Path):
    folder = write_turn_inputs(tmp_path)
    weights = load_file(folder / "model" / "model.safetensors")
    direction = weights["lm_head.weight"][ID["<|im_end|>"]].sign()
    weights["model.embed_tokens.weight"] += direction  # each turn ends at once
    weights["lm_head.weight"][ID["<|im_end|>"]] = direction
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    (folder / "never.py").write_text(
        "class Never:\n"
        "    def reset(self, messages, row): pass\n"
        "    def step(self, messages): return '1', float(len(messages)), False\n"
    )
    never = f"{ROLLOUT}.agent.default_agent_loop={folder / 'never.py'}:Never"
    found = look([*turn_overrides(folder, tmp_path / "run"), never, f"{ROLLOUT}.multi_turn.tool_config_path=null"])
    assert found.findings[0].cause == "all_truncated"
    assert "16 were cut by actor_rollout_ref.rollout.multi_turn.max_assistant_turns" in found.findings[0].message


def test_responses_that_ignore_their_end_are_cut_on_purpose(unseen: list[str], inputs: Path, tmp_path: Path):
    spoil, _, _ = CAUSES["all_truncated"]
    asked = [*unseen, *GAE, *spoil(inputs, tmp_path), "actor_rollout_ref.rollout.ignore_eos=true"]
    assert not look(asked).findings


def test_a_good_run_has_no_finding(unseen: list[str]):
    found = look([*unseen, *GAE])
    assert not found.findings
    assert len(found.sample.samples) == 16
    assert len(found.sample.prompts) == 2
    console = Console(width=200, record=True, file=io.StringIO())
    found.show(console)
    screen = console.export_text()
    assert "nothing suspicious found" in screen
    assert "<|im_start|>user" in screen
    assert " ".join(map(str, found.sample.prompts[0].token_ids[:24])) in screen


def test_several_causes_are_all_named(unseen: list[str]):
    found = look([*unseen, *GAE, *with_reward("half"), "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    assert [finding.cause for finding in found.findings] == ["zero_reward_variance", "clipping_inactive"]


def test_a_reward_that_cannot_run_beside_training_is_refused(base: list[str]):
    """An object that uses signals, which are for the main thread alone."""

    def reward(**_: object) -> float:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        return 0.5

    ahead = [*base, *GAE, *LIGHT, *with_reward("signals"), "trainer.async_mode=one_step_off"]
    with register_objects({"signals": reward}), pytest.raises(RewardFailure, match="put the function into a file"):
        look(ahead)


def test_looking_changes_nothing_in_the_run(base: list[str]):
    with built([*base, *GAE, *LIGHT]) as run:
        before = run.trainer.state()
        run.preflight()
        assert run.trainer.state() == before
