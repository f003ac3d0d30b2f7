"""Rollout engines of every kind over one tiny policy, for the tests that hold all of them to the same."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.processes import command_of
from tests.text.servers import sglang_stand_in, vllm_stand_in
from tether.batch import RolloutBatch, WeightUpdate
from tether.integrations.sglang import SGLang
from tether.integrations.sglang import launch_of as launch_sglang
from tether.runtime.program import environment_of
from tether.text.models.lora import LoraOptions, add_lora
from tether.text.models.truncation_record import KeptSets
from tether.text.sampling.engine import NativeEngine
from tether.text.sampling.parity import ParityProbe
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.servers import InferenceServer, ServedEngine, ServedPolicy, ServerApi, Traffic
from tether.text.servers.vllm_api import Adapters, Vllm
from tether.text.servers.vllm_api import launch_of as launch_vllm

SAMPLING = SamplingParams(max_new_tokens=6, n=2, temperature=0.8)
KEY = NoiseKey(seed=5, step=1)
EOS = frozenset(range(4, 130, 3))
PROMPTS = [[4 + (17 * i + 5 * j) % 250 for j in range(length)] for i, length in enumerate((5, 1, 9))]
LONG = [[4 + (7 * j) % 250 for j in range(200)]]
"""A prompt that fills more than one block of vLLM's prefix cache."""
TOLERANCE = 1e-6
POLICY = ServedPolicy("qwen2", 260, "float32", max_length=512, sizes={"intermediate_size": 48})
SERVER_APIS: dict[str, ServerApi] = {"vllm": Vllm(POLICY), "sglang": SGLang(POLICY)}
STAND_INS = {"vllm": vllm_stand_in, "sglang": sglang_stand_in}


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
needs_vllm = pytest.mark.skipif(REAL is None, reason="vLLM's environment is not there: tether setup vllm makes it")
VLLM = ["vllm-stand-in", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])]
"""By a server that speaks its language, and by the real one."""
ADAPTED = [
    "vllm-adapters-stand-in",
    pytest.param("vllm-adapters", marks=[needs_vllm, pytest.mark.slow]),
]
"""The same with a policy whose adapters travel as such."""
EVERY = ["native", *VLLM, *ADAPTED, "sglang-stand-in"]


class Bench:
    """An engine, the policy whose weights it gets, and the server behind it where there is one.

    Args:
        folder: of its own.
        kind: of engine.
        python: interpreter of an environment whose server is started as a process; None: a stand-in in this process.
        faults: of a stand-in in this process.
        api: other than that of the kind.
        adapters: of the policy, which travel as such, to vLLM.
        options: of the server's command line; with a `load_format` it begins with files of the policy.
    """

    def __init__(
        self,
        folder: Path,
        kind: str = "vllm",
        python: Path | None = None,
        faults: str = "",
        api: ServerApi | None = None,
        adapters: Adapters | None = None,
        rows_at_once: int = 8,
        **options: object,
    ) -> None:
        self.model, self.version, self.kind, self.folder = tiny_policy(), 0, kind, folder
        self.adapters, self.rows_at_once = adapters, rows_at_once
        self.loads = "load_format" in options
        (self.model if self.loads else self.model.config).save_pretrained(folder / "config")
        self.model.generation_config.save_pretrained(folder / "config")
        self.there = None
        self.engine: Any
        if kind == "native":
            sampler = tiny_policy()
            self.engine = NativeEngine(sampler, eos_token_ids=EOS, max_num_seqs=8)
            return
        self.api = api or SERVER_APIS[kind]
        more = {}
        if adapters:
            self.api = Vllm(POLICY, adapters)
            options |= adapters.options()
            more["rank"] = options["max_lora_rank"]
            torch.manual_seed(1)
            add_lora(self.model, LoraOptions(adapters.rank, adapters.alpha))
        if python is None:
            self.there = STAND_INS[kind].serve(str(folder / "config"), 0, set(filter(None, [faults])), **more)
            threading.Thread(target=self.there.serve_forever, daemon=True).start()
            self.server = InferenceServer(self.api, f"http://127.0.0.1:{self.there.server_port}", 120)
        else:
            self.server = InferenceServer(self.api, _launch(kind, python, folder, options), 900)
        self.engine = self.engine_of(self.server)

    def close(self) -> None:
        if self.kind != "native":
            self.engine.close()
        if self.there is not None:
            self.there.shutdown()
            self.there.server_close()

    def engine_of(self, *servers: InferenceServer, restores_last_weights: bool = False) -> ServedEngine:
        left_out = frozenset(["lm_head.weight"])
        traffic = Traffic(torch.float32, 1 << 16, left_out, self.rows_at_once, sleeps=not restores_last_weights,
                          adapters=self.adapters is not None, restores_last_weights=restores_last_weights,
                          has_base_layers=self.loads)  # fmt: skip
        return ServedEngine(servers, self.export, eos_token_ids=EOS, vocabulary=260, context=512, traffic=traffic)

    def export(self) -> WeightUpdate:
        return WeightUpdate(self.version, self.model.state_dict(keep_vars=True).items())

    def learn(self) -> None:
        """Other weights, as an update makes them."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for value in filter(lambda value: value.requires_grad, self.model.parameters()):
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

    def probe(self, engine: Any = None, every: int = 1) -> ParityProbe:
        return ParityProbe(engine or self.engine, self.log_probs, every=every, tolerance=TOLERANCE, sampling=SAMPLING)


def _launch(kind: str, python: Path, folder: Path, options: dict[str, object]) -> Any:
    config, log = str(folder / "config"), folder / "server.log"
    if kind == "sglang":
        given = {"model_path": config, "dtype": "float32", "load_format": "dummy", "device": "cpu", **options}
        return launch_sglang(python, log, given, {"OMP_NUM_THREADS": "1"})
    given = {"model": config, "dtype": "float32", "load_format": "dummy", "enforce_eager": True, "max_model_len": 512,
             "gpu_memory_utilization": 0.1, **options}  # fmt: skip
    return launch_vllm(python, log, given, {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})


@torch.no_grad()
def log_probs_of(rollout: RolloutBatch, models: dict[int, PreTrainedModel]) -> torch.Tensor:
    """[B, T] by transformers at temperature 0.8, each token by the model of its version."""
    found = torch.zeros_like(rollout.rollout_log_probs)
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, : rollout.prompt_length[row]]
        ids = rollout.response_ids[row, : rollout.response_length[row]]
        for version, model in models.items():
            logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / 0.8
            all_of_it = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            mine = rollout.token_versions[row, : len(ids)] == version
            found[row, : len(ids)][mine] = all_of_it[mine]
    return found


def rows_of(rollout: RolloutBatch) -> list[list[int]]:
    return [ids[:n].tolist() for ids, n in zip(rollout.response_ids, rollout.response_length.tolist(), strict=True)]


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what a condition returns once it holds, within two minutes."""
    end = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def processes_of(server: InferenceServer) -> list[psutil.Process]:
    """The server and all below it, but not the guard above it."""
    below = psutil.Process().children(recursive=True)
    port = f"--port={server.url.rpartition(':')[2]}"
    first = [one for one in below if port in command_of(one)][:1]
    return [process for one in first for process in (one, *one.children(recursive=True))]


def kill(server: InferenceServer) -> None:
    """Kill a server, and wait until nothing answers for it: a forked one ends a moment after the process above it."""
    processes_of(server)[0].kill()
    wait_for(lambda: not server.is_healthy())


def complaint(probe: ParityProbe, step: int = 3) -> str:
    with pytest.raises(ValueError, match="sampler and trainer disagree") as error:
        probe.generate(LONG, SAMPLING, NoiseKey(5, step))
    return str(error.value)


def bench_of(which: str, folder: Path) -> Bench:
    """One of `EVERY`."""
    kind, _, rest = which.partition("-")
    adapters = Adapters(rank=4, alpha=16) if "adapters" in rest else None
    return Bench(folder, kind, REAL if which in ("vllm", "vllm-adapters") else None, adapters=adapters)
