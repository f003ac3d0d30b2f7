"""Programs that were not written for tether, through the whole trainer."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.runs.resume import assert_resume_is_exact
from tests.runs.test_recording import records
from tests.runs.test_servers import another_server
from tests.runs.tiny_run import measured, train, write_jsonl
from tests.runs.turn_run import ID, ROLLOUT, turn_overrides, write_turn_inputs
from tether.config import ConfigError, load_config
from tether.metrics.records import unpack
from tether.text.input_checks import missing_inputs

AGENT = f"{ROLLOUT}.agent"
PLAYERS = Path(__file__).parents[1] / "text/turns/endpoint/players.py"
OPENAI = """
import openai

def play(row):
    client, messages = openai.OpenAI(), list(row["prompt"])
    tool = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[tool], max_tokens=4)
        messages.append(answer.choices[0].message)
        for call in answer.choices[0].message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": row["ground_truth"]})
        messages.append({"role": "user", "content": "?"})
    chunks = client.chat.completions.create(model="policy", messages=messages, max_tokens=4, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return float(row["ground_truth"] in text)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_turn_inputs(tmp_path_factory.mktemp("programs"))


def overrides(inputs: Path, run: Path, program: str) -> list[str]:
    """A run whose rows `program` plays and scores."""
    turns = ("multi_turn", "agent.default_agent_loop", "custom_reward")
    kept = [override for override in turn_overrides(inputs, run) if not any(key in override for key in turns)]
    return [
        *kept,
        "data.max_response_length=64",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={run / 'rollouts'}",
        f"{ROLLOUT}.n=4",
        f"{AGENT}.default_agent_loop=endpoint",
        f"{AGENT}.endpoint.program={program}",
        f"{AGENT}.endpoint.reward=program",
        f"{AGENT}.num_workers=2",
    ]


def trained_rows(inputs: Path, run: Path, program: str, *more: str) -> list[dict]:
    """Train for a step; return its rows after a check that the policy learned from the tokens that it sampled."""
    train([*overrides(inputs, run, program), *more])
    metrics = measured(run)[1]
    assert metrics["training/rollout_probs_diff_max"] < 1e-5, "no token is another one than that which was sampled"
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    return [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()]


def test_a_command_plays_and_scores(inputs: Path, tmp_path: Path) -> None:
    row = {"data_source": "ask", "prompt": [{"role": "user", "content": "?"}], "extra_info": {}}
    players = [row | {"reward_model": {"style": "rule", "ground_truth": name}} for name in ("good", "streams")]
    data = f"data.train_files={write_jsonl(tmp_path / 'players.jsonl', players)}"
    rows = trained_rows(inputs, tmp_path / "run", f"{sys.executable} {PLAYERS}", data, f"{ROLLOUT}.n=2")
    assert sorted((row["gts"], row["score"], row["calls"]) for row in rows) == [
        ("good", 0.25, 3), ("good", 0.25, 3), ("streams", 1, 2), ("streams", 1, 2),
    ]  # fmt: skip
    for row in rows:
        assert row["branches"] == 1
        text = [*row["prompt_ids"], *row["response_ids"]]
        assert text.count(ID["<|im_start|>"]) >= 2 * row["calls"]
        assert sum(row["rewards"]) == pytest.approx(row["score"])


@pytest.mark.slow
def test_servers_answer_the_calls_of_programs(inputs: Path, tmp_path: Path) -> None:
    row = {"data_source": "ask", "prompt": [{"role": "user", "content": "?"}], "extra_info": {}}
    players = [row | {"reward_model": {"style": "rule", "ground_truth": name}} for name in ("good", "forks")]
    data = f"data.train_files={write_jsonl(tmp_path / 'players.jsonl', players)}"
    with another_server(inputs / "model", "vllm") as url:
        served = [data, url, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_timeout=300"]
        rows = trained_rows(inputs, tmp_path / "run", f"{PLAYERS}:play", *served)
    assert {(row["gts"], row["calls"], row["branches"]) for row in rows} == {("good", 3, 1), ("forks", 6, 4)}


@pytest.mark.parametrize(
    "more",
    [
        ["algorithm.adv_estimator=grpo"],
        pytest.param(["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True"], marks=pytest.mark.slow),
        pytest.param(["algorithm.adv_estimator=rloo", "trainer.async_mode=one_step_off"], marks=pytest.mark.slow),
    ],
)
def test_a_run_with_branches_resumes_exactly(more: list[str], inputs: Path, tmp_path: Path) -> None:
    row = {"data_source": "ask", "prompt": [{"role": "user", "content": "?"}], "extra_info": {}}
    player = row | {"reward_model": {"style": "rule", "ground_truth": "forks_once"}}
    data = [f"data.train_files={write_jsonl(tmp_path / 'players.jsonl', [player] * 2)}", "data.val_files=[]"]
    settings = [o for o in overrides(inputs, tmp_path, f"{PLAYERS}:play") if "default_local_dir" not in o]
    settings += [*data, *more, "data.train_batch_size=2", f"{ROLLOUT}.n=2", "actor_rollout_ref.actor.shuffle=True"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "custom_reward_function.path=null"]
    settings += [f"{AGENT}.num_workers=1"]  # batches of calls of other sizes would round otherwise
    assert_resume_is_exact(inputs, tmp_path, settings, total=2, must_change=["actor/grad_norm"])
    metrics = measured(tmp_path / "whole")[2]
    assert metrics["reward/extra/branch_tokens/mean"] > 0
    # Four episodes are counted and recorded, whatever their branches are.
    assert len((tmp_path / "rollouts/2.jsonl").read_text().splitlines()) == 4
    recorded = records(tmp_path / "whole", "columns")[2]
    columns = {name: unpack(column) for name, column in recorded.items() if isinstance(column, dict)}
    assert {len(column) for column in columns.values()} == {4}
    assert columns["reward"].mean() == pytest.approx(metrics["critic/score/mean"])


def test_a_conversation_ends_where_the_positions_of_the_model_end(inputs: Path, tmp_path: Path) -> None:
    """The configured lengths are larger; the call that leaves no room fails as with max_model_len."""
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    row = {"data_source": "ask", "prompt": [{"role": "user", "content": "?"}], "extra_info": {}}
    players = [row | {"reward_model": {"style": "rule", "ground_truth": "fills_the_context"}}]
    data = [f"data.train_files={write_jsonl(tmp_path / 'players.jsonl', players)}", "data.train_batch_size=1"]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=1"
    path = f"actor_rollout_ref.model.path={model}"
    rows = trained_rows(inputs, tmp_path / "run", f"{PLAYERS}:play", *data, mini, path)
    assert [(row["score"], row["cut_by_length_limit"]) for row in rows] == [(1, 1)] * 4
    assert all(len(row["prompt_ids"]) + len(row["response_ids"]) <= 40 for row in rows)


def test_an_unmodified_client_of_openai_plays(inputs: Path, tmp_path: Path) -> None:
    """With tools and a stream."""
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(OPENAI)
    rows = trained_rows(inputs, tmp_path / "run", f"{tmp_path / 'agent.py'}:play")
    assert {row["calls"] for row in rows} == {4}
    assert {row["branches"] for row in rows} <= {1, 2}, "without the tool the prompt of the last call is another one"


def test_the_reward_function_scores_what_programs_played(inputs: Path, tmp_path: Path) -> None:
    """It gets the conversation, as with other conversations."""
    (tmp_path / "agent.py").write_text(
        f"import sys; sys.path.append({str(PLAYERS.parent)!r})\nfrom players import good\n"
        "def play(row): good(list(row['prompt']))\n"
    )
    scored = [f"{AGENT}.endpoint.reward=function", f"custom_reward_function.path={inputs / 'reward.py'}"]
    rows = trained_rows(inputs, tmp_path / "run", f"{tmp_path / 'agent.py'}:play", *scored)
    assert {row["calls"] for row in rows} == {3}
    assert all(0.2 <= row["score"] <= 1 for row in rows), "more than one turn pays"


def test_a_program_that_cannot_be_run_is_reported_before_anything_is_loaded(inputs: Path, tmp_path: Path) -> None:
    for program, problem in {
        "nowhere --fast": "there is no program 'nowhere' to run",
        "'unclosed": "No closing quotation",
        f"{PLAYERS} --fast": f"to run. Give python {PLAYERS} --fast, or a function of the file: {PLAYERS}:NAME",
        f"{tmp_path}/agent.py:play": "no such file",
        f"{PLAYERS}:plays": "defines no plays",
    }.items():
        loaded = load_config(None, overrides(inputs, tmp_path / "run", f'"{program}"'))
        assert problem in " ".join(map(str, missing_inputs(loaded.config)))


def test_turns_of_the_run_contradict_the_endpoint_and_nothing_else(inputs: Path, tmp_path: Path) -> None:
    settings = [*overrides(inputs, tmp_path / "run", f"{PLAYERS}:play"), f"{ROLLOUT}.multi_turn.enable=True"]
    with pytest.raises(ConfigError, match="whose programs hold their conversations themselves") as error:
        load_config(None, settings, partial(missing_inputs, rows=None))
    assert "no row has several turns" not in str(error.value)
