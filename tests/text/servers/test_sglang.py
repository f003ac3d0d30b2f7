"""SGLang's servers: what only they have, against a server that speaks their language."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.text.servers.bench import KEY, LONG, PROMPTS, SAMPLING, Bench, complaint, rows_of
from tests.text.servers.stand_in import environment
from tests.text.servers.test_vllm import Forgetless
from tether.batch import WeightUpdate
from tether.integrations.sglang import SGLang
from tether.text.sampling.protocol import NoiseKey
from tether.text.servers import Connections, InferenceServer, ServedPolicy


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches."""
    benches: list[Bench] = []

    def make(faults: str = "", python: Path | None = None, **options: Any) -> Bench:
        benches.append(Bench(tmp_path, "sglang", python, faults, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


def test_weights_arrive_by_every_way(made: Callable[..., Bench], tmp_path: Path) -> None:
    """Over a server in a process of its own, in parts of 64 KiB, of which there are several."""
    bench = made(python=environment(tmp_path, kind="sglang") / "bin/python")
    for step, way in enumerate(("disk", "tensor", "distributed", "tensor", "disk", "distributed")):
        bench.server.api = SGLang(ServedPolicy("qwen2", 260), way)
        bench.learn()
        bench.engine.load_weights(bench.export())
        rollout = bench.engine.generate([*PROMPTS, *LONG], SAMPLING, NoiseKey(5, step))
        assert (rollout.rollout_log_probs - bench.log_probs(rollout))[rollout.response_mask].abs().max() < 1e-4, way


@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_weights_of_another_shape_are_refused(made: Callable[..., Bench], way: str, tmp_path: Path) -> None:
    """As those of a policy with another vocabulary; the server goes on afterwards."""
    bench = made(
        python=environment(tmp_path, kind="sglang") / "bin/python", api=SGLang(ServedPolicy("qwen2", 260), way)
    )
    expected = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    wrong = [("model.norm.weight", torch.zeros(64)), ("model.embed_tokens.weight", torch.zeros(100, 64))]
    what = r"(?s)size of tensor \[100, 64\] must match \[260, 64\].*refuses them. It must run the model"
    with pytest.raises(ValueError, match=what):
        bench.engine.load_weights(WeightUpdate(1, wrong))
    bench.engine.load_weights(bench.export())
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == expected


def test_another_model_is_named_before_it_gets_weights(made: Callable[..., Bench]) -> None:
    with pytest.raises(ValueError, match=r"runs .*config, a llama; actor_rollout_ref.model.path is a qwen2"):
        made("another_model").engine.generate(PROMPTS, SAMPLING, KEY)


def test_a_weight_that_was_not_sent_is_found_by_the_probe(made: Callable[..., Bench]) -> None:
    """SGLang says nothing about it."""
    bench = made()
    bench.engine.load_weights(WeightUpdate(0, list(bench.model.state_dict().items())[1:]))
    assert "older weights: yes, this is it" in complaint(bench.probe())


def test_a_stale_prefix_cache_is_found(made: Callable[..., Bench]) -> None:
    bench = made("keeps_cache")
    engine = bench.engine_of(Forgetless(bench.api, bench.server.url, bench.server.timeout))
    probe = bench.probe(engine)
    probe.generate(LONG, SAMPLING, KEY)
    bench.learn()
    engine.load_weights(bench.export())
    assert "a prefix cache of older weights: yes, this is it" in complaint(probe)


def test_seeds_that_do_not_act_are_told(made: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = made("seedless")
    with caplog.at_level(logging.WARNING):
        first = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    assert "runs without --enable-deterministic-inference" in caplog.text
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) != first


def test_what_a_killed_run_left_is_cleared_away(made: Callable[..., Bench]) -> None:
    """Generation paused, and a session of weight updates open."""
    bench = made(api=SGLang(ServedPolicy("qwen2", 260), "tensor"))
    bench.server.http.post("/pause_generation", {"mode": "abort"})
    bench.server.http.post("/begin_weight_update")
    assert len(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == 6


def test_a_group_that_a_killed_run_left_is_in_nobodys_way(
    made: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang knows a group by its name until it is destroyed."""
    bench = made(api=SGLang(ServedPolicy("qwen2", 260), "distributed"))
    post = Connections.post

    def killed(self: Connections, path: str, *more: object, **named: object) -> object:
        if path == "/destroy_weights_update_group":
            raise KeyboardInterrupt
        return post(self, path, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Connections, "post", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.engine.generate(PROMPTS, SAMPLING, KEY)
    bench.server.stop()
    engine = bench.engine_of(InferenceServer(bench.api, bench.server.url, 60))
    assert len(engine.generate(PROMPTS, SAMPLING, KEY)) == 6


def test_rows_that_another_breaks_off_are_drawn_again(made: Callable[..., Bench], monkeypatch) -> None:
    """By /abort_request: the answers say so, and are no responses."""
    monkeypatch.setenv("STAND_IN_SECONDS", "0.1")
    bench = made()
    expected = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    rows: list[int] = []

    def finished(response: Any) -> None:
        rows.append(response.row)
        if len(rows) == 1:
            bench.server.http.post("/abort_request", {"abort_all": True})

    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY, finished)) == expected
    assert sorted(rows) == list(range(6))


def test_memory_is_given_back_between_steps(made: Callable[..., Bench], tmp_path: Path) -> None:
    bench = made(python=environment(tmp_path, kind="sglang") / "bin/python")
    expected = rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY))
    pid = bench.server._process
    with pytest.raises(Exception, match="HTTP 5"):
        bench.server.http.get("/health_generate", timeout=30)  # asleep
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) == expected
    bench.learn()
    bench.engine.load_weights(bench.export())
    assert rows_of(bench.engine.generate(PROMPTS, SAMPLING, KEY)) != expected
    assert bench.server._process is pid, "it was woken, not started again"
