"""Programs on a SandboxFusion server: its protocol, its limits, and that its failures are never scores."""

import socket

import pytest

from tests.text.rewards.sandbox.fusion_server import FIELDS, served
from tether.text.rewards.outcome import RewardError, RewardRequest, Score
from tether.text.rewards.router import check_sources
from tether.text.rewards.sandbox.limits import Limits, SandboxError
from tether.text.rewards.sandbox.options import ProgramOptions, Server
from tether.text.rewards.sandbox.reward import ProgramReward
from tether.text.rewards.service.pool import RewardPool

SUM = "```python\nprint(sum(map(int, input().split())))\n```"
TESTS = {"inputs": ["1 2\n", "3 4\n", "5 6\n", "7 8\n"], "outputs": ["3\n", "7\n", "11\n", "0\n"]}

RAN = {"status": "Finished", "return_code": 0, "stdout": "3\n", "stderr": ""}
ADD = {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}


@pytest.fixture
def server():
    with served() as server:
        yield server


def options(url, *, concurrency=64, seconds=20.0, **others):
    return ProgramOptions(limits=Limits(seconds, 256, 32), server=Server(url, 512, concurrency), **others)


def score(server, answer, tests, **others):
    return ProgramReward(options(server.url, **others))("apps", answer, tests, {})


def test_a_request_is_what_the_server_and_verl_define(server):
    assert score(server, SUM, TESTS) == {"score": 0.75, "acc": False, "timed_out": False}
    assert len(server.bodies) == 4
    for body in server.bodies:
        assert set(body) == FIELDS
        assert body["run_timeout"] == body["compile_timeout"] == 20.0
        assert body["memory_limit_MB"] == 512
        assert (body["language"], body["files"], body["fetch_files"]) == ("python", {}, [])
        assert body["stdin"] in TESTS["inputs"]


def test_calls_and_assertions_run_there_too(server):
    for answer, tests, expected in (
        ("def add(a, b):\n    print('hm')\n    return a + b", ADD, 1),
        ("def add(a, b):\n    return a - b", ADD, 0),
        ("def add(a, b):\n    return a + b", {"assert_case": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, 0.5),
        ("import os\nos._exit(0)", {"assert_case": ["assert add(1, 2) == 3"]}, 0),
        ("raise SystemExit(3)", TESTS, 0),
    ):
        assert score(server, f"```python\n{answer}\n```", tests)["score"] == expected, answer


def test_a_program_that_takes_too_long_is_wrong(server):
    tests = {"inputs": ["", ""], "outputs": ["1", "1"]}
    got = score(server, "```python\nimport time\ntime.sleep(60)\n```", tests, seconds=1.0)
    assert got == {"score": 0.0, "acc": False, "timed_out": True, "reason": "the program exceeded its limit of time"}


def test_a_program_that_does_not_compile_is_wrong(server):
    assert score(server, "```cpp\nint main(\n```", TESTS, languages=("cpp",))["score"] == 0


def test_a_busy_server_is_asked_again(server, monkeypatch):
    monkeypatch.setattr(ProgramOptions, "pause", 0.01)
    server.busy = 2
    assert score(server, SUM, {"inputs": ["1 2"], "outputs": ["3"]})["score"] == 1
    assert len(server.bodies) == 3
    server.busy = 3
    with pytest.raises(SandboxError, match="HTTP 504"):
        score(server, SUM, {"inputs": ["1 2"], "outputs": ["3"]})


def test_requests_at_once_are_bounded(server):
    for concurrency in (1, 2):
        assert score(server, SUM, TESTS, concurrency=concurrency)["score"] == 0.75
        assert server.most_at_once <= concurrency


FAILURES = [
    (500, "HTTP 500"),
    ({"status": "SandboxError", "message": "no pod", "compile_result": None, "run_result": None}, "no pod"),
    ({"status": "Failed", "run_result": {"status": "Error", "return_code": None}}, "ran no program"),
    ({"status": "Success"}, "ran no program"),
    ({"status": "Success", "run_result": RAN | {"stdout": 3}}, "ran no program"),
    ({"status": "Success", "run_result": RAN | {"stdout": False}}, "ran no program"),
    ({"status": "Success", "run_result": RAN | {"stderr": ["no"]}}, "ran no program"),
    ({"status": "Success", "run_result": RAN | {"return_code": False}}, "ran no program"),
    ({"status": "Success", "run_result": RAN | {"return_code": "0"}}, "ran no program"),
    ({"status": "Success", "run_result": RAN | {"stdout": "\ud83d"}}, "an unpaired surrogate"),
    ({"status": "Failed", "run_result": None, "compile_result": RAN}, "ran no program"),
    ({"status": "Failed", "run_result": None, "compile_result": RAN | {"return_code": None}}, "ran no program"),
    ({"status": "Failed", "run_result": None, "compile_result": RAN | {"return_code": True}}, "ran no program"),
    (301, "HTTP 301"),
    (b"[" * 100_000, "not JSON"),
    (b" " * (1 << 24) + b"{}", "more than 16 MiB"),
    (None, "IncompleteRead"),
    ([1, 2], "ran no program"),
    ("nonsense", "ran no program"),
]


def test_a_failure_of_the_server_is_an_error_and_never_a_score(server):
    for answers, message in FAILURES:
        server.answers, server.short = answers, answers is None
        with pytest.raises(SandboxError, match=message):
            score(server, SUM, TESTS)


def test_nothing_printed_may_be_null(server):
    server.answers = {"status": "Success", "run_result": RAN | {"stdout": None, "stderr": None}}
    assert score(server, SUM, {"inputs": ["1 2"], "outputs": [""]})["score"] == 1
    assert score(server, SUM, TESTS)["score"] == 0


def test_what_is_no_address_is_refused_by_its_key():
    for url in (
        "http://h:99999/",
        "http://h:abc/",
        "http://[::1/v1",
        "http://.x/",
        "http://h/\u00e9",
        "http://h/a b",
        "h",
    ):
        with pytest.raises(ValueError, match=r"^reward_model\.sandbox_fusion\.url: ") as error:
            check_sources(["apps"], options(url))
        assert not isinstance(error.value, UnicodeError)


def test_in_the_pool_each_row_has_its_outcome(server):
    rows = [RewardRequest("apps", SUM, TESTS), RewardRequest("taco", SUM, {"inputs": "?"})]
    with RewardPool(num_workers=1, timeout=5, programs=options(server.url)) as pool:
        good, bad = pool.score(rows)
        server.answers = 500
        (failed,) = pool.score(rows[:1])
    assert good == Score(0.75, {"acc": False, "timed_out": False})
    assert isinstance(bad, RewardError)
    assert "no known layout" in bad.message
    assert isinstance(failed, RewardError)
    assert "HTTP 500" in failed.message


def test_a_server_that_is_not_there_is_refused_at_the_start(server):
    check_sources(["apps"], options(server.url))
    with socket.socket() as not_listening:
        not_listening.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{not_listening.getsockname()[1]}/run_code"
        with pytest.raises(ValueError, match=rf"sandbox_fusion.url: nothing answers at {dead}"):
            check_sources(["apps"], options(dead))
    with pytest.raises(ValueError, match="is no address"):
        check_sources(["apps"], options("localhost:8080"))
    check_sources(["openai/gsm8k"], options(dead))
