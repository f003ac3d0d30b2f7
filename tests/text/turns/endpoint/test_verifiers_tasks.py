"""Environments of the real library verifiers.v1: its harness calls the policy, and its tasks score."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.runs.test_endpoint import AGENT, inputs, overrides  # noqa: F401
from tests.runs.tiny_run import measured, train
from tether.integrations import integration
from tether.text.data.location import has_tasksets
from tether.text.data.sources import load_rows

if not has_tasksets():
    pytest.skip("needs verifiers 0.4 or later: bash scripts/test_verifiers.sh", allow_module_level=True)

TASKSETS = Path(__file__).with_name("tasksets")
NAME = "verifiers:count-on"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tasksets were installed packages, here and in processes that are started."""
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS), prepend=":")


@contextmanager
def policy(*turns: dict, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """Serve OpenAI's API: answer each call with the next of `turns`, and then with an error; yield the requests."""
    requests: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = 400, {"error": {"message": "This model's maximum context length is 9 tokens"}}
            if len(requests) <= len(turns):
                message = {"role": "assistant", "content": None, **turns[len(requests) - 1]}
                reason = "tool_calls" if message.get("tool_calls") else "stop"
                choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
                status, body = 200, {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
                body |= {"choices": [choice]}
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        monkeypatch.setenv("OPENAI_MODEL", "policy")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield requests
        server.shutdown()


def play(source: str, number: int = 0) -> float:
    """Play an episode of a row of a source."""
    record = load_rows(source).sources[0].records[number]
    row = {"prompt": record["prompt"], "extra_info": json.loads(json.dumps(record["extra_info"]))}
    return asyncio.run(integration("agents", "verifiers_tasks").play(row))


def said(*texts: str) -> list[dict]:
    return [{"content": text} for text in texts]


def test_a_row_is_a_task() -> None:
    rows = list(load_rows(f"{NAME}?taskset.first=7&size=2"))
    system = {"role": "system", "content": "Say the next number."}
    assert [list(row.messages) for row in rows] == [[system, {"role": "user", "content": text}] for text in "78"]
    assert [row.ground_truth for row in rows] == ["8", "9"]
    assert {(row.data_source, row.agent_name) for row in rows} == {("verifiers/count-on", None)}


def test_the_task_scores_what_the_policy_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, score in (("8", 1.0), ("nine", 0.0)):
        with policy(*said(text), monkeypatch=monkeypatch) as requests:
            assert play(f"{NAME}?taskset.first=7") == score
        (request,) = requests
        assert [message["content"] for message in request["messages"]] == ["Say the next number.", "7"]
        assert request["model"] == "policy"


def test_the_environment_holds_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    with policy(*said("1", "2", "nine"), monkeypatch=monkeypatch) as requests:
        assert play(f"{NAME}?taskset.turns=3") == pytest.approx(2 / 3)
    assert [message["content"] for message in requests[2]["messages"]][1:] == ["0", "1", "1", "2", "2"]


def test_no_policy_gets_a_shell_unasked() -> None:
    """The library's default harness runs the policy's commands."""
    load = integration("agents", "verifiers_tasks").load
    for query, harness in {
        "": "tether_chat",
        "?agent.max_turns=2": "tether_chat",
        "?agent.harness.tool_timeout=5": "tether_chat",
        "?agent.harness.id=null": "null",
        "?agent.harness.id=bash": "bash",
    }.items():
        agent = load(f"count-on{query}").config.agent
        assert (agent.harness.id, agent.runtime.type) == (harness, "subprocess")
    assert load("count-on?agent.harness.id=bash&agent.runtime.type=docker").config.agent.runtime.type == "docker"


@pytest.mark.slow
def test_tools_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "adder_add", "arguments": '{"a": 2, "b": 1}'}}
    wrong = {"id": "d", "type": "function", "function": {"name": "adder_add", "arguments": "{"}}
    turns = [{"tool_calls": [call, wrong]}, {"content": "3"}]
    with policy(*turns, monkeypatch=monkeypatch) as requests:
        assert play("verifiers:adder?size=3", number=2) == 0.5
    (tool,) = requests[0]["tools"]
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    answers = [message["content"] for message in requests[1]["messages"] if message["role"] == "tool"]
    assert answers[0] == "3"
    assert "invalid JSON" in answers[1]


def test_a_published_environment_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("marble_v1", reason="pip install marble-v1==0.1.0")
    source = "verifiers:marble-v1?taskset.pieces=2&taskset.seed=7&size=2"
    for record in load_rows(source).sources[0].records:
        layout = json.dumps(record["extra_info"]["verifiers"]["task"]["solution"])
        for text, score in ((f"It bounces.\n```json\n{layout}\n```", 1.0), ("It falls.", 0.0)):
            with policy(*said(text), monkeypatch=monkeypatch):
                assert play(source, record["extra_info"]["index"]) == score


def test_what_a_limit_of_length_cuts_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    with policy(*said("1"), monkeypatch=monkeypatch):
        assert play(f"{NAME}?taskset.turns=2") == 0.5


def test_other_roles_have_models_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with policy(*said("1", "2"), monkeypatch=monkeypatch) as requests:
        client = {"type": "eval", "base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
        assert play(f"verifiers:pair?says.model=other&says.client={json.dumps(client)}") == 1
    assert [request["model"] for request in requests] == ["policy", "other"]
    with policy(*said("1", "2"), monkeypatch=monkeypatch), pytest.raises(RuntimeError, match="agent 2 times"):
        play(f"{NAME}?id=best-of-n&n=2")


def test_a_reward_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with policy(*said("1"), monkeypatch=monkeypatch), pytest.raises(RuntimeError, match=r"TaskError.*nothing here"):
        play(f"{NAME}?taskset.broken=true")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("verifiers:no-such-thing", "no-such-thing: the environment cannot be loaded: .*'no-such-thing' not found"),
        (f"{NAME}?taskset.frist=1", "frist=1: taskset.frist=1: Extra inputs are not permitted. Options are paths"),
        (f"{NAME}?first=1", "count-on.first=1: first=1: Extra inputs are not permitted. Options are paths"),
        ("verifiers:before", "before: the environment cannot be loaded: .* One of verifiers before 0.4 needs"),
        (f"{NAME}?part=eval", "a taskset has no part"),
        (f"{NAME}?size=no", "size is `no`"),
        ("verifiers:adder", "verifiers:adder: the tasks have no end. Say how many to use: size=1000"),
        ("verifiers:pair", r"verifiers:pair: the policy plays 2 roles \(asks, says\)"),
    ],
)
def test_what_cannot_be_used_is_one_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_rows(source)


def trained(inputs: Path, run: Path, query: str, *options: str) -> tuple[list[dict], dict[int, dict[str, float]]]:  # noqa: F811
    """Train on a taskset of one row; return the rows of the first step and the metrics."""
    one_row = [
        f'data.train_files="{NAME}?taskset.count=1{query}"', "data.train_batch_size=1", "data.max_prompt_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1", "custom_reward_function.path=null", f"{AGENT}.num_workers=2",
    ]  # fmt: skip
    train([*overrides(inputs, run, "verifiers"), *one_row, *options])
    metrics = measured(run)
    assert metrics[1]["training/rollout_probs_diff_max"] < 1e-5, "no token is another one than that which was sampled"
    return [json.loads(line) for line in (run / "rollouts/1.jsonl").read_text().splitlines()], metrics


@pytest.mark.slow
def test_a_conversation_is_one_branch(inputs: Path, tmp_path: Path) -> None:  # noqa: F811
    rows, _ = trained(inputs, tmp_path / "run", "&taskset.turns=3")
    assert {(row["calls"], row["branches"]) for row in rows} == {(3, 1)}


@pytest.mark.slow
def test_the_policy_learns_what_a_task_rewards(inputs: Path, tmp_path: Path) -> None:  # noqa: F811
    options = ["actor_rollout_ref.rollout.n=32", "data.max_response_length=2", "trainer.total_training_steps=12"]
    _, metrics = trained(inputs, tmp_path / "run", "", *options)
    scores = [metrics[step]["critic/score/mean"] for step in range(1, 13)]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.3, scores
