"""A server that speaks vLLM's language, as vLLM 0.32 was seen to: routes, payloads, errors, prefix cache and all.

It truly samples, by transformers from a tiny model, and can be told to have faults. Run by `environment` it takes
vLLM's own command line.
"""

import argparse
import copy
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

FAULTS = ("stale_head", "deaf_to_temperature", "lost_update", "half_answers", "no_routes", "old", "dies")
ROOT = Path(__file__).resolve().parents[2]


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Model:
    """The policy, its prefix cache, and the weights that are on their way."""

    def __init__(self, folder: str, faults: set[str], max_model_len: int | None) -> None:
        torch.manual_seed(12345)  # not those of the trainer: "load_format dummy"
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.faults, self.version, self.tokens = faults, "default", 0
        self.limit = max_model_len or config.max_position_embeddings
        self.cache: dict[tuple[int, ...], Any] = {}
        self.update: dict[str, torch.Tensor] | None = None
        self.head: torch.Tensor | None = None
        self.lock = threading.Lock()
        self.sleeps = False
        if "stale_head" in faults:
            self.head = self.model.lm_head.weight.detach().clone()

    @torch.no_grad()
    def sample(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(params["seed"])
        past = self.cache.get(tuple(ids[:-1]))
        if past is None and len(ids) > 1:
            past = self.model.model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
            self.cache[tuple(ids[:-1])] = past
        past, last, tokens, content = copy.deepcopy(past), ids[-1], [], []
        stops = set(params["stop_token_ids"])
        while len(tokens) < params["max_tokens"]:
            output = self.model.model(torch.tensor([[last]]), past_key_values=past, use_cache=True)
            past = output.past_key_values
            head = self.model.lm_head.weight if self.head is None else self.head
            log_probs = self.processed(output.last_hidden_state[0, -1] @ head.T, params)
            if params["temperature"] == 0:
                last = int(log_probs.argmax())
            else:
                last = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            top = [last, *log_probs.topk(params["logprobs"]).indices.tolist()]
            listed = [{"token_id": t, "logprob": max(float(log_probs[t]), -9999.0)} for t in dict.fromkeys(top)]
            content.append({**listed[0], "top_logprobs": listed})
            tokens.append(last)
            self.tokens += 1
            if last in stops:
                break
        reason = "stop" if tokens[-1] in stops else "length"
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
        return {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content},
                "weight_versions": spans, "sampling_mask": None}  # fmt: skip

    def processed(self, logits: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        if params["temperature"] > 0 and "deaf_to_temperature" not in self.faults:
            logits = logits / params["temperature"]
        if params["temperature"] > 0 and params["top_k"] > 0:
            logits = logits.masked_fill(logits < logits.topk(params["top_k"]).values[-1], -torch.inf)
        if params["temperature"] > 0 and params["top_p"] < 1:
            probs, order = logits.softmax(-1).sort()
            logits = logits.index_fill(0, order[probs.cumsum(-1) <= 1 - params["top_p"]], -torch.inf)
        return logits.log_softmax(-1)

    def finish(self, version: str) -> None:
        mine = self.model.state_dict()
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        assert self.update is not None
        if missing := set(mine) - set(self.update) - tied:
            raise Refused(500, f"tether sent no weights for {len(missing)} parameters: {sorted(missing)[:4]}")
        if not ("lost_update" in self.faults and version.endswith("-2")):
            self.model.load_state_dict(self.update, strict=False)
        self.update, self.version = None, version

    def read(self, path: str) -> None:
        names = set(self.model.state_dict())
        assert self.update is not None
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name not in names:
                    raise Refused(500, f"Call to collective_rpc method failed: no module or parameter named '{name}'")
                self.update[name] = file.get_tensor(name)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model: Model

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = "half_answers" in self.model.faults and "generate" in self.path
        self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = half

    def do_GET(self) -> None:
        models = {"data": [{"id": "policy", "max_model_len": self.model.limit}]}
        version = "0.9.1" if "old" in self.model.faults else "0.32.0"
        known = {
            "/health": "",
            "/version": {"version": version},
            "/v1/models": models,
            "/weight_info": {"weight_version": self.model.version},
            "/metrics": f'# TYPE counter\nvllm:generation_tokens_total{{model_name="policy"}} {self.model.tokens}.0\n',
            "/is_sleeping": {"is_sleeping": self.model.sleeps},
        }
        found = known.get(self.path)
        self.answer(404, {"detail": "Not Found"}) if found is None else self.answer(200, found)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        try:
            with self.model.lock:
                self.answer(200, self.handle_post(urlsplit(self.path).path, body))
        except Refused as error:
            message = {"error": {"message": str(error), "type": "Error", "param": None, "code": error.status}}
            self.answer(error.status, message)

    def handle_post(self, path: str, body: dict[str, Any]) -> object:
        model = self.model
        if path == "/inference/v1/generate":
            return self.generate(body)
        if "no_routes" in model.faults:
            raise Refused(404, "Not Found")
        if path == "/start_weight_update":
            model.update = {}
        elif path == "/update_weights":
            if model.update is None:
                raise Refused(500, "start_weight_update must be called before update_weights.")
            model.read(body["update_info"]["path"])
        elif path == "/finish_weight_update":
            model.finish(body["weight_version"])
        elif path == "/reset_prefix_cache":
            model.cache.clear()
            return {"success": True}
        elif path in ("/sleep", "/wake_up"):
            model.sleeps = path == "/sleep"
        elif path == "/collective_rpc":
            if body["method"] != "pack_head":
                raise Refused(500, f"no method {body['method']}")
            model.head = None
            return {"results": [None]}
        else:
            raise Refused(404, "Not Found")
        return {"message": "done"}

    def generate(self, body: dict[str, Any]) -> object:
        params = body["sampling_params"]
        if self.model.sleeps:
            raise Refused(500, "the engine sleeps")
        if body["model"] != "policy":
            raise Refused(404, f"The model `{body['model']}` does not exist. Valid aliases: policy.")
        if len(body["token_ids"]) + params["max_tokens"] > self.model.limit:
            raise Refused(400, f"This model's maximum context length is {self.model.limit} tokens.")
        if "dies" in self.model.faults and self.model.tokens > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if slow := os.environ.get("STAND_IN_SECONDS"):
            time.sleep(float(slow))
        choice = self.model.sample(body["token_ids"], params)
        return {"request_id": "generate-tokens-1", "model": "policy", "choices": [choice]}


def serve(folder: str, port: int, faults: set[str], max_model_len: int | None = None) -> ThreadingHTTPServer:
    handler = type("Bound", (Handler,), {"model": Model(folder, faults, max_model_len)})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    return server


def environment(folder: Path, faults: str = "") -> Path:
    """An "environment of vLLM" whose python runs this file; returns the folder."""
    python = folder / "bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(
        f'#!/bin/sh\ncd {ROOT}\nexport STAND_IN_FAULTS="{faults}" PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n'
        f'exec {sys.executable} -m tests.rollout.stand_in "$@"\n'
    )
    python.chmod(0o755)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("host", "served-model-name", "generation-config", "logprobs-mode", "worker-extension-cls", "dtype",
                 "weight-transfer-config", "load-format", "seed"):  # fmt: skip
        parser.add_argument(f"--{name}", required=name in ("served-model-name", "logprobs-mode"))
    parser.add_argument("-m", dest="module")
    parser.add_argument("--model", required=True)
    for name in ("port", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size",
                 "max-logprobs"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    for name in ("skip-tokenizer-init", "enable-scale-out", "enforce-eager", "enable-chunked-prefill",
                 "enable-prefix-caching", "enable-sleep-mode"):  # fmt: skip
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    chosen = parser.parse_args()
    assert chosen.module == "vllm.entrypoints.openai.api_server"
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    faults = set(filter(None, os.environ.get("STAND_IN_FAULTS", "").split(",")))
    assert faults <= set(FAULTS)
    torch.set_num_threads(1)
    serve(chosen.model, chosen.port, faults, chosen.max_model_len).serve_forever()


if __name__ == "__main__":
    main()
