"""A server that speaks vLLM's language, as vLLM 0.32 was seen to: routes, payloads, errors, prefix cache and all."""

import base64
import io
import json
import os
import time
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.text.servers.stand_in import Model, Refused, cut, faults_of_environment, listening, parser
from tether.integrations.megatron.layout import experts_of
from tether.text.models.fused_experts import fused
from tether.text.servers.inside.tether_buffers import Buffer

FAULTS = (
    "stale_head", "deaf_to_temperature", "lost_update", "half_answers", "no_routes", "old", "dies",
    "dies_at_once", "fails", "another_name", "another_vocabulary", "another_model", "another_width",
    "no_extension", "no_sleep", "another_dtype",
)  # fmt: skip


class VllmModel(Model):
    """`rank`: the largest of adapters that it takes; 0: none."""

    update: dict[str, torch.Tensor] | None = None
    rank = 0
    gpu: str | None = None
    """Its name; none is used."""
    adapter: tuple[str, str] | None = None
    """Name and folder."""
    plain: dict[str, torch.Tensor] | None = None
    """Weights without the adapter, where they are with it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.received = Buffer()

    def adapt(self, name: str, folder: str) -> None:
        """As `/v1/load_lora_adapter` does."""
        if self.adapter is not None:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        if config["r"] > self.rank:
            raise Refused(500, f"LoRA rank {config['r']} is greater than max_lora_rank {self.rank}.")
        weights = load_file(Path(folder, "adapter_model.safetensors"))
        self.forget_adapters()
        self.plain = {key: value.clone() for key, value in self.model.state_dict().items()}
        for key in [key for key in weights if ".lora_A." in key]:
            layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up, down = weights[key.replace(".lora_A.", ".lora_B.")], weights[key]
            self.model.get_parameter(f"{layer}.weight").data += config["lora_alpha"] / config["r"] * up @ down
        self.adapter = (name, folder)

    def forget_adapters(self) -> None:
        if self.plain is not None:
            self.model.load_state_dict(self.plain)
        self.plain = None

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
        told = self.told([*ids, *tokens]) if self.tells_experts and tokens else None
        return {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content},
                "weight_versions": spans, "sampling_mask": None, "routed_experts": told}  # fmt: skip

    def told(self, ids: list[int]) -> str:
        """The experts of all tokens but the last, as a file of numpy."""
        with io.BytesIO() as file:
            np.save(file, self.experts(ids).astype(np.uint8))
            return base64.b64encode(file.getvalue()).decode()

    def finish(self, version: str) -> None:
        assert self.update is not None
        if experts := experts_of(self.model.config):
            self.update = dict(fused(self.update.items(), experts))
        if missing := self.names - set(self.update):
            raise Refused(500, f"tether sent no weights for {len(missing)} parameters: {sorted(missing)[:4]}")
        self.forget_adapters()
        self.load(self.update, version)
        self.update, self.version = None, version
        self.received.leave()

    def read(self, told: dict[str, Any]) -> None:
        names, failed = set(self.model.state_dict()), "Call to collective_rpc method failed"
        assert self.update is not None
        try:
            if "path" in told:
                tensors = load_file(told["path"])
            else:
                if "buffer" in told:
                    self.received.open(told["buffer"])
                else:
                    self.received.receive(told["size"])
                tensors = self.received.tensors(told["tensors"])
        except (ValueError, RuntimeError) as error:
            raise Refused(500, f"{failed}: {error}") from None
        for name, value in tensors.items():
            if name not in names and ".experts." not in name:
                raise Refused(500, f"{failed}: no module or parameter named '{name}'")
            self.update[name] = value if told.get("last") else value.clone()


@dataclass(frozen=True)
class VllmLanguage:
    model: VllmModel

    def get(self, path: str) -> object:
        version = "0.9.1" if "old" in self.model.faults else "0.32.0"
        name = "my-model" if "another_name" in self.model.faults else "policy"
        adapter = [{"id": self.model.adapter[0], "root": self.model.adapter[1]}] if self.model.adapter else []
        base = {"id": name, "root": self.model.folder, "max_model_len": self.model.limit}
        known = {
            "/health": "",
            "/version": {"version": version},
            "/v1/models": {"data": [base, *adapter]},
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
            if model.update is not None:
                raise Refused(500, "start_weight_update called while a weight update is already active.")
            model.update = {}
        elif path == "/init_weight_transfer_engine":
            told = body["init_info"]
            try:
                model.received.join(**told, rank=1)
            except (ValueError, RuntimeError) as error:
                raise Refused(500, f"Call to collective_rpc method failed: {error}") from None
        elif path == "/update_weights":
            if model.update is None:
                raise Refused(500, "start_weight_update must be called before update_weights.")
            model.read(body["update_info"])
        elif path == "/finish_weight_update":
            model.finish(body["weight_version"])
        elif path == "/reset_prefix_cache":
            model.cache.clear()
            return {"success": True}
        elif path == "/v1/load_lora_adapter" and model.rank:
            model.adapt(body["lora_name"], body["lora_path"])
        elif path == "/v1/unload_lora_adapter" and model.rank:
            if model.adapter is None:
                raise Refused(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            model.adapter = None
        elif path == "/update_weight_version":
            model.version = body["new_version"]
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
            words = config.vocab_size + ("another_vocabulary" in faults)
            tells = self.model.tells_experts
            width = config.intermediate_size * (2 if "another_width" in faults else 1)
            return {"model_type": kind, "vocabulary": words, "sizes": {"intermediate_size": width},
                    "dtype": self.model.dtype, "rank": self.model.rank, "experts": tells}  # fmt: skip
        if method == "workers":
            return {"count": 1, "gpus": [], "own": self.model.gpu}
        if method == "give_up_update":
            self.model.update = None
        elif method == "pack_head":
            self.model.head = None
        else:
            raise Refused(500, f"no method {method}")
        return None

    def generate(self, body: dict[str, Any], aborts: int) -> object:
        params = body["sampling_params"]
        if self.model.sleeps:
            raise Refused(500, "the engine sleeps")
        adapted = self.model.adapter[0] if self.model.adapter else None
        if body["model"] not in ("policy", adapted):
            raise Refused(404, f"The model `{body['model']}` does not exist. Valid aliases: policy.")
        if (body["model"] == adapted) != (self.model.plain is not None):
            raise Refused(500, "an update of the layers has taken the adapter away, or nobody asked for it")
        if len(body["token_ids"]) >= self.model.limit:
            raise Refused(400, f"This model's maximum context length is {self.model.limit} tokens.")
        params["max_tokens"] = min(params["max_tokens"], self.model.limit - len(body["token_ids"]))  # silently
        if slow := os.environ.get("STAND_IN_SECONDS"):
            time.sleep(float(slow))
        choice = self.model.choose(body["token_ids"], params, aborts)
        return {"request_id": "generate-tokens-1", "model": "policy", "choices": [choice]}


def serve(
    folder: str,
    port: int,
    faults: set[str],
    limit: int | None = None,
    rank: int = 0,
    load_format: str = "dummy",
    *,
    tells_experts: bool = False,
) -> ThreadingHTTPServer:
    model = VllmModel(folder, faults, limit, load_format)
    model.tells_experts = tells_experts
    model.rank = rank
    return listening(VllmLanguage(model), port)


def main() -> None:
    texts = ("host", "model", "served-model-name", "generation-config", "logprobs-mode", "worker-extension-cls",
             "dtype", "weight-transfer-config", "load-format", "seed")  # fmt: skip
    numbers = ("port", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size",
               "max-logprobs", "gpu-memory-utilization", "max-lora-rank", "max-loras")  # fmt: skip
    flags = ("skip-tokenizer-init", "enable-scale-out", "enforce-eager", "enable-chunked-prefill",
             "enable-prefix-caching", "enable-sleep-mode", "enable-lora", "enable-return-routed-experts")  # fmt: skip
    chosen = parser(texts, numbers, flags, says_no=True).parse_args()
    assert chosen.module == "vllm.entrypoints.openai.api_server"
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    assert chosen.served_model_name == "policy"
    assert chosen.logprobs_mode == "processed_logprobs"
    faults = faults_of_environment(FAULTS)
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    rank = chosen.max_lora_rank if chosen.enable_lora else 0
    tells = bool(chosen.enable_return_routed_experts)
    limit, begins = chosen.max_model_len, chosen.load_format
    serve(chosen.model, chosen.port, faults, limit, rank, begins, tells_experts=tells).serve_forever()
