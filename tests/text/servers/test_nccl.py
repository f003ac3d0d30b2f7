"""Weights by NCCL, as far as a machine without GPUs can say: Gloo stands in for it, and the host for the GPUs."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.text.servers.bench import PROMPTS, SAMPLING, SERVER_APIS, Bench
from tether.config import load_config
from tether.integrations.sglang import SGLang
from tether.text.sampling.protocol import NoiseKey
from tether.text.servers import CPU
from tether.text.servers.build import check_external_servers
from tether.text.servers.inside import tether_buffers
from tether.text.servers.vllm_api import Vllm

ROLLOUT = "actor_rollout_ref.rollout"
DEVICE, GLOO = tether_buffers._BACKENDS["gloo"]


@pytest.fixture(params=SERVER_APIS)
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """With a server in this process."""
    kind = request.param
    weights = {"vllm": "tether.text.servers.vllm_weights", "sglang": "tether.integrations.sglang.weights"}[kind]
    monkeypatch.setattr(f"{weights}.this_gpu", lambda: CPU)
    policy = SERVER_APIS[kind].policy
    api = Vllm(policy, transfer="nccl") if kind == "vllm" else SGLang(policy, "nccl")
    bench = Bench(tmp_path, kind, api=api)
    yield bench
    bench.close()


def test_weights_arrive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []

    def nccl(*given: Any) -> object:
        joined.append(given[1])
        return GLOO(*given)

    monkeypatch.setitem(tether_buffers._BACKENDS, "nccl", (DEVICE, nccl))
    monkeypatch.setattr("tether.text.servers.vllm_weights.gpu_of", lambda _: "GPU-1")
    model = bench.there.RequestHandlerClass.speaks.model
    model.gpu = "GPU-2"
    bench.learn()
    bench.engine.load_weights(bench.export())
    rollout = bench.engine.generate(PROMPTS, SAMPLING, NoiseKey(5, 1))
    assert (rollout.rollout_log_probs - bench.log_probs(rollout))[rollout.response_mask].abs().max() < 1e-4
    assert sorted(joined) == ([0, 1] if bench.api.name == "vllm" else [0])  # SGLang's side joins by itself


@pytest.mark.parametrize("bench", ["vllm"], indirect=True)  # SGLang does not tell its GPUs
@pytest.mark.parametrize(
    ("gpu", "why"), [(None, "is on a CPU"), ("GPU-1", "has the trainer's GPU GPU-1")], ids=["none", "shared"]
)
def test_a_worker_without_a_gpu_of_its_own_is_refused(
    gpu: str | None, why: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tether.text.servers.vllm_weights.gpu_of", lambda _: "GPU-1")
    bench.there.RequestHandlerClass.speaks.model.gpu = gpu
    with pytest.raises(ValueError, match=rf"a worker {why}; {ROLLOUT}.weight_transfer=nccl needs a GPU for each"):
        bench.engine.load_weights(bench.export())


def test_a_run_on_a_cpu_is_refused_before_it_loads_anything() -> None:
    needed = ["data.train_files=rows.parquet", "actor_rollout_ref.model.path=nowhere"]
    config = load_config(None, [*needed, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.weight_transfer=nccl"]).config
    with pytest.raises(ValueError, match=rf"{ROLLOUT}.weight_transfer=nccl: .* this run trains on cpu. Set it to auto"):
        check_external_servers(config.actor_rollout_ref, "nowhere", torch.device("cpu"))


@pytest.mark.parametrize("before", [None, "0"])
def test_a_dead_rank_ends_no_process(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch reads from the environment when a group is made, and later ones shall not."""
    monkeypatch.delenv(tether_buffers.BLOCKING, raising=False)
    if before is not None:
        monkeypatch.setenv(tether_buffers.BLOCKING, before)
    made = []

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, *given: Any) -> None:
            made.append((os.environ[tether_buffers.BLOCKING], given[1:3], given[3]._timeout))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    tether_buffers.joined(HashStore(), 1, 3, "tether-1", "nccl", "127.0.0.1", timedelta(seconds=7))
    assert made == [("1", (1, 3), timedelta(seconds=7))]
    assert os.environ.get(tether_buffers.BLOCKING) == before
