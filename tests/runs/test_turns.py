"""Conversations through the whole trainer: what is trained on, how they resume, and that a tool can be learned."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.loops import Text, assert_same_run, train_killed
from tests.runs.resume import assert_resume_is_exact
from tests.runs.steps import first_step
from tests.runs.test_servers import another_server
from tests.runs.tiny_run import measured, reward_function, train, write_jsonl
from tests.runs.turn_run import CALL, ID, REWARD, ROLLOUT, turn_overrides, write_turn_inputs
from tests.text.servers.stand_in import environment
from tether.commands.reward import check_reward
from tether.config import ConfigError, load_config
from tether.runtime.objects import register_objects
from tether.text.build import build_run
from tether.text.data.location import PACKAGES
from tether.text.input_checks import missing_inputs
from tether.text.rewards.outcome import Score
from tether.text.standalone import build_reward_trial

SECTION = f"{ROLLOUT}.multi_turn"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_turn_inputs(tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module", autouse=True)
def _reward() -> Iterator[None]:
    with register_objects({"asked": reward_function(REWARD)}):
        yield


HERE = "custom_reward_function.path=object:asked"
"""Calls the reward in this process."""


def own(folder: Path) -> list[str]:
    """The environment of the folder answers every row, and scores it."""
    return [
        f"{ROLLOUT}.agent.default_agent_loop={folder / 'tools.py'}:Digits",
        f"{SECTION}.tool_config_path=null",
        "custom_reward_function.path=null",
        f"{SECTION}.max_assistant_turns=4",
    ]


def rows_of(run: Path, step: int = 1) -> list[dict]:
    return [json.loads(line) for line in (run / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def train_and_read(inputs: Path, run: Path, *more: str) -> tuple[list[dict], dict[str, float]]:
    """Train for a step; return its responses and metrics."""
    dumped = [f"trainer.rollout_data_dir={run / 'rollouts'}", "trainer.total_training_steps=1"]
    train([*turn_overrides(inputs, run), HERE, *dumped, *more])
    return rows_of(run), measured(run)[1]


def test_tools_answer_and_only_sampled_tokens_are_trained_on(inputs: Path, tmp_path: Path) -> None:
    found, _ = train_and_read(inputs, tmp_path / "run")
    answered = [row for row in found if 0 in row["response_mask"]]
    assert len(answered) > 3
    for row in answered:
        said, hole = row["response_ids"], row["response_mask"].index(0)
        end = hole + row["response_mask"][hole:].index(1)
        calls = said[:hole].count(ID[CALL])
        assert said[hole - 1] == ID["<|im_end|>"]
        assert said[hole : hole + 4] == [ID[word] for word in ("<|im_start|>", "tool", "\n", row["gts"])]
        assert said[end - 3 : end] == [ID[word] for word in ("<|im_start|>", "assistant", "\n")]
        assert row["tool_calls"] == calls
        assert row["turns"] == 2
        assert row["rewards"] == [*[0.0] * (len(said) - 1), pytest.approx(row["score"])]


def check_served(inputs: Path, run: Path, *served: str) -> None:
    """Train for a step on conversations that servers sample."""
    found, metrics = train_and_read(inputs, run, f"{ROLLOUT}.server_timeout=300", *served)
    answered = [row for row in found if 0 in row["response_mask"]]
    assert answered
    for row in answered:
        ids, hole = row["response_ids"], row["response_mask"].index(0)
        assert ids[hole : hole + 4] == [ID[word] for word in ("<|im_start|>", "tool", "\n", row["gts"])]
        assert row["tool_calls"] == ids[:hole].count(ID[CALL])
    assert metrics["rollout_corr/k3_kl"] < 1e-7, "of sampled tokens alone"


@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_servers_sample_conversations(kind: str, inputs: Path, tmp_path: Path) -> None:
    with another_server(inputs / "model", kind) as url:
        check_served(inputs, tmp_path, f"{ROLLOUT}.name={kind}", f"{ROLLOUT}.n=8", url)


@pytest.mark.slow
def test_servers_of_two_devices_sample_conversations(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_VLLM", str(environment(tmp_path / "vllm")))
    check_served(inputs, tmp_path / "run", f"{ROLLOUT}.name=vllm", "trainer.n_gpus_per_node=2")


def test_an_environment_pays_for_each_turn(inputs: Path, tmp_path: Path) -> None:
    """And the first ratio is one: a cache that was filled in pieces differs from one filled at once by rounding."""
    found, metrics = train_and_read(inputs, tmp_path / "run", *own(inputs), f"{ROLLOUT}.n=16")
    assert metrics["rollout_corr/k3_kl"] < 1e-9
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    several = [row for row in found if row["turns"] > 2]
    assert several
    for row in several:
        # 1 a digit, on the end of the turn that has it; a turn that a limit cut was not seen by the environment.
        ids, mask, paid = row["response_ids"], row["response_mask"], 0
        for place, reward in enumerate(row["rewards"]):
            digits = ID["0"] <= ids[place] <= ID["9"] and mask[place]
            paid += digits
            if mask[place] and ids[place] == ID["<|im_end|>"]:
                assert reward == paid
                paid = 0
            else:
                assert reward == 0
        assert row["score"] == pytest.approx(sum(row["rewards"]))


@pytest.mark.parametrize("agent", ["environment", pytest.param("tools", marks=pytest.mark.slow)])
def test_conversations_resume_exactly(agent: str, inputs: Path, tmp_path: Path) -> None:
    overrides = [o for o in turn_overrides(inputs, tmp_path) if "default_local_dir" not in o]
    overrides += [*own(inputs), HERE] if agent == "environment" else []
    overrides += ["data.val_files=[]", f"{ROLLOUT}.n=4"]
    overrides += [f"{ROLLOUT}.agent.num_workers=2"] if agent == "tools" else []
    must_change = [f"reward/extra/{'turns' if agent == 'environment' else 'tool_calls'}/mean"]
    assert_resume_is_exact(inputs, tmp_path, overrides, total=2, must_change=must_change)


def test_the_first_ratio_is_one_where_nothing_is_kept_and_limits_say_how_often_they_cut(
    inputs: Path, tmp_path: Path
) -> None:
    limits = [f"{SECTION}.max_user_turns=1", "data.max_response_length=16", f"{SECTION}.max_kept_tokens=0"]
    metrics = first_step([*turn_overrides(inputs, tmp_path), *own(inputs), HERE, *limits])
    assert metrics["reward/extra/turns/mean"] > 1.2
    assert metrics["rollout_corr/k3_kl"] < 1e-9
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    few, long = (metrics[f"reward/extra/cut_by_{limit}_limit/mean"] for limit in ("turn", "length"))
    assert few > 0
    assert long > 0
    assert metrics["response_length/clip_ratio"] >= few + long


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([f"{SECTION}.tool_config_path=nothing.yaml"], "nothing.yaml: no such file"),
        ([f"{SECTION}.enable=False"], "default_agent_loop: tool_agent answers in turns"),
        ([f"{ROLLOUT}.agent.default_agent_loop=tools"], "tools is no agent"),
        ([f"{ROLLOUT}.agent.default_agent_loop=nowhere.py:Class"], "nowhere.py: no such file"),
        ([f"{SECTION}.tool_config_path=null"], "has neither tools"),
        ([f"{ROLLOUT}.ignore_eos=True"], "lets no turn end"),
        ([f"{SECTION}.tokenization_sanity_check_mode=strict"], "tokenization_sanity_check_mode=strict: with this chat"),
        ([f"{ROLLOUT}.agent.default_agent_loop=single_turn_agent"], "no row has several turns"),
        (["custom_reward_function.path=null"], "ask"),
    ],
)
def test_mistakes_are_one_clear_error(more: list[str], message: str, inputs: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError)) as error:
        build_run(load_config(None, [*turn_overrides(inputs, tmp_path / "run"), *more])).close()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"agent_name": "tol_agent"}, "train.jsonl row 1: `agent_name` is 'tol_agent'; it may be"),
        ({"agent_name": 7}, "train.jsonl row 1: `agent_name` is 7"),
        ({"agent_name": "nowhere.py:Class"}, "row 1: actor_rollout_ref.rollout.multi_turn agent_name: class_name=now"),
        ({"extra_info": {"interaction_kwargs": {"name": "judge"}}}, "row 1: `extra_info.interaction_kwargs.name` is"),
        ({"extra_info": {"interaction_kwargs": "judge"}}, "row 1: `extra_info.interaction_kwargs` is 'judge', not an"),
        (
            {"extra_info": {"tools_kwargs": '{"ask": {}}'}},
            "row 1: `extra_info.tools_kwargs` is '{\"ask\": {}}', not an",
        ),
        ({"extra_info": {"tools_kwargs": {"ask": "x"}}}, "row 1: `extra_info.tools_kwargs.ask` is 'x', not an object"),
    ],
)
def test_a_row_whose_agent_is_not_there_is_named(row: dict, message: str, inputs: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    file = write_jsonl(tmp_path / "train.jsonl", [records[0], records[1] | row])
    overrides = [*turn_overrides(inputs, tmp_path / "run"), f"data.train_files={file}", "data.train_batch_size=2"]
    loaded = load_config(None, [*overrides, "actor_rollout_ref.actor.ppo_mini_batch_size=2"])
    with pytest.raises(ValueError, match="row 1") as error:
        build_run(loaded).close()
    assert message in str(error.value)
    (problem,) = missing_inputs(loaded.config, rows=None)
    assert message.rpartition("class_name=")[2].removeprefix("row 1: ") in problem.what
    assert not missing_inputs(loaded.config, rows=1)


def test_a_row_with_an_agent_needs_turns(inputs: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    file = write_jsonl(tmp_path / "train.jsonl", [record | {"agent_name": "tool_agent"} for record in records])
    overrides = [o for o in turn_overrides(inputs, tmp_path / "run") if "multi_turn" not in o and "agent" not in o]
    with pytest.raises(
        ValueError, match=r"row 0: `agent_name` is 'tool_agent', which answers in turns. Set .*enable=True"
    ):
        build_run(load_config(None, [*overrides, f"data.train_files={file}"])).close()


def test_what_needs_turns_is_found_before_anything_is_loaded_and_said_once(inputs: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    file = write_jsonl(tmp_path / "train.jsonl", [record | {"agent_name": "tool_agent"} for record in records])
    overrides = [o for o in turn_overrides(inputs, tmp_path / "run") if "multi_turn" not in o and "agent" not in o]
    loaded = load_config(None, [*overrides, f"data.train_files={file}"])
    (problem,) = missing_inputs(loaded.config)
    assert "row 0: `agent_name` is 'tool_agent', which answers in turns. Set" in problem.what
    with pytest.raises(ValueError, match="row 0") as error:
        build_run(loaded).close()
    assert len(str(error.value).splitlines()) == 1


def test_an_environment_of_a_library_needs_turns(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "environment", ("json", "json"))
    overrides = [o for o in turn_overrides(inputs, tmp_path / "run") if "multi_turn" not in o and "agent" not in o]
    config = load_config(None, [*overrides, "data.train_files=verifiers:some-name"]).config
    (problem,) = missing_inputs(config)
    assert problem.path == "data.train_files"
    assert "verifiers:some-name: an environment, which answers in turns. Set" in problem.what


def test_which_run_plays_an_environment_depends_on_the_version_of_its_library(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, "environment", ("json", "json"))
    kept = [o for o in turn_overrides(inputs, tmp_path / "run") if not any(k in o for k in ("multi_turn", "agent.def"))]
    in_turns = [f"{ROLLOUT}.multi_turn.enable=True"]
    played = [f"{ROLLOUT}.agent.{key}" for key in ("default_agent_loop=endpoint", "endpoint.program=verifiers")]
    for has_tasksets, more, what in (
        (False, in_turns, None),
        (False, played, "before 0.4, which answers in turns. Set actor_rollout_ref.rollout.multi_turn.enable=True"),
        (True, in_turns, "0.4 or later, which a program plays. Set actor_rollout_ref.rollout.agent.default_agent_loop"),
        (True, played, None),
    ):
        monkeypatch.setattr("tether.text.input_checks.has_tasksets", lambda has_tasksets=has_tasksets: has_tasksets)
        config = load_config(None, [*kept, *more, "data.train_files=verifiers:some-name"]).config
        problems = [problem.what for problem in missing_inputs(config, ("data.train_files",))]
        assert len(problems) == (what is not None)
        assert what is None or what in problems[0]
    config = load_config(None, [*kept, *played]).config
    (problem,) = missing_inputs(config, ("data.train_files",))
    assert "row 0: has no environment, which actor_rollout_ref.rollout.agent.endpoint.program=verifiers" in problem.what


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Ask", "nowhere.py: no such file"),
        ("{}/tools.py:Aks", "Did you mean"),
        ("{}/broken.py:Ask", "broken.py: is not Python"),
        ("no_such_package.tools.Ask", "there is no module no_such_package"),
        ("{}/tools.py:Ask", None),
        ("tests.runs.test_turns.Turns", None),
    ],
)
@pytest.mark.parametrize("section", ["tools", "interaction"])
def test_classes_of_tools_are_looked_for(
    section: str, name: str, message: str | None, inputs: Path, tmp_path: Path
) -> None:
    (inputs / "broken.py").write_text("class Ask(:\n")
    file, name = tmp_path / "classes.yaml", name.format(inputs)
    name = name if section == "tools" else name.replace("Ask", "Digits").replace("Aks", "Digit")
    file.write_text(f"{section}: [{{name: ask, class_name: '{name}'}}]")
    key = f"{SECTION}.{'tool' if section == 'tools' else 'interaction'}_config_path"
    problems = missing_inputs(load_config(None, [*turn_overrides(inputs, tmp_path / "run"), f"{key}={file}"]).config)
    assert [problem.path for problem in problems] == ([key] if message else [])
    assert all(f"{file}: {section}[0].class_name={name.partition(':')[0]}" in problem.what for problem in problems)
    assert all(message in problem.what for problem in problems)


@pytest.mark.parametrize(
    ("section", "about", "message"),
    [
        (
            "tools",
            "Ask', config: {know: true}",
            "Ask cannot be created with config {'know': True} (TypeError: got an unexp",
        ),
        ("tools", "Digits'", "Digits has no method `call` (or `execute`, as verl's tools have)"),
        ("tools", "Later', config: {word: 1}", "Later cannot be created with config {'word': 1}"),
        ("tools", "Unknown', config: {word: 1}", None),
        ("tools", "Asks', config: {knows: false}", None),
        ("interaction", "Ask'", "Ask has no methods `reset` and `step`"),
        ("interaction", "Digits', config: {upto: 3}", "Digits cannot be created with config {'upto': 3}"),
    ],
)
def test_classes_of_tools_have_their_methods_and_arguments(
    section: str, about: str, message: str | None, inputs: Path, tmp_path: Path
) -> None:
    """As far as their file tells, which is not run."""
    more = "class Asks(Ask): pass\nclass Later(Asks):\n  def __init__(self): raise\n"
    more += "import elsewhere\nclass Unknown(elsewhere.Base): pass\n"
    (inputs / "more.py").write_text((inputs / "tools.py").read_text() + more)
    file = tmp_path / "classes.yaml"
    file.write_text(f"{section}: [{{name: ask, class_name: '{inputs / 'more.py'}:{about}}}]")
    key = f"{SECTION}.{'tool' if section == 'tools' else 'interaction'}_config_path"
    config = load_config(None, [*turn_overrides(inputs, tmp_path / "run"), f"{key}={file}"]).config
    found = [problem.what for problem in missing_inputs(config)]
    assert [message in what for what in found] == ([True] if message else [])


def test_an_own_environment_has_its_methods(inputs: Path, tmp_path: Path) -> None:
    own = f"{ROLLOUT}.agent.default_agent_loop={inputs / 'tools.py'}:Ask"
    config = load_config(None, [*turn_overrides(inputs, tmp_path / "run"), own]).config
    assert "Ask has no methods `reset` and `step`" in missing_inputs(config)[0].what


def test_rows_that_name_an_interaction_need_an_agent_that_lets_it_act(inputs: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    named = [record | {"extra_info": {"interaction_kwargs": {"name": "digits"}}} for record in records]
    file, interactions = write_jsonl(tmp_path / "train.jsonl", named), tmp_path / "interaction.yaml"
    interactions.write_text(f"interaction: [{{name: digits, class_name: '{inputs / 'tools.py'}:Digits'}}]")
    overrides = [o for o in turn_overrides(inputs, tmp_path / "run") if "tool_config" not in o and "agent" not in o]
    overrides += [f"data.train_files={file}", f"{SECTION}.interaction_config_path={interactions}"]
    overrides += [f"{ROLLOUT}.agent.num_workers=1"]
    with pytest.raises(ValueError, match=r"no row has several turns.*the interaction that rows name") as error:
        build_run(load_config(None, overrides)).close()
    assert f"Set {ROLLOUT}.agent.default_agent_loop=tool_agent, by which" in str(error.value)
    (problem,) = missing_inputs(load_config(None, overrides).config, rows=None)
    assert f"{problem.path}={problem.what}" == str(error.value)
    build_run(load_config(None, [*overrides, f"{ROLLOUT}.agent.default_agent_loop=tool_agent"])).close()


def test_agents_of_a_file_are_named_by_rows_and_by_default(inputs: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    rows = write_jsonl(tmp_path / "train.jsonl", [record | {"agent_name": "digits"} for record in records])
    agents, key = tmp_path / "agents.yaml", f"{ROLLOUT}.agent.agent_loop_config_path"
    agents.write_text(f"[{{name: digits, _target_: '{inputs / 'tools.py'}:Digits'}}]")
    overrides = [*turn_overrides(inputs, tmp_path / "run"), *own(inputs), f"{key}={agents}"]
    default = f"{ROLLOUT}.agent.default_agent_loop"
    assert first_step([*overrides, f"{default}=digits"])["reward/extra/turns/mean"] > 1
    build_run(load_config(None, [*overrides, f"{default}=single_turn_agent", f"data.train_files={rows}"])).close()
    wrong = load_config(None, [*overrides, f"{default}=digts"]).config
    (problem,) = missing_inputs(wrong)
    assert problem.path == key
    assert "has no agent digts" in problem.what
    assert "Did you mean digits?" in problem.what
    agents.write_text(f"[{{name: d, _target_: '{inputs / 'tools.py'}:Ask'}}]")
    found = {problem.path: problem.what for problem in missing_inputs(load_config(None, [*overrides]).config)}
    assert "[0]._target_=" in found[key]
    assert "Ask has no methods `reset` and `step`" in found[key]
    named = load_config(None, [*overrides, f"data.train_files={rows}"]).config
    found = {problem.path: problem.what for problem in missing_inputs(named)}
    assert (
        "`agent_name` is 'digits'; it may be single_turn_agent, tool_agent, d, verifiers:" in found["data.train_files"]
    )


def test_tools_and_interactions_that_no_row_has_are_refused(inputs: Path, tmp_path: Path) -> None:
    interactions = tmp_path / "interaction.yaml"
    interactions.write_text(f"interaction: [{{name: digits, class_name: '{inputs / 'tools.py'}:Digits'}}]")
    overrides = turn_overrides(inputs, tmp_path / "run")
    with pytest.raises(ValueError, match=r"interaction_config_path=.* has no effect, as no row"):
        build_run(load_config(None, [*overrides, f"{SECTION}.interaction_config_path={interactions}"])).close()
    of_its_own = f"{ROLLOUT}.agent.default_agent_loop={inputs / 'tools.py'}:Digits"
    with pytest.raises(ValueError, match=r"tool_config_path=.* has no effect, as no row is of tool_agent") as error:
        build_run(load_config(None, [*overrides, of_its_own])).close()
    (problem,) = missing_inputs(load_config(None, [*overrides, of_its_own]).config, rows=None)
    assert f"{problem.path}={problem.what}" == str(error.value)
    assert missing_inputs(load_config(None, [*overrides, of_its_own]).config) == []  # the others may be of tool_agent


def test_held_out_rows_may_have_one_turn(inputs: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    asked = write_jsonl(tmp_path / "train.jsonl", [record | {"agent_name": "tool_agent"} for record in records])
    plain = [o for o in turn_overrides(inputs, tmp_path / "run") if "default_agent_loop" not in o]
    held_out = f"data.val_files={inputs / 'train.jsonl'}"
    one_step = ["trainer.test_freq=1", "trainer.total_training_steps=1", f"{ROLLOUT}.n=4"]
    run = train([*plain, HERE, f"data.train_files={asked}", held_out, *one_step])
    assert "val-core/ask/reward/mean@1" in measured(run)[1]


def test_the_audit_of_a_reward_samples_conversations(inputs: Path, tmp_path: Path) -> None:
    """Replies that are tried have one turn, sampled ones as many as in training, with what tools answered."""
    config = load_config(None, [*turn_overrides(inputs, tmp_path / "run"), HERE]).config
    with build_reward_trial(config, rows=4, samples=64) as trial:
        assert trial.sampled is not None
        told = [request.solution_str for request in trial.sampled.requests]
        paid = [outcome.value for outcome in trial.sampled.outcomes if isinstance(outcome, Score)]
        assert len(told) == len(paid) == 64
        assert any("tool\n" in text for text in told)
        assert {0.2} <= {round(score, 1) for text, score in zip(told, paid, strict=True) if "tool\n" in text}
    assert check_reward(load_config(None, turn_overrides(inputs, tmp_path / "run")), rows=4, samples=4, out=None)


def test_an_environment_alone_leaves_no_reward_to_check(inputs: Path, tmp_path: Path) -> None:
    loaded = load_config(None, [*turn_overrides(inputs, tmp_path / "run"), *own(inputs)])
    with pytest.raises(ValueError, match="scored by its environment alone"):
        check_reward(loaded, rows=2, samples=0, out=None)


class Turns(Text):
    """Conversations with a tool."""

    def overrides(self, folder: Path, *more: str) -> list[str]:
        """See `Loop.overrides`."""
        saved = ["trainer.total_training_steps=6", "trainer.save_freq=2", "data.val_files=[]"]
        return [*turn_overrides(self._inputs, folder), *saved, *more]


@pytest.mark.slow
def test_conversations_go_on_after_kills(inputs: Path, tmp_path: Path) -> None:
    """SIGKILL ends the processes of tools with the run, and what follows is bitwise the run that was never killed."""
    loop = Turns(inputs)
    loop.train(loop.overrides(tmp_path / "whole"))
    train_killed(loop, loop.overrides(tmp_path / "killed"), tmp_path / "killed", kills=3)
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 6)


def learned(folder: Path, seed: int, *more: str) -> float:
    """Mean score of the last five of 40 steps. A turn that a tool answered is worth 0.2, whose digit is one of two; the
    best without such a turn is 0.5: 0.2 for a digit, and 0.6 where it is the right one."""
    folder.mkdir()
    write_turn_inputs(folder, digits="0101", seed=1, std=0.2)
    learning = ["actor_rollout_ref.actor.optim.lr=5e-3", "actor_rollout_ref.actor.entropy_coeff=0.02"]
    options = [*learning, "trainer.total_training_steps=40", f"trainer.seed={seed}", *more]
    metrics = measured(train([*turn_overrides(folder, folder / "run"), *options]))
    assert metrics[1]["critic/score/mean"] < 0.3
    return sum(metrics[step]["critic/score/mean"] for step in range(36, 41)) / 5


@pytest.mark.slow
def test_the_use_of_a_tool_that_pays_is_learned(tmp_path: Path) -> None:
    """And is not where no call is answered."""
    assert learned(tmp_path / "answered", 1) > 0.6
    assert learned(tmp_path / "never", 1, f"{SECTION}.max_assistant_turns=1") < 0.55
