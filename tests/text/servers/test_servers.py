"""Servers of both kinds: the parity probe, deaths, bad input; against stand-ins that speak their languages."""

import copy
import itertools
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.processes import command_of, runs
from tests.text.servers.bench import (
    KEY,
    LONG,
    PROMPTS,
    SAMPLING,
    SERVER_APIS,
    TOLERANCE,
    Bench,
    complaint,
    kill,
    processes_of,
    rows_of,
    tiny_policy,
    wait_for,
)
from tests.text.servers.forked import fork_behind
from tests.text.servers.stand_in import environment
from tether.batch import RolloutBatch
from tether.text.sampling.parity import ParityProbe
from tether.text.sampling.protocol import NoiseKey
from tether.text.servers import GenerateRequest, InferenceServer, SampledRow, engine, server


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def made(kind: str, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches."""
    benches: list[Bench] = []

    def make(faults: str = "", **options: Any) -> Bench:
        benches.append(Bench(tmp_path, kind, faults=faults, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def started(made: Callable[..., Bench], kind: str, tmp_path: Path) -> Callable[..., Bench]:
    """Makes benches whose server is a process that tether starts."""
    return lambda faults="", **options: made(python=environment(tmp_path, faults, kind) / "bin/python", **options)


# --- the parity probe, and what it is there for -------------------------------------------------------------------


def test_a_lost_update_is_found(made: Callable[..., Bench]) -> None:
    bench = made("lost_update")
    probe = bench.probe()
    probe.generate(LONG, SAMPLING, KEY)
    bench.learn()
    probe.load_weights(bench.export())
    found = complaint(probe)
    assert "a prefix cache of older weights: no" in found
    assert "older weights: yes, this is it" in found


def test_other_sampling_parameters_are_what_is_left(made: Callable[..., Bench]) -> None:
    found = complaint(made("deaf_to_temperature").probe())
    assert "yes, this is it" not in found
    assert "other sampling parameters" in found.splitlines()[-1]


def test_the_probe_looks_first_and_every_so_often(made: Callable[..., Bench]) -> None:
    looked: list[int] = []

    def count(rollout: RolloutBatch) -> torch.Tensor:
        looked.append(len(rollout))
        return rollout.rollout_log_probs

    probe = ParityProbe(made().engine, count, every=3, tolerance=TOLERANCE, sampling=SAMPLING)
    for step in range(1, 8):
        probe.generate(PROMPTS, SAMPLING, NoiseKey(5, step))
        probe.generate(PROMPTS, replace(SAMPLING, temperature=0.0), NoiseKey(5, step))
    assert looked == [4, 4, 4]  # at 1, 3 and 6; no more than four rows


def test_the_probe_looks_at_more_rows_before_it_believes_in_a_fault(made: Callable[..., Bench]) -> None:
    """A difference of d in every token of a row is d^2 / 2 there: 8 tolerances, 2 over four rows, 0.4 over twenty."""
    looked: list[int] = []
    prompts = [[4 + i] for i in range(20)]

    def off(rows: int) -> ParityProbe:
        def log_probs(rollout: RolloutBatch) -> torch.Tensor:
            looked.append(len(rollout))
            found = rollout.rollout_log_probs.clone()
            found[:rows] += 4 * TOLERANCE**0.5
            return found

        return ParityProbe(bench.engine, log_probs, every=1, tolerance=TOLERANCE, sampling=replace(SAMPLING, n=1))

    bench = made()
    off(1).verify(prompts, KEY)
    assert looked == [4, 20]
    off(1).generate(prompts, replace(SAMPLING, n=1), KEY)
    with pytest.raises(ValueError, match="sampler and trainer disagree"):
        off(20).verify(prompts, KEY)


# --- servers die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "when"),
    [
        pytest.param(signal.SIGKILL, "while", id="killed-while"),
        pytest.param(signal.SIGKILL, "between", id="killed-between"),
        pytest.param(signal.SIGSTOP, "while", id="hangs-while"),
        pytest.param(signal.SIGSTOP, "between", id="hangs-between", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_is_replaced(
    started: Callable[..., Bench], number: int, when: str, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are sampled again, with the same seeds; each is handed on once. A silence is told while it lasts."""
    monkeypatch.setenv("STAND_IN_SECONDS", "1" if number == signal.SIGSTOP else "0.2")
    monkeypatch.setattr("tether.text.servers.engine.LOG_EVERY_SECONDS", 1.0)
    bench = started()
    bench.server.token_timeout = 5.0
    expected = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    rows: list[int] = []
    victim = processes_of(bench.server)[0]

    def finished(response: Any) -> None:
        rows.append(response.row)
        if len(rows) == 2 and when == "while" and number == signal.SIGKILL:
            send()

    def send() -> None:
        if number == signal.SIGSTOP:
            fork_behind(victim.pid).send_signal(number)
        victim.send_signal(number)

    if when == "between":
        send()
    elif number == signal.SIGSTOP:  # early: where all rows are sampled, nothing waits for the server any more
        threading.Timer(0.3, send).start()
    again = bench.engine.generate(PROMPTS, SAMPLING, KEY, finished)
    assert rows_of(again) == expected
    assert sorted(rows) == list(range(6))
    assert not runs(victim)
    assert ("has sampled no token for" in caplog.text) == (number == signal.SIGSTOP and when == "while")


@pytest.mark.slow
def test_kills_at_any_moment_change_nothing(started: Callable[..., Bench], monkeypatch) -> None:
    """Five steps with an update each, and a kill after 0.0, 0.7, ... 2.8 seconds of the step."""
    monkeypatch.setenv("STAND_IN_SECONDS", "0.3")
    bench, found = started(), []

    def kill_after(seconds: float) -> None:
        time.sleep(seconds)
        for victim in processes_of(bench.server)[:1]:
            with suppress(psutil.NoSuchProcess):
                victim.kill()

    for kills in (False, True):
        bench.model.load_state_dict(tiny_policy().state_dict())
        bench.version = 0
        for step in range(5):
            killer = threading.Thread(target=kill_after, args=(0.7 * step,)) if kills else threading.Thread()
            killer.start()
            bench.learn()
            bench.engine.load_weights(bench.export())
            found.append(rows_of(bench.engine.generate(PROMPTS, SAMPLING, NoiseKey(5, step))))
            killer.join()
    assert found[:5] == found[5:]
    assert len({str(rows) for rows in found}) == 5


def test_a_server_that_was_started_again_elsewhere_gets_the_weights(made: Callable[..., Bench]) -> None:
    bench = made()
    expected = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    model = bench.there.RequestHandlerClass.speaks.model
    model.load(tiny_policy(1).state_dict(), "default")
    model.version = "default"
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == expected
    assert model.version == bench.server.weights


def test_two_runs_do_not_share_a_server(made: Callable[..., Bench]) -> None:
    """Until the other one ends, however it does."""
    bench = made()
    other = os.fork()
    if not other:
        try:
            server_of_another_run = InferenceServer(bench.api, bench.server.url, 60)
            server_of_another_run.wait_ready()
            (bench.folder / "ready").touch()
            time.sleep(600)
        finally:
            os._exit(1)
    wait_for((bench.folder / "ready").exists)
    with pytest.raises(
        ValueError, match=rf"127.0.0.1:\d+: another run samples with this server: process {other}. Wait"
    ):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert len(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == 6
    bench.server.stop()
    InferenceServer(bench.api, bench.server.url, 60).wait_ready()


@pytest.mark.parametrize("kind", ["vllm"])
@pytest.mark.parametrize("holds", [True, False])
def test_a_server_that_died_gets_the_weights_that_it_had_while_the_policy_learns(
    started: Callable[..., Bench], *, holds: bool
) -> None:
    """Without holding them its rows would come from the weights of the moment, under the old version's number."""
    bench = started()
    engine = bench.engine_of(bench.server, restores_last_weights=holds)
    engine.load_weights(bench.export().copied())
    expected = rows_of(engine.generate(PROMPTS, SAMPLING, KEY))
    bench.learn()
    kill(bench.server)
    again = engine.generate(PROMPTS, SAMPLING, KEY)
    assert (rows_of(again) == expected) == holds
    if holds:
        assert set(again.policy_version.tolist()) == {0}


def test_one_that_always_dies_ends_the_run(started: Callable[..., Bench]) -> None:
    """Twice by the same error, and without a token: a third start, which takes minutes, would end like that, too."""
    what = r"failed 2 times .*, most recently: .*Its first error: RuntimeError: out of blocks. Its log: (\S+)"
    with pytest.raises(RuntimeError, match=what) as error:
        started("dies_at_once").engine.generate(PROMPTS, SAMPLING, KEY)
    (log,) = re.findall(what, str(error.value))
    assert Path(log).read_text().count("out of blocks") == 2


@pytest.mark.parametrize("kind", ["sglang"])
def test_one_that_dies_often_is_started_as_often(
    started: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """It draws at most 26 of 180 tokens: 20, and those of a row that begins then. So it dies six times, which is more
    than it may without a token.
    """
    bench = started("dies", rows_at_once=2)
    assert len(bench.engine.generate(PROMPTS * 5, replace(SAMPLING, ignore_eos=True), KEY)) == 30
    assert caplog.text.count("The server is restarted") >= 6 > engine.MAX_ATTEMPTS


@pytest.mark.parametrize("kind", ["vllm"])
def test_nothing_is_left_of_a_server_whose_owner_is_killed(started: Callable[..., Bench]) -> None:
    bench = started()
    copied = copy.copy(bench.server)  # one that the child starts
    owner = os.fork()
    if not owner:
        try:
            copied.wait_ready()
            time.sleep(600)
        finally:
            os._exit(1)
    child = psutil.Process(owner)
    servers = wait_for(lambda: [p for p in child.children(recursive=True) if "stand_in" in command_of(p)])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    wait_for(lambda: not any(map(runs, servers)))


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sglang"])
def test_one_that_dies_while_it_starts_shows_its_last_words(started: Callable[..., Bench]) -> None:
    bench = started(no_such_option="yes")
    with pytest.raises(
        ValueError, match=r"(?s)ended with exit code 2 while it started.*server.log ends with:.*no-such-opt"
    ):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (
            "old",
            r"runs vLLM 0.9.1; tether supports 0.32.x. tether setup vllm|SGLang 0.4.9; .* 0.5.23. tether setup sglang",
        ),
        (
            "no_routes",
            r"HTTP 404.*(supports no weight updates: it has no such route|not a vLLM server that tether can use)\. "
            r"Start one by: tether serve ",
        ),
        (
            "another_dtype",
            r"computes in bfloat16; .*rollout.dtype is float32. Start it with --dtype float32, or set .*dtype=bfloat16",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_named(made: Callable[..., Bench], faults: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(faults).engine.generate(PROMPTS, SAMPLING, KEY)


def test_a_server_that_would_cut_responses_is_named(made: Callable[..., Bench]) -> None:
    """vLLM cuts them without a word."""
    bench = made()
    bench.there.RequestHandlerClass.speaks.model.limit = 511
    what = r"supports 511 tokens of .*; this run needs 512 .*Start it with --(max-model-len|context-length) 512"
    with pytest.raises(ValueError, match=what):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)


def test_a_web_server_of_another_kind_is_not_waited_for(made: Callable[..., Bench], kind: str, tmp_path: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        engine = made().engine_of(InferenceServer(SERVER_APIS[kind], f"http://127.0.0.1:{other.server_port}", 60))
        with pytest.raises(
            ValueError, match=r"/health: HTTP 404: a page of HTML. This is not a (vLLM|SGLang) server that tether can"
        ):
            engine.generate(PROMPTS, SAMPLING, KEY)
        other.shutdown()


def test_a_host_without_an_address_is_not_waited_for(made: Callable[..., Bench], kind: str) -> None:
    engine = made().engine_of(InferenceServer(SERVER_APIS[kind], "http://nowhere.invalid:80", 60))
    with pytest.raises(ValueError, match=r"nowhere.invalid:80: .* \(nowhere.invalid\)"):
        engine.generate(PROMPTS, SAMPLING, KEY)


DIES = """#!/bin/sh
echo "WARNING 11-27 16:52:00 [a.py:1] ImportError: no matter"
echo "(Worker pid=1) ERROR 11-27 16:52:00 [b.py:2] ValueError: Available memory (19/23 GiB) is less than desired"
for i in $(seq 100); do echo "  File $i"; done
echo "RuntimeError: Engine core initialization failed. See root cause above."
exit 1
"""


def test_the_cause_of_a_death_is_found_in_a_long_log(made: Callable[..., Bench], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(DIES)
    python.chmod(0o755)
    with pytest.raises(ValueError, match=r"(?s)first error: ValueError: Available memory .*ends with:.*See root cause"):
        made(python=python).engine.generate(PROMPTS, SAMPLING, KEY)


def test_a_long_start_is_said(
    started: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "FIRST_LOG_SECONDS", 0.0)
    started().engine.generate(PROMPTS[:1], SAMPLING, KEY)
    assert re.search(r"(vLLM|SGLang) starts \(0 of at most 900 seconds\); it writes to .*server.log", caplog.text)


def test_the_other_kind_of_server_is_named(made: Callable[..., Bench], kind: str) -> None:
    other = next(name for name in SERVER_APIS if name != kind)
    with pytest.raises(
        ValueError, match=r"This is not a (vLLM|SGLang) server that tether can use. Start one by: tether serve"
    ):
        made(api=SERVER_APIS[other]).engine.generate(PROMPTS, SAMPLING, KEY)


def test_failures_of_its_own_end_the_run(made: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = made()
    bench.there.RequestHandlerClass.speaks.model.faults.add("fails")
    with pytest.raises(RuntimeError, match=r"failed 4 times.*HTTP 500: Internal Server Error"):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)
    assert "HTTP 500: Internal Server Error. It still responds, and its weights are loaded again" in caplog.text
    assert "The server is started" not in caplog.text  # it is somebody else's
    bench.there.shutdown()
    bench.there.server_close()
    assert bench.server.next_step() == "Restart it"


@pytest.mark.parametrize("kind", ["sglang"])
@pytest.mark.parametrize("always", [False, True])
def test_a_port_that_is_taken(started: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """Another one is tried, a few times."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1]] * (2 if always else 1)
        monkeypatch.setattr(server, "MAX_PORTS", 2)
        free = server._free_port
        monkeypatch.setattr(server, "_free_port", lambda: ports.pop() if ports else free())
        bench = started()
        bench.server.timeout, bench.server.token_timeout = 60, 2
        if not always:
            assert len(rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))) == len(PROMPTS) * SAMPLING.n
            return
        with pytest.raises(ValueError, match=r"(?s)exit code 1 while it started.*server.log ends with:.*in use"):
            bench.engine.generate(PROMPTS, SAMPLING, KEY)


def test_a_server_that_gives_no_memory_back_is_named(started: Callable[..., Bench]) -> None:
    with pytest.raises(
        ValueError, match=r"HTTP 404.*cannot release memory, which .*free_cache_engine=True requires. Set"
    ):
        started("no_sleep").engine.generate(PROMPTS, SAMPLING, KEY)


def test_half_answers_end_the_run(made: Callable[..., Bench]) -> None:
    with pytest.raises(RuntimeError, match=r"failed 4 times.*IncompleteRead"):
        made("half_answers").engine.generate(PROMPTS, SAMPLING, KEY)


DRAW = GenerateRequest([1], SAMPLING, max_tokens=3, seed=0, stop_token_ids=[7], return_kept_tokens=False)


def complaint_about(sampled: SampledRow) -> str:
    """Return why an answer is none, or an empty text."""
    try:
        sampled.check(DRAW, 260)
    except ValueError as error:
        return str(error)
    return ""


def test_an_answer_has_the_tokens_that_were_asked_for() -> None:
    answers: list[tuple[list[Any], str]] = [
        ([8, 9, 260], "the token 260, where the policy has 260"),
        ([8, 9, -1], "the token -1"),
        ([8, 9, 1.5], "the token 1.5"),
        ([8, 9, "7"], "the token '7'"),
        ([8, 9, True], "the token True"),
        ([8, 9, 10, 7], "4 tokens, where 3 were requested"),
        ([7, 8, 7], "tokens after one that ends the response"),
        ([8, 9], "2 tokens of 3, and none of them ends the response"),
    ]
    for tokens, message in answers:
        assert complaint_about(SampledRow(tokens, [-1.0] * len(tokens), None, frozenset())).startswith(message)
    for tokens in ([8, 7], [8, 9, 10]):
        assert complaint_about(SampledRow(tokens, [-1.0] * len(tokens), None, frozenset())) == ""


def test_an_answer_has_log_probs() -> None:
    for log_prob in (math.nan, -math.inf, math.inf, 5.0, None, "0", True):
        answer = SampledRow([8, 7], [-1.0, log_prob], None, frozenset())
        assert f"the log-prob {log_prob!r}" in complaint_about(answer)
    assert "1 log-probs of 2 tokens" in complaint_about(SampledRow([8, 7], [-1.0], None, frozenset()))
    assert "the token 300" in complaint_about(SampledRow([8, 7], [-1.0, -1.0], [[8], [7, 300]], frozenset()))
    assert complaint_about(SampledRow([8], [-1.0], None, frozenset(), is_complete=False)) == ""
    assert complaint_about(SampledRow([8, 7], [-1.0, 1e-6], [[8], [7]], frozenset())) == ""


def test_answers_that_are_none_end_the_run(made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = made()
    sample = type(bench.api).generate

    def lie(*arguments: Any) -> SampledRow:
        sampled = sample(*arguments)
        return replace(sampled, log_probs=[math.nan, *sampled.log_probs[1:]])

    monkeypatch.setattr(type(bench.api), "generate", lie)
    with pytest.raises(RuntimeError, match=r"failed 4 times.*:\d+: returned an invalid row: the log-prob nan"):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)


ABOUT = {
    "vllm": [("get", "/version"), ("get", "/v1/models"), ("post", "/collective_rpc")],
    "sglang": [("get", "/server_info"), ("get", "/model_info")],
}


ANSWERS = ["", "x", 7, None, [], {}, {"results": []}, {"data": [{}]}, {"version": ["0.32.0"]}]


def test_answers_about_itself_of_another_layout(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bench = made()
    language = type(bench.there.RequestHandlerClass.speaks)
    for (method, route), answer in itertools.product(ABOUT[kind], ANSWERS):
        known = getattr(language, method)

        def lie(*arguments: Any, known: Any = known, route: str = route, answer: object = answer) -> object:
            return answer if arguments[1] == route else known(*arguments)

        own = InferenceServer(bench.api, bench.server.url, 60)
        with monkeypatch.context() as patch:
            patch.setattr(language, method, lie)
            with pytest.raises(ValueError, match=f"^{bench.server.url}"):
                own.wait_ready()
        own.stop()


def test_no_server_at_an_address(made: Callable[..., Bench], kind: str) -> None:
    engine = made().engine_of(InferenceServer(SERVER_APIS[kind], "http://127.0.0.1:9", 0.5))
    with pytest.raises(ValueError, match=r"127.0.0.1:9: no (vLLM|SGLang) server answers within .*server_timeout=0.5"):
        engine.generate(PROMPTS, SAMPLING, KEY)


def test_the_tolerance_is_far_from_rounding_and_from_faults() -> None:
    """k3 of a difference d is d^2 / 2: 1e-5, as seen, is 5e-11; 0.01 is 5e-5."""
    assert math.expm1(1e-5) - 1e-5 < TOLERANCE < math.expm1(0.01) - 0.01
