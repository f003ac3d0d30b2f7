"""The `vllm` engine, against a server that speaks vLLM's language (`stand_in`), and against vLLM where it is."""

import copy
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.rollout.stand_in import environment, serve
from tether.batch import RolloutBatch, WeightUpdate
from tether.models.output import KeptSets
from tether.rollout import NoiseKey, SamplingParams
from tether.rollout.parity import ParityProbe
from tether.rollout.vllm import Launch, Server, VllmEngine, launch_of
from tether.rollout.vllm.engine import Traffic
from tether.runtime.program import environment_of

SAMPLING = SamplingParams(max_new_tokens=6, n=2, temperature=0.8)
KEY = NoiseKey(seed=5, step=1)
EOS = frozenset(range(4, 130, 3))
PROMPTS = [[4 + (17 * i + 5 * j) % 250 for j in range(length)] for i, length in enumerate((5, 1, 9))]
LONG = [[4 + (7 * j) % 250 for j in range(200)]]
"""A prompt that fills more than one block of vLLM's prefix cache."""
TOLERANCE = 1e-6


def tiny_policy(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Heads of 32, the smallest that vLLM takes on a CPU; a tied output head, as small models have."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = Qwen2Config(vocab_size=260, intermediate_size=48, max_position_embeddings=512, initializer_range=0.2,
                         tie_word_embeddings=True, **sizes, **changes)  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def vllm_python() -> Path | None:
    try:
        return environment_of("vllm", "TETHER_VLLM")
    except ValueError:
        return None


REAL = vllm_python()
needs_vllm = pytest.mark.skipif(REAL is None, reason="vLLM's environment is not there: scripts/vllm.sh makes it")
KINDS = ["stand-in", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])]


class Bench:
    """An engine with one server."""

    def __init__(self, folder: Path, python: Path | None = None, faults: str = "", **options: object) -> None:
        self.model, self.version = tiny_policy(), 0
        self.model.config.save_pretrained(folder / "config")
        self.model.generation_config.save_pretrained(folder / "config")
        self.there = None
        if python is None:  # in this process
            self.there = serve(str(folder / "config"), 0, set(filter(None, [faults])))
            threading.Thread(target=self.there.serve_forever, daemon=True).start()
            self.server = Server(f"http://127.0.0.1:{self.there.server_port}", 120)
        else:
            given = {"model": str(folder / "config"), "dtype": "float32", "load_format": "dummy",
                     "enforce_eager": True, "max_model_len": 512,
                     "gpu_memory_utilization": 0.05, **options}  # fmt: skip
            threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            self.server = Server(launch_of(python, folder / "server.log", given, threads), 300)
        self.engine = self.engine_of(self.server)

    def close(self) -> None:
        self.engine.close()
        if self.there is not None:
            self.there.shutdown()
            self.there.server_close()

    def engine_of(self, *servers: Server, holds_weights: bool = False) -> VllmEngine:
        left_out = frozenset(["lm_head.weight"])
        traffic = Traffic(torch.float32, 1 << 16, left_out, 8, sleeps=not holds_weights, holds_weights=holds_weights)
        return VllmEngine(servers, self.export, eos_token_ids=EOS, vocabulary=260, context=512, traffic=traffic)

    def export(self) -> WeightUpdate:
        return WeightUpdate(self.version, self.model.state_dict(keep_vars=True).items())

    def learn(self) -> None:
        """Other weights, as an update makes them."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for value in self.model.parameters():
                value += 0.05 * torch.randn(value.shape, generator=generator)

    @torch.no_grad()
    def log_probs(self, rollout: RolloutBatch, sampling: SamplingParams = SAMPLING) -> torch.Tensor:
        """Row by row, by transformers, over what the sampler kept."""
        found = torch.zeros_like(rollout.rollout_log_probs)
        for row in range(len(rollout)):
            prompt = rollout.prompt_ids[row, : rollout.prompt_length[row]]
            ids = rollout.response_ids[row, : rollout.response_length[row]]
            logits = self.model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / sampling.temperature
            if rollout.kept is not None:
                slots = row * rollout.response_ids.shape[1] + torch.arange(len(ids))
                logits = logits.masked_fill(KeptSets.read(rollout.kept, slots, 260).cut(slice(0, 260)), -torch.inf)
            found[row, : len(ids)] = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        return found

    def probe(self, engine: VllmEngine | None = None, every: int = 1) -> ParityProbe:
        return ParityProbe(engine or self.engine, self.log_probs, every=every, tolerance=TOLERANCE, sampling=SAMPLING)


@pytest.fixture(scope="module", params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("vllm")
    bench = Bench(folder) if request.param == "stand-in" else Bench(folder, REAL)
    yield bench
    bench.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches."""
    benches: list[Bench] = []

    def make(faults: str = "", python: Path | None = None, **options: object) -> Bench:
        benches.append(Bench(tmp_path, python, faults, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def started(made: Callable[..., Bench], tmp_path: Path) -> Callable[..., Bench]:
    """Makes benches whose server is a process that tether starts."""
    return lambda faults="", **options: made(python=environment(tmp_path, faults) / "bin/python", **options)


def rows_of(rollout: RolloutBatch) -> list[list[int]]:
    return [ids[:n].tolist() for ids, n in zip(rollout.response_ids, rollout.response_length.tolist(), strict=True)]


def test_log_probs_are_those_of_the_policy_after_every_update(bench: Bench) -> None:
    for step in (1, 2):
        bench.learn()
        bench.engine.load_weights(bench.export())
        rollout = bench.engine.generate([*PROMPTS, *LONG], SAMPLING, NoiseKey(5, step))
        expected = bench.log_probs(rollout)
        assert (rollout.rollout_log_probs - expected)[rollout.response_mask].abs().max() < 1e-4
        assert set(rollout.policy_version.tolist()) == {bench.version}


def test_rows_have_the_shape_that_the_protocol_promises(bench: Bench) -> None:
    finished: dict[int, list[int]] = {}
    told: list[int] = []
    rollout = bench.engine.generate(
        PROMPTS,
        SAMPLING,
        KEY,
        lambda one: finished.__setitem__(one.row, one.token_ids),
        lambda p: told.append(p.tokens),
    )
    assert rollout.uid.tolist() == [0, 0, 1, 1, 2, 2]
    assert [finished[row] for row in range(6)] == rows_of(rollout)
    assert told[-1] == sum(map(len, finished.values()))
    assert rollout.prompt_ids[2:4, :1].tolist() == [PROMPTS[1]] * 2
    for row, ids in enumerate(rows_of(rollout)):
        assert not EOS & set(ids[:-1])
        assert bool(rollout.truncated[row]) == (ids[-1] not in EOS)
        assert len(ids) == 6 or ids[-1] in EOS
    assert len({len(ids) for ids in rows_of(rollout)}) > 1


def test_a_sample_depends_on_its_key_alone(bench: Bench) -> None:
    together = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == together
    alone = bench.engine.generate(PROMPTS[2:], SAMPLING, replace(KEY, first_sample=4))
    assert rows_of(alone) == together[4:]
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, replace(KEY, step=2))) != together
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, replace(KEY, seed=6))) != together


def test_a_cut_of_the_vocabulary_is_recorded(bench: Bench) -> None:
    sampling = replace(SAMPLING, top_k=5, top_p=0.7)
    rollout = bench.engine.generate(PROMPTS, sampling, KEY)
    counts = rollout.kept.count[rollout.response_mask]
    assert 1 <= counts.min() <= counts.max() <= 5
    assert counts.float().mean() < 5
    difference = rollout.rollout_log_probs - bench.log_probs(rollout)
    assert difference[rollout.response_mask].abs().max() < 1e-4
    with pytest.raises(ValueError, match="Set top_k too"):
        bench.engine.generate(PROMPTS, replace(SAMPLING, top_p=0.7), KEY)


def test_greedy_is_the_argmax(bench: Bench) -> None:
    rollout = bench.engine.generate(PROMPTS, replace(SAMPLING, n=1, temperature=0.0), KEY)
    (ids,) = rows_of(rollout)[:1]
    with torch.no_grad():
        logits = bench.model(torch.tensor([PROMPTS[0] + ids])).logits[0, len(PROMPTS[0]) - 1 : -1]
    assert logits.argmax(-1).tolist() == ids


def test_lengths_are_limited_and_ends_ignored_on_demand(bench: Bench) -> None:
    rollout = bench.engine.generate(PROMPTS, replace(SAMPLING, max_length=12, ignore_eos=True), KEY)
    assert rollout.response_length.tolist() == [6, 6, 6, 6, 3, 3]
    with pytest.raises(ValueError, match=r"prompts\[2\]: 9 prompt tokens leave no room"):
        bench.engine.generate(PROMPTS, replace(SAMPLING, max_length=9), KEY)


# --- the parity probe, and what it is there for -------------------------------------------------------------------


def test_the_probe_lets_parity_pass(bench: Bench) -> None:
    bench.learn()
    probe = bench.probe()
    probe.load_weights(bench.export())
    assert len(probe.generate(LONG, SAMPLING, KEY)) == 2


class Forgetless(Server):
    def forget(self) -> None:
        """Nothing: the prefix cache stays."""


def complaint(probe: ParityProbe, step: int = 3) -> str:
    with pytest.raises(ValueError, match="sampler and trainer disagree") as error:
        probe.generate(LONG, SAMPLING, NoiseKey(5, step))
    return str(error.value)


def test_a_stale_prefix_cache_is_found(bench: Bench) -> None:
    server = Forgetless(bench.server.url, bench.server.timeout)
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
    (tmp_path / "no_packing.py").write_text(NO_PACKING)
    launch = bench.server.where
    assert isinstance(launch, Launch)
    path = f"{launch.environment['PYTHONPATH']}:{tmp_path}"
    bench.server.where = replace(launch, environment={**launch.environment, "PYTHONPATH": path})
    found = complaint(bench.probe())
    assert "an output head that keeps its first weights: yes, this is it" in found


def test_a_lost_update_is_found(made: Callable[..., Bench]) -> None:
    bench = made("lost_update")
    probe = bench.probe()
    probe.generate(LONG, SAMPLING, KEY)
    bench.learn()
    probe.load_weights(bench.export())
    found = complaint(probe)
    assert "an output head that keeps its first weights: no" in found
    assert "older weights: yes, this is it" in found


def test_other_sampling_parameters_are_what_is_left(made: Callable[..., Bench]) -> None:
    found = complaint(made("deaf_to_temperature").probe())
    assert "yes, this is it" not in found
    assert "other sampling parameters" in found.splitlines()[-1]


def test_the_probe_looks_first_and_every_so_often(bench: Bench) -> None:
    looked: list[int] = []

    def count(rollout: RolloutBatch) -> torch.Tensor:
        looked.append(len(rollout))
        return rollout.rollout_log_probs

    engine = bench.engine
    probe = ParityProbe(engine, count, every=3, tolerance=TOLERANCE, sampling=SAMPLING)
    for step in range(1, 8):
        probe.generate(PROMPTS, SAMPLING, NoiseKey(5, step))
        probe.generate(PROMPTS, replace(SAMPLING, temperature=0.0), NoiseKey(5, step))
    assert looked == [4, 4, 4]  # at 1, 3 and 6; no more than four rows


# --- servers die --------------------------------------------------------------------------------------------------


def processes_of(server: Server) -> list[psutil.Process]:
    """The server and all below it, but not the guard above it."""
    below = psutil.Process().children(recursive=True)
    port = f"--port={server.url.rpartition(':')[2]}"
    first = [one for one in below if port in " ".join(one.cmdline())][:1]
    return [process for one in first for process in (one, *one.children(recursive=True))]


@pytest.mark.parametrize(
    ("number", "when"),
    [
        pytest.param(signal.SIGKILL, "while", id="killed-while"),
        pytest.param(signal.SIGKILL, "between", id="killed-between", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "while", id="hangs-while", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "between", id="hangs-between", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_is_replaced(started: Callable[..., Bench], number: int, when: str, monkeypatch) -> None:
    """Its rows are sampled again, with the same seeds; each is handed on once."""
    monkeypatch.setenv("STAND_IN_SECONDS", "0.2")
    bench = started()
    bench.server.patience = 5.0
    expected = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    rows: list[int] = []
    victim = processes_of(bench.server)[0]

    def finished(response: Any) -> None:
        rows.append(response.row)
        if len(rows) == 2 and when == "while":
            victim.send_signal(number)

    if when == "between":
        victim.send_signal(number)
    again = bench.engine.generate(PROMPTS, SAMPLING, KEY, finished)
    assert rows_of(again) == expected
    assert sorted(rows) == list(range(6))
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE


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
    engine = bench.engine_of(Server(bench.server.url, 60))
    assert rows_of(engine.generate(PROMPTS, SAMPLING, KEY)) == expected  # which gave it weights of another name
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == expected


@pytest.mark.parametrize("holds", [True, False])
def test_a_server_that_died_gets_the_weights_that_it_had_while_the_policy_learns(
    started: Callable[..., Bench], *, holds: bool
) -> None:
    """Without holding them its rows would come from the weights of the moment, under the old version's number."""
    bench = started()
    engine = bench.engine_of(bench.server, holds_weights=holds)
    engine.load_weights(bench.export().copied())
    expected = rows_of(engine.generate(PROMPTS, SAMPLING, KEY))
    bench.learn()
    processes_of(bench.server)[0].kill()
    again = engine.generate(PROMPTS, SAMPLING, KEY)
    assert (rows_of(again) == expected) == holds
    if holds:
        assert set(again.policy_version.tolist()) == {0}


def test_a_server_that_sleeps_is_woken(made: Callable[..., Bench]) -> None:
    """A run that was killed left it so."""
    bench = made()
    bench.server.http.post("/sleep?level=1")
    assert len(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == 6


@pytest.mark.slow
def test_one_that_always_dies_ends_the_run(started: Callable[..., Bench]) -> None:
    with pytest.raises(RuntimeError, match="failed 4 times on the same rows"):
        started("dies").engine.generate(PROMPTS * 4, SAMPLING, KEY)


def test_nothing_is_left_of_a_server_whose_owner_is_killed(started: Callable[..., Bench]) -> None:
    bench = started()
    copied = copy.copy(bench.server)  # one that the child starts
    owner = os.fork()
    if not owner:
        try:
            copied.ready()
            time.sleep(600)
        finally:
            os._exit(1)
    child = psutil.Process(owner)
    servers = wait_for(lambda: [p for p in child.children(recursive=True) if "stand_in" in " ".join(p.cmdline())])
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in servers))


def wait_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + 60
    while not (found := what()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


# --- bad input ----------------------------------------------------------------------------------------------------


def test_one_that_dies_while_it_starts_shows_its_last_words(started: Callable[..., Bench]) -> None:
    bench = started(no_such_option="yes")
    with pytest.raises(
        ValueError, match=r"(?s)ended with exit code 2 while it started.*server.log ends with:.*no-such-opt"
    ):
        bench.engine.generate(PROMPTS, SAMPLING, KEY)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("old", r"runs vLLM 0.9.1; tether knows 0.32.x. scripts/vllm.sh installs one"),
        ("no_routes", r"/start_weight_update: HTTP 404.*takes no weights: it has no such route"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(made: Callable[..., Bench], faults: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(faults).engine.generate(PROMPTS, SAMPLING, KEY)


def test_half_answers_end_the_run(made: Callable[..., Bench]) -> None:
    with pytest.raises(RuntimeError, match=r"failed 4 times.*IncompleteRead"):
        made("half_answers").engine.generate(PROMPTS, SAMPLING, KEY)


def test_no_server_at_an_address(made: Callable[..., Bench]) -> None:
    engine = made().engine_of(Server("http://127.0.0.1:9", 0.5))
    with pytest.raises(ValueError, match=r"127.0.0.1:9: no vLLM server answers within .*server_timeout=0.5"):
        engine.generate(PROMPTS, SAMPLING, KEY)


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


def test_the_tolerance_is_far_from_rounding_and_from_faults() -> None:
    """k3 of a difference d is d^2 / 2: 1e-5, as seen, is 5e-11; 0.01 is 5e-5."""
    assert math.expm1(1e-5) - 1e-5 < TOLERANCE < math.expm1(0.01) - 0.01
