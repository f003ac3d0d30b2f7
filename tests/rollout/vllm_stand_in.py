"""A server that speaks vLLM's language, as vLLM 0.32 was seen to: routes, payloads, errors, prefix cache and all."""

import os
import time
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from safetensors import safe_open

from tests.rollout.stand_in import Model, Refused, cut, faults_of_environment, listening, parser

FAULTS = (
    "stale_head", "deaf_to_temperature", "lost_update", "half_answers", "no_routes", "old", "dies", "fails",
    "another_name", "another_vocabulary", "another_model", "no_extension", "no_sleep",
)  # fmt: skip


class VllmModel(Model):
    update: dict[str, torch.Tensor] | None = None

    def choose(self, ids: list[int], params: dict[str, Any], aborts: int) -> dict[str, Any]:
        """`aborts`: how many there had been when it was asked."""
        generator = torch.Generator().manual_seed(params["seed"])
        content = []

        def draw(logits: torch.Tensor, position: int) -> int:
            logits = self.tempered(logits, params["temperature"])
            if params["temperature"] > 0:
                logits = cut(logits, params["top_k"], params["top_p"])
            log_probs = logits.log_softmax(-1)
            if params["temperature"] == 0:
                token = int(log_probs.argmax())
            else:
                token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            top = [token, *log_probs.topk(params["logprobs"]).indices.tolist()]
            listed = [{"token_id": t, "logprob": max(float(log_probs[t]), -9999.0)} for t in dict.fromkeys(top)]
            content.append({**listed[0], "top_logprobs": listed})
            return token

        stops = set(params["stop_token_ids"])
        tokens = self.sample(ids, params["max_tokens"], stops, draw, lambda: self.aborts == aborts)
        reason = "stop" if set(tokens[-1:]) & stops else "length" if len(tokens) == params["max_tokens"] else "abort"
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}] if tokens else None
        return {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content},
                "weight_versions": spans, "sampling_mask": None}  # fmt: skip

    def finish(self, version: str) -> None:
        assert self.update is not None
        if missing := self.names - set(self.update):
            raise Refused(500, f"tether sent no weights for {len(missing)} parameters: {sorted(missing)[:4]}")
        self.load(self.update, version)
        self.update, self.version = None, version

    def read(self, path: str) -> None:
        names = set(self.model.state_dict())
        assert self.update is not None
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name not in names:
                    raise Refused(500, f"Call to collective_rpc method failed: no module or parameter named '{name}'")
                self.update[name] = file.get_tensor(name)


@dataclass(frozen=True)
class VllmLanguage:
    model: VllmModel

    def get(self, path: str) -> object:
        version = "0.9.1" if "old" in self.model.faults else "0.32.0"
        name = "my-model" if "another_name" in self.model.faults else "policy"
        known = {
            "/health": "",
            "/version": {"version": version},
            "/v1/models": {"data": [{"id": name, "root": self.model.folder, "max_model_len": self.model.limit}]},
            "/weight_info": {"weight_version": self.model.version},
            "/metrics": f'# TYPE counter\nvllm:generation_tokens_total{{model_name="policy"}} {self.model.tokens}.0\n',
            "/is_sleeping": {"is_sleeping": self.model.sleeps},
        }
        if path not in known:
            raise Refused(404, "Not Found")
        return known[path]

    def refusal(self, error: Refused) -> object:
        return {"error": {"message": str(error), "type": "Error", "param": None, "code": error.status}}

    def post(self, path: str, body: dict[str, Any]) -> object:
        if path == "/abort_requests":
            self.model.abort()
            return {"status": "aborted"}
        aborts = self.model.aborts
        with self.model.lock:
            return self.generate(body, aborts) if path == "/inference/v1/generate" else self._post(path, body)

    def _post(self, path: str, body: dict[str, Any]) -> object:
        model = self.model
        if "no_routes" in model.faults or ("no_sleep" in model.faults and path == "/sleep"):
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
            return {"results": [self.call(body["method"])]}
        else:
            raise Refused(404, "Not Found")
        return {"message": "done"}

    def call(self, method: str) -> object:
        """Of `tether_in_vllm.Extension`."""
        config, faults = self.model.model.config, self.model.faults
        if "no_extension" in faults:
            raise Refused(500, f"Call to collective_rpc method failed: 'Worker' object has no attribute '{method}'")
        if method == "about":
            kind = "llama" if "another_model" in faults else config.model_type
            return {"model_type": kind, "vocabulary": config.vocab_size + ("another_vocabulary" in faults)}
        if method != "pack_head":
            raise Refused(500, f"no method {method}")
        self.model.head = None
        return None

    def generate(self, body: dict[str, Any], aborts: int) -> object:
        params = body["sampling_params"]
        if self.model.sleeps:
            raise Refused(500, "the engine sleeps")
        if body["model"] != "policy":
            raise Refused(404, f"The model `{body['model']}` does not exist. Valid aliases: policy.")
        if len(body["token_ids"]) + params["max_tokens"] > self.model.limit:
            raise Refused(400, f"This model's maximum context length is {self.model.limit} tokens.")
        if slow := os.environ.get("STAND_IN_SECONDS"):
            time.sleep(float(slow))
        choice = self.model.choose(body["token_ids"], params, aborts)
        return {"request_id": "generate-tokens-1", "model": "policy", "choices": [choice]}


def serve(folder: str, port: int, faults: set[str], limit: int | None = None) -> ThreadingHTTPServer:
    return listening(VllmLanguage(VllmModel(folder, faults, limit)), port)


def main() -> None:
    texts = ("host", "model", "served-model-name", "generation-config", "logprobs-mode", "worker-extension-cls",
             "dtype", "weight-transfer-config", "load-format", "seed")  # fmt: skip
    numbers = ("port", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size",
               "max-logprobs", "gpu-memory-utilization")  # fmt: skip
    flags = ("skip-tokenizer-init", "enable-scale-out", "enforce-eager", "enable-chunked-prefill",
             "enable-prefix-caching", "enable-sleep-mode")  # fmt: skip
    chosen = parser(texts, numbers, flags, says_no=True).parse_args()
    assert chosen.module == "vllm.entrypoints.openai.api_server"
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    assert chosen.served_model_name == "policy"
    assert chosen.logprobs_mode == "processed_logprobs"
    faults = faults_of_environment(FAULTS)
    serve(chosen.model, chosen.port, faults, chosen.max_model_len).serve_forever()


if __name__ == "__main__":
    main()
