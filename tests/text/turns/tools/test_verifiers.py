"""Environments of the real library verifiers before 0.4: their own loop, tools and rubric answer and score."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="pip install 'verifiers>=0.2,<0.3'")

from tests.runs.tiny_run import base_overrides, measured, train, write_inputs
from tests.text.turns.tools.test_pool import said
from tether.text.data.location import has_tasksets
from tether.text.data.sources import load_rows
from tether.text.turns.tools import Reply, ResponderSpecs, ToolPool, environment_named
from tether.text.turns.tools.pool import StepRequest

if has_tasksets():
    pytest.skip("verifiers before 0.4 is not installed: pip install 'verifiers>=0.2,<0.3'", allow_module_level=True)

NAME = "verifiers:count-up"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `count_up` were an installed package, here and in processes that are started."""
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("environments")))


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).with_name("environments")))
        names = [NAME, *(f"{NAME}?{query}" for query in ("kind=tools", "kind=single", "reward=broken", "first=100"))]
        environments = {name: environment_named(name, "hermes") for name in names}
        with ToolPool(ResponderSpecs((), environments), num_workers=1, timeout=60.0, startup_timeout=300.0) as pool:
            yield pool


def step(pool, name, *turns, row=0, number=0):
    """Say turns in a conversation with row `number`, in the place of `row` of a batch; what is answered to the last."""
    source = load_rows(name).sources[0].records[number]
    extra = source["extra_info"]
    about = {"ground_truth": source["reward_model"]["ground_truth"], "extra_info": extra}
    spoken, replies = [], []
    for at, turn in enumerate(turns):
        spoken.append([*replies, {"role": "assistant", "content": turn}])
        request = StepRequest(source["agent_name"], 0, row, about, source["prompt"], spoken[: at + 1])
        answer = pool.take(pool.ask(request, row))
        replies = answer.messages
    return answer


def test_the_rows_are_those_of_the_dataset() -> None:
    rows = list(load_rows([f"{NAME}?first=7&part=train&size=2", f"{NAME}?kind=single&part=eval"]))
    assert [row.messages[0]["content"] for row in rows] == ["7", "8", "0", "1"]
    assert [row.agent_name for row in rows] == [f"{NAME}?first=7"] * 2 + [f"{NAME}?kind=single"] * 2
    assert rows[0].data_source == "verifiers/count-up"
    assert rows[0].ground_truth == "7"


def test_the_library_decides_on_replies_the_end_and_the_reward(pool) -> None:
    assert step(pool, NAME, "1") == said("1", role="user")
    assert step(pool, NAME, "1", "2", row=1) == said("2", role="user")
    ended = step(pool, NAME, "1", "2", "nine", row=2)
    assert ended.done
    assert ended.reward == pytest.approx(2 / 3)
    assert step(pool, f"{NAME}?first=100", "101", number=1, row=3) == said("102", role="user")


def test_conversations_of_a_process_do_not_mix(pool) -> None:
    rows = load_rows(NAME).sources[0].records
    spoken = {row: [] for row in range(4)}
    for turn in range(2):
        for row in spoken:
            source = rows[row]
            before = [{"role": "user", "content": str(row + turn)}] if turn else []
            spoken[row].append([*before, {"role": "assistant", "content": "?"}])
            about = {"ground_truth": "", "extra_info": source["extra_info"]}
            request = StepRequest(NAME, 1, 10 + row, about, source["prompt"], list(spoken[row]))
            assert pool.take(pool.ask(request, 0)) == said(str(row + turn + 1), role="user")


def test_a_single_turn_is_scored_at_once(pool) -> None:
    assert step(pool, f"{NAME}?kind=single", "1") == Reply([], pytest.approx(1 / 3), True)


def test_tools_are_called_as_the_model_writes_it(pool) -> None:
    name = f"{NAME}?kind=tools"
    (tool,) = load_rows(name)[0].tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert step(pool, name, f"Let me add.\n{call}") == said("5")
    answer = step(pool, name, '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', row=1)
    assert "missing 1 required positional argument" in answer.messages[0]["content"]
    assert "unreadable" in step(pool, name, "<tool_call>{</tool_call>", row=2).messages[0]["content"]
    assert step(pool, name, call, "5", row=3).done


def test_a_rubric_that_fails_gives_no_score(pool) -> None:
    """The library would score 0."""
    name = f"{NAME}?reward=broken"
    assert "broken of the rubric: KeyError('nothing here')" in step(pool, name, "1", "2", "3").error


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("verifiers:no-such-thing", "the environment no-such-thing is not installed.*pip install no-such-thing"),
        (f"{NAME}?kid=tools", "count-up.kid=tools: the environment cannot be loaded: .*'kid'"),
        (f"{NAME}?part=test", "part is `test`; it may be train, eval"),
        (f"{NAME}?part=eval", "has no eval_dataset"),
        (f"{NAME}?size=no", "size is `no`"),
        (f"{NAME}?reward=together", "scores all responses to a prompt together"),
    ],
)
def test_what_cannot_be_used_is_one_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rows(source)


def test_messages_name_the_environment_as_the_user_does() -> None:
    missing = "verifiers:no-such-thing"
    with pytest.raises(ValueError, match=f"^{missing}: the environment no-such-thing is not installed") as error:
        ToolPool(
            ResponderSpecs((), {missing: environment_named(missing, "hermes", missing)}),
            num_workers=1,
            timeout=60.0,
            startup_timeout=300.0,
        )
    assert "verifiers_environment" not in str(error.value)


def test_a_run_trains_on_it(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    section = "actor_rollout_ref.rollout"
    options = [
        f'data.train_files="{NAME}?first=1"', "data.train_batch_size=4", "data.val_files=[]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{section}.multi_turn.enable=True", f"{section}.agent.num_workers=1", f"{section}.n=8",
        f"{section}.multi_turn.timeout=60", "data.max_response_length=48",
        "custom_reward_function.path=null",
        "trainer.total_training_steps=1", f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    ]  # fmt: skip
    run = train([*base_overrides(inputs, tmp_path / "run"), "algorithm.adv_estimator=grpo", *options])
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert "reward/extra/turns/mean" in measured(run)[1]
