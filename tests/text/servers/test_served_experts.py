"""Servers tell which experts each token went to; against stand-ins that speak their languages."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.text.sampling.test_experts import EOS, KEY, PROMPTS, SAMPLING, Echo, agrees
from tests.text.servers.bench import STAND_INS
from tests.tiny import tiny_model
from tether.batch import WeightUpdate
from tether.integrations.sglang import SGLang
from tether.text.sampling.protocol import SamplingParams
from tether.text.servers import InferenceServer, ServedEngine, ServedPolicy, ServerApi, Traffic
from tether.text.servers.vllm_api import Vllm

POLICY = ServedPolicy("qwen3_moe", 260)
SERVER_APIS: dict[str, ServerApi] = {"vllm": Vllm(POLICY), "sglang": SGLang(POLICY, experts=(2, 2))}
MODEL = tiny_model("qwen3_moe")
REFUSED = r"does not return the experts .* with --enable-return-routed-experts"


@contextmanager
def engine_of(kind: str, folder: Path, *, tells_experts: bool = True) -> Iterator[ServedEngine]:
    MODEL.config.save_pretrained(folder)
    there = STAND_INS[kind].serve(str(folder), 0, set(), tells_experts=tells_experts)
    threading.Thread(target=there.serve_forever, daemon=True).start()
    server = InferenceServer(SERVER_APIS[kind], f"http://127.0.0.1:{there.server_port}", 120)
    traffic = Traffic(torch.float32, 1 << 26, frozenset(), 8, sleeps=False)
    export = lambda: WeightUpdate(0, tiny_model("qwen3_moe").state_dict(keep_vars=True).items())  # noqa: E731
    yield ServedEngine([server], export, eos_token_ids=EOS, vocabulary=260, context=512, traffic=traffic)
    there.shutdown()
    there.server_close()


@pytest.mark.parametrize("kind", SERVER_APIS)
def test_the_trainer_finds_the_same_experts(kind: str, tmp_path: Path) -> None:
    with engine_of(kind, tmp_path) as engine:
        batch = engine.generate(PROMPTS, SAMPLING, KEY)
        assert agrees(tiny_model("qwen3_moe"), batch)
        assert not agrees(tiny_model("qwen3_moe", seed=1), batch)
        turns = engine.generate(PROMPTS, SamplingParams(40, n=2, record_experts=True), KEY, responder=Echo())
        assert agrees(tiny_model("qwen3_moe"), turns)
        assert engine.generate(PROMPTS, SamplingParams(4), KEY).routed_experts is None


@pytest.mark.parametrize("kind", SERVER_APIS)
def test_a_server_that_does_not_tell_is_refused(kind: str, tmp_path: Path) -> None:
    with engine_of(kind, tmp_path, tells_experts=False) as engine, pytest.raises(ValueError, match=REFUSED):
        engine.generate(PROMPTS[:1], SamplingParams(12, record_experts=True), KEY)  # no other request outlasts it


@pytest.mark.parametrize("kind", SERVER_APIS)
def test_it_is_refused_when_it_is_first_looked_at(kind: str, tmp_path: Path) -> None:
    """Before any row is asked for, where the run is to replay experts."""
    for tells in (True, False):
        with engine_of(kind, tmp_path, tells_experts=tells) as engine:
            url = engine.servers[0].url
            InferenceServer(SERVER_APIS[kind], url, 120).wait_ready()
            server = InferenceServer(replace(SERVER_APIS[kind], returns_experts=True), url, 120)  # type: ignore[type-var]
            with nullcontext() if tells else pytest.raises(ValueError, match=REFUSED):
                server.wait_ready()
