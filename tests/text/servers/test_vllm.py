"""vLLM's servers: what only they have, against a server that speaks their language and against vLLM where it is."""

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.text.servers import vllm_stand_in
from tests.text.servers.bench import (
    ADAPTED,
    KEY,
    LONG,
    POLICY,
    PROMPTS,
    REAL,
    SAMPLING,
    VLLM,
    Bench,
    bench_of,
    complaint,
    kill,
    needs_vllm,
    processes_of,
    rows_of,
    wait_for,
)
from tests.text.servers.stand_in import Refused, environment
from tether.batch import WeightUpdate
from tether.text.sampling.protocol import NoiseKey
from tether.text.servers import Connections, InferenceServer, Launch, ServerGone, broadcast, server, shared_file
from tether.text.servers.inside import tether_buffers
from tether.text.servers.vllm_api import Adapters, Vllm, launch_of


@pytest.fixture(scope="module", params=VLLM)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = bench_of(request.param, tmp_path_factory.mktemp("vllm"))
    yield bench
    bench.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches."""
    benches: list[Bench] = []

    def make(faults: str = "", python: Path | None = None, **options: Any) -> Bench:
        benches.append(Bench(tmp_path, "vllm", python, faults, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def test_the_probe_lets_parity_pass(bench: Bench) -> None:
    bench.learn()
    probe = bench.probe()
    probe.load_weights(bench.export())
    assert len(probe.generate(LONG, SAMPLING, KEY)) == 2


@pytest.fixture(scope="module", params=ADAPTED)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = bench_of(request.param, tmp_path_factory.mktemp("adapted"))
    yield bench
    bench.close()


def bytes_of(bench: Bench, *, adapters: bool) -> float:
    """In float32; the head is tied."""
    state = bench.model.state_dict()
    return 4.0 * sum(v.numel() for k, v in state.items() if ("lora_" in k) == adapters and k != "lm_head.weight")


def test_the_layers_travel_once_and_then_adapters_alone(adapted: Bench) -> None:
    adapted.learn()  # as adapters start as no change
    probe, layers, adapters = adapted.probe(), bytes_of(adapted, adapters=False), bytes_of(adapted, adapters=True)
    probe.generate(LONG, SAMPLING, NoiseKey(5, 0))
    probe.transfer_metrics()
    adapted.engine.recovery_actions()["older weights"]()
    assert probe.transfer_metrics()["transfer/weights_bytes"] == layers + adapters
    drawn = [probe.generate(LONG, SAMPLING, NoiseKey(5, 0))]
    for step in (1, 2):
        adapted.learn()
        probe.load_weights(adapted.export())
        assert probe.transfer_metrics()["transfer/weights_bytes"] == adapters
        drawn.append(probe.generate(LONG, SAMPLING, NoiseKey(5, step)))
    assert len({str(rows_of(rollout)) for rollout in drawn}) == 3
    assert adapters < layers / 2


def test_a_server_that_lost_its_weights_gets_the_layers_and_then_the_adapters(adapted: Bench) -> None:
    adapted.learn()
    probe = adapted.probe()
    probe.load_weights(adapted.export())
    expected = rows_of(probe.generate(PROMPTS, SAMPLING, KEY))
    probe.transfer_metrics()
    if adapted.there is None:
        kill(adapted.server)
    else:  # the same as another run leaves behind
        adapted.server.http.post("/update_weight_version", {"new_version": "default"})
    assert rows_of(probe.generate(PROMPTS, SAMPLING, KEY)) == expected
    everything = bytes_of(adapted, adapters=False) + bytes_of(adapted, adapters=True)
    assert probe.transfer_metrics()["transfer/weights_bytes"] == everything


@pytest.mark.parametrize(
    "real", [pytest.param(False, id="stand-in"), pytest.param(True, id="vllm", marks=[needs_vllm, pytest.mark.slow])]
)
def test_layers_that_a_server_read_from_files_do_not_travel(
    made: Callable[..., Bench], tmp_path: Path, *, real: bool
) -> None:
    """Also after it was started again; but where something in it is stale, they do."""
    python = REAL if real else environment(tmp_path / "environment") / "bin/python"
    bench = made(python=python, adapters=Adapters(4, 16), load_format="safetensors")
    bench.learn()
    probe, layers, adapters = bench.probe(), bytes_of(bench, adapters=False), bytes_of(bench, adapters=True)
    expected = rows_of(probe.generate(PROMPTS, SAMPLING, KEY))
    assert probe.transfer_metrics()["transfer/weights_bytes"] == adapters
    kill(bench.server)
    assert rows_of(probe.generate(PROMPTS, SAMPLING, KEY)) == expected
    assert probe.transfer_metrics()["transfer/weights_bytes"] == adapters
    bench.engine.recovery_actions()["older weights"]()
    assert probe.transfer_metrics()["transfer/weights_bytes"] == layers + adapters


@pytest.mark.parametrize("rank", [0, 2])
def test_a_server_that_takes_no_such_adapters_is_named(made: Callable[..., Bench], rank: int) -> None:
    bench = made(adapters=Adapters(4, 16))
    bench.there.RequestHandlerClass.speaks.model.rank = rank
    what = (
        rf"supports adapters of rank {rank} at most; .*lora_rank is 4. Start it with .*, or set .*model.lora.merge=True"
    )
    with pytest.raises(ValueError, match=what):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)


def test_adapters_of_a_server_on_another_machine_are_refused_before_it_gets_weights(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = made(adapters=Adapters(4, 16))
    monkeypatch.setattr("tether.text.servers.vllm_api.is_local", lambda http: False)
    with pytest.raises(ValueError, match=r"another machine, and adapters are sent in files.*=distributed, which sends"):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)
    assert bench.server.bytes_sent == 0


def takes(bench: Bench, way: str, bucket: int, step: int) -> bool:
    """Whether new weights arrive, in parts of as many bytes."""
    bench.server.api = replace(bench.api, transfer=way)
    bench.engine._traffic = replace(bench.engine._traffic, bucket=bucket)
    bench.learn()
    bench.engine.load_weights(bench.export())
    rollout = bench.engine.generate([*PROMPTS, *LONG], SAMPLING, NoiseKey(5, step))
    apart = (rollout.rollout_log_probs - bench.log_probs(rollout))[rollout.response_mask].abs().max()
    return bool(apart < 1e-4)


@pytest.mark.parametrize(
    "python", [None, pytest.param(REAL, marks=[needs_vllm, pytest.mark.slow])], ids=["stand-in", "vllm"]
)
def test_weights_arrive_by_every_way(made: Callable[..., Bench], python: Path | None, tmp_path: Path) -> None:
    """Parts of 4 KiB cut every layer, whose first weights have to wait for the others."""
    there = set(Path("/dev/shm").iterdir())
    bench = made(python=python or environment(tmp_path) / "bin/python")
    ways = [
        ("tensor", 1 << 12),
        ("distributed", 1 << 12),
        ("auto", 1 << 30),
        ("disk", 1 << 16),
        ("distributed", 1 << 30),
    ]
    for step, (way, bucket) in enumerate(ways):
        assert takes(bench, way, bucket, step), (way, bucket)
    buffer = bench.server._staging._bytes
    assert takes(bench, "tensor", 1 << 12, 9)
    assert bench.server._staging._bytes is buffer
    bench.close()
    assert bench.server._staging._bytes is None
    assert {path for path in set(Path("/dev/shm").iterdir()) - there if "tether" in path.name} == set()


def test_a_server_whose_engine_died_in_an_update_is_not_waited_for(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves the requests about weights open that it has then, as it was seen to."""
    bench, over = made(), threading.Event()
    bench.server.wait_ready()

    def get(self: vllm_stand_in.VllmLanguage, path: str) -> object:
        raise Refused(503, "")

    def dies(self: vllm_stand_in.VllmModel, told: object) -> None:
        monkeypatch.setattr(vllm_stand_in.VllmLanguage, "get", get)
        over.wait(60)

    monkeypatch.setattr(server, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(vllm_stand_in.VllmModel, "read", dies)
    begun = time.monotonic()
    with pytest.raises(ServerGone, match="/update_weights: "):
        bench.server.load_weights("run-1", bench.model.state_dict().items(), torch.float32, 1 << 16)
    assert time.monotonic() - begun < 30
    over.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "sent"),
    [
        pytest.param(None, signal.SIGSTOP, id="stand-in"),
        pytest.param(REAL, signal.SIGKILL, marks=needs_vllm, id="vllm"),
    ],
)
def test_a_worker_that_fails_in_the_middle_of_broadcasts_is_replaced(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: Path | None, sent: int
) -> None:
    """The last process of the server; one that is stopped is noticed by `server_timeout`, one that is dead at once."""
    bench = made(python=python or environment(tmp_path) / "bin/python")
    assert takes(bench, "distributed", 1 << 30, 0)
    post, asked = Connections.post, list[float]()
    if sent == signal.SIGSTOP:
        bench.server.timeout = 3
    files = len(list(Path("/proc/self/fd").iterdir()))

    def hit(self: Connections, path: str, *more: Any, **named: Any) -> Any:
        if path == "/update_weights":
            asked.append(time.monotonic())
            if len(asked) == 3:
                processes_of(bench.server)[-1].send_signal(sent)
        return post(self, path, *more, **named)

    def restart() -> None:
        asked.append(time.monotonic())
        bench.server.timeout = 900
        InferenceServer.restart(bench.server)

    monkeypatch.setattr(Connections, "post", hit)
    monkeypatch.setattr(bench.server, "restart", restart)
    gc.disable()  # nothing may depend on when the garbage of an error is collected
    try:
        assert takes(bench, "distributed", 1 << 12, 1)
        assert bench.engine.transfer_metrics()["transfer/server_failures"] == 1
        assert asked[3] - asked[2] < 60
        wait_for(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "python", [None, pytest.param(REAL, marks=[needs_vllm, pytest.mark.slow])], ids=["stand-in", "vllm"]
)
def test_a_connection_that_breaks_in_a_broadcast_is_made_again(
    made: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    python: Path | None,
) -> None:
    """The server is well, and goes on with what it has."""
    bench = made(python=python or environment(tmp_path) / "bin/python")
    assert takes(bench, "distributed", 1 << 30, 0)
    server, sends = processes_of(bench.server)[0], list[int]()

    def cut(group: Any, tensors: Any) -> None:
        sends.append(len(sends))
        if len(sends) == 3:
            # All are duplicated before the first is cut: then others are closed, and a request may get their numbers.
            cut_off = [
                socket.socket(fileno=os.dup(one.fd))
                for one in psutil.Process().net_connections("tcp")
                if one.status == "ESTABLISHED" and bench.server.http.port not in (one.laddr.port, one.raddr.port)
            ]
            for one in cut_off:
                with suppress(OSError), one:
                    one.shutdown(socket.SHUT_RDWR)
        tether_buffers.broadcast(group, tensors)

    monkeypatch.setattr(broadcast, "broadcast", cut)
    assert takes(bench, "distributed", 1 << 12, 1)
    assert bench.engine.transfer_metrics()["transfer/server_failures"] == 1
    assert processes_of(bench.server)[0] == server  # not restarted
    assert "the connection between this process (127.0.0.1) and the server's workers broke: " in caplog.text
    assert "Its weights are loaded again" in caplog.text


NOT_KEEPING = """
import tether_in_vllm
from tether_in_vllm import Extension
copy_pending = tether_in_vllm.TetherTransferEngine.copy_pending_weights

class Careless(Extension):
    def keep(self, on):
        tether_in_vllm.TetherTransferEngine.copy_pending_weights = copy_pending if on else lambda self: None
"""


def with_module(bench: Bench, folder: Path, name: str, text: str) -> None:
    """Have a real server find a module of the test's own."""
    (folder / f"{name}.py").write_text(text)
    launch = bench.server.launch_or_url
    assert isinstance(launch, Launch)
    path = f"{launch.environment['PYTHONPATH']}:{folder}"
    bench.server.launch_or_url = replace(launch, environment={**launch.environment, "PYTHONPATH": path})


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor", "distributed"])
def test_what_waits_in_vllm_would_be_written_over(made: Callable[..., Bench], tmp_path: Path, way: str) -> None:
    bench = made(python=REAL, worker_extension_cls="not_keeping.Careless")
    with_module(bench, tmp_path, "not_keeping", NOT_KEEPING)
    bench.server.wait_ready()
    for step, keeps in enumerate([True, False, True]):
        bench.server.http.post("/collective_rpc", {"method": "keep", "args": [keeps]})
        assert takes(bench, way, 1 << 12, step) == keeps


class Forgetless(InferenceServer):
    def reset_prefix_cache(self) -> None:
        """Nothing: the prefix cache stays."""


def test_a_stale_prefix_cache_is_found(bench: Bench) -> None:
    bench.server.wait_ready()
    server = Forgetless(bench.api, bench.server.url, bench.server.timeout)
    engine = bench.engine_of(server)
    probe = bench.probe(engine)
    engine.load_weights(bench.export())
    server.http.post("/reset_prefix_cache")
    probe.generate(LONG, SAMPLING, KEY)
    bench.learn()
    engine.load_weights(bench.export())
    assert "a prefix cache of older weights: yes, this is it" in complaint(probe)


NO_PACKING = """
import tether_in_vllm
from tether_in_vllm import Extension
pack = tether_in_vllm.pack_tied_head
tether_in_vllm.pack_tied_head = lambda model: None

class Forgetful(Extension):
    def pack_head(self):
        pack(self.model_runner.model)
"""


def test_a_head_that_keeps_its_first_weights_is_found(made: Callable[..., Bench]) -> None:
    found = complaint(made("stale_head").probe())
    assert "an output head that keeps its first weights: yes, this is it" in found


@needs_vllm
@pytest.mark.slow
def test_the_head_of_vllm_keeps_its_first_weights_unless_packed(made: Callable[..., Bench], tmp_path: Path) -> None:
    bench = made(python=REAL, worker_extension_cls="no_packing.Forgetful")
    with_module(bench, tmp_path, "no_packing", NO_PACKING)
    found = complaint(bench.probe())
    assert "an output head that keeps its first weights: yes, this is it" in found


@needs_vllm
@pytest.mark.slow
def test_prompts_that_are_computed_in_parts_change_nothing(made: Callable[..., Bench]) -> None:
    """A part of a prompt ends the engine of a CPU where it draws with a request's seed."""
    rows = []
    for most in (4096, 64):
        bench = made(python=REAL, max_num_batched_tokens=most, enable_chunked_prefill=True, max_num_seqs=8)
        rollout = bench.engine.generate([*LONG, *PROMPTS], SAMPLING, KEY)
        rows.append(rows_of(rollout))
        bench.close()
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("another_name", r"serves my-model, not policy \(--served-model-name\). Start one by: tether serve vllm"),
        (
            "another_model",
            r"runs .*config, of model_type llama; actor_rollout_ref.model.path has model_type qwen2. Start",
        ),
        ("another_width", r"of intermediate_size 96; actor_rollout_ref.model.path has intermediate_size 48. Start"),
        ("another_vocabulary", r"of vocabulary 261; actor_rollout_ref.model.path has vocabulary 260. .*--model PATH"),
        (
            "no_extension",
            r"no attribute 'about'. This is not a vLLM server that tether can use. Start one by: tether serve vllm",
        ),
    ],
)
def test_a_server_that_serves_something_else_is_named(made: Callable[..., Bench], faults: str, message: str) -> None:
    """Before it gets weights."""
    bench = made(faults)
    with pytest.raises(ValueError, match=message):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)
    assert bench.server.weights is None


@pytest.mark.parametrize("python", [None, pytest.param(REAL, marks=[needs_vllm, pytest.mark.slow], id="vllm")])
def test_a_policy_of_other_sizes_is_refused(made: Callable[..., Bench], python: Path | None) -> None:
    bench = made(python=python, api=Vllm(replace(POLICY, sizes={"intermediate_size": 96})))
    with pytest.raises(ValueError, match=r"intermediate_size 48; .*model.path has intermediate_size 96"):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)


def test_a_server_that_sleeps_is_woken(made: Callable[..., Bench]) -> None:
    """A run that was killed left it so."""
    bench = made()
    bench.server.http.post("/sleep?level=1")
    assert len(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == 6


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    "python", [None, pytest.param(REAL, marks=[needs_vllm, pytest.mark.slow])], ids=["stand-in", "vllm"]
)
def test_an_update_that_was_not_finished_is_given_up(
    made: Callable[..., Bench], python: Path | None, refused: bool
) -> None:
    """As a run that was killed within one leaves it, or one whose weights did not fit."""
    bench = made(python=python)
    first = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    bench.server.http.post("/start_weight_update")
    weights = {name: value + 1 for name, value in list(bench.model.state_dict().items())[1:9]}
    if refused:
        weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(7, 5)
    with shared_file(weights) as path, pytest.raises(ServerGone) if refused and python else nullcontext():
        bench.server.http.post("/update_weights", {"update_info": {"path": path}})
    bench.engine.load_weights(bench.export())
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == first
    bench.learn()
    bench.engine.load_weights(bench.export())
    rollout = bench.engine.generate(PROMPTS, SAMPLING, KEY)
    assert torch.allclose(rollout.rollout_log_probs, bench.log_probs(rollout), atol=1e-4)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (lambda names: names[1:], "sent no weights for 1 parameters"),
        (lambda names: [*names, "model.layers.7.mlp.up_proj.weight"], "no module or parameter named 'model.layers.7"),
    ],
    ids=["too few", "too many"],
)
def test_names_must_be_those_of_the_model(made: Callable[..., Bench], names: Any, message: str) -> None:
    bench = made()
    bench.engine.generate(PROMPTS[:1], SAMPLING, KEY)
    have = bench.model.state_dict()
    sent = [(name, have.get(name, torch.zeros(1))) for name in names(list(have))]
    with pytest.raises(ValueError, match=f"{message}.*must run the model of actor_rollout_ref.model.path"):
        bench.engine.load_weights(WeightUpdate(1, sent))


def test_a_server_finds_what_runs_inside_of_it(tmp_path: Path) -> None:
    """Without vLLM nothing else notices that the folder is not where the launch says."""
    launch = launch_of(Path("python"), tmp_path / "log", {}, {})
    folder, extension = Path(launch.environment["PYTHONPATH"]), str(launch.options["worker_extension_cls"])
    assert (folder / f"{extension.partition('.')[0]}.py").is_file()
    assert (folder / "tether_buffers.py").is_file()
