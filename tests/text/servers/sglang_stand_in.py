"""A server that speaks SGLang's language, as the source of SGLang 0.5.23 has it.

That is its routes, payloads and errors, its cache, its sessions of weight updates, its pauses.
"""

import base64
import glob
import io
import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed import distributed_c10d, rendezvous

from tests.text.servers.stand_in import Model, Refused, cut, faults_of_environment, listening, parser

FAULTS = (
    "deaf_to_temperature", "lost_update", "half_answers", "no_routes", "old", "dies", "dies_at_once", "fails",
    "another_model", "seedless", "keeps_cache", "no_sleep", "another_dtype",
)  # fmt: skip
FIELDS = {
    "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask",
    "stream", "rid", "return_routed_experts",
}  # fmt: skip
PARAMETERS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop_token_ids", "ignore_eos", "sampling_seed",
    "skip_special_tokens", "no_stop_trim",
}  # fmt: skip
MASK = 4096  # --sampling-mask-max-tokens
ALLOWED = {
    ("builtins", "list"), ("builtins", "tuple"), ("collections", "OrderedDict"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"), ("torch", "Tensor"), ("torch", "Size"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"), ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"), ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch", "float32"), ("torch", "bfloat16"), ("torch", "int64"),
}  # fmt: skip
"""Of what SGLang lets a pickle name, what tensors on the host need."""


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class SGLangModel(Model):
    """`deterministic`: whether seeds act."""

    def __init__(
        self, folder: str, faults: set[str], limit: int | None, load_format: str, *, deterministic: bool
    ) -> None:
        super().__init__(folder, faults, limit, load_format)
        self.deterministic = deterministic and "seedless" not in faults
        self.session = False
        self.running, self.paused = 0, False
        self.state = threading.Condition()
        self.groups: dict[str, Any] = {}

    def generate(self, ids: list[int], params: dict[str, Any], *, masks: bool, experts: bool = False) -> dict[str, Any]:
        self.check(ids, params, masks=masks)
        greedy = params.get("temperature", 1.0) < 1e-6
        temperature, top_k = (1.0, 1) if greedy else (params["temperature"], params["top_k"])
        told, kept, kept_log_probs = [], [], []

        def draw(logits: torch.Tensor, position: int) -> int:
            logits = self.tempered(logits, temperature)
            left = cut(logits, top_k, params["top_p"]).log_softmax(-1)
            generator = None
            if self.deterministic:
                generator = torch.Generator().manual_seed(params["sampling_seed"] * 1_000_003 + position)
            token = int(left.argmax() if greedy else torch.multinomial(left.exp(), 1, generator=generator))
            told.append([float(logits.log_softmax(-1)[token]), token, None])
            if masks:
                kept.append((left > -torch.inf).nonzero().flatten().tolist())
                kept_log_probs.append(float(left[token]))
            return token

        with self.state:
            self.state.wait_for(lambda: not self.paused)
            aborts, version = self.aborts, self.version
            self.running += 1
        try:
            if slow := os.environ.get("STAND_IN_SECONDS"):
                time.sleep(float(slow))
            ends = set() if params["ignore_eos"] else set(params["stop_token_ids"])
            with self.lock:
                most = params["max_new_tokens"]
                tokens = self.sample(ids, most, ends, draw, lambda: self.aborts == aborts)
        finally:
            with self.state:
                self.running -= 1
                self.state.notify_all()
        reason: dict[str, object] = {"type": "length", "length": len(tokens)}
        if tokens and tokens[-1] in ends:
            reason = {"type": "stop", "matched": tokens[-1]}
        elif len(tokens) < most:
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        meta = {"id": "1", "finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(tokens),
                "cached_tokens": 0, "weight_version": version, "output_token_logprobs": told,
                "input_token_logprobs": []}  # fmt: skip
        if masks:
            meta |= {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": kept_log_probs}
        if experts and self.tells_experts and tokens:
            with self.lock:
                told = self.experts([*ids, *tokens]).astype("<i4").tobytes()
            meta["routed_experts"] = base64.b64encode(told).decode()
        return {"output_ids": tokens, "meta_info": meta}

    def check(self, ids: list[int], params: dict[str, Any], *, masks: bool) -> None:
        if self.sleeps:
            raise Refused(500, "Internal Server Error")
        if unknown := set(params) - PARAMETERS:
            raise Refused(400, f"Unexpected keyword argument {unknown.pop()!r}")
        if not (params["top_k"] == -1 or params["top_k"] >= 1):
            raise Refused(400, f"top_k must be -1 (disable) or at least 1, got {params['top_k']}.")
        if masks and not 1 <= params["top_k"] <= MASK:
            what = f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {MASK}"
            raise Refused(400, f"{what}; got top_k={params['top_k']}.")
        if len(ids) + params["max_new_tokens"] > self.limit:
            what = "Requested token count exceeds the model's maximum context length of"
            raise Refused(400, f"{what} {self.limit} tokens.")

    def abort(self) -> None:
        with self.state:
            super().abort()

    def pause(self, mode: str) -> None:
        assert mode == "abort"
        with self.state:
            self.paused = True
            self.aborts += 1
            self.state.wait_for(lambda: not self.running)

    def go_on(self) -> None:
        with self.state:
            self.paused = False
            self.state.notify_all()

    def flush(self) -> bool:
        if self.running:
            return False
        self.cache.clear()
        return True

    def updated(self, body: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Names that the model has not are passed over, as SGLang's models do."""
        mine = self.model.state_dict()
        for name, value in weights.items():
            if name in mine and mine[name].shape != value.shape:
                what = f"The size of tensor {list(value.shape)} must match {list(mine[name].shape)}"
                raise Refused(
                    400, f"Failed to update weights: {what}.\nRolling back to original weights.", success=False
                )
        self.load(weights, body.get("weight_version") or "")
        self.version = body.get("weight_version") or self.version
        flushes = body["flush_cache"] and "keeps_cache" not in self.faults
        if flushes and not self.flush():
            raise Refused(400, "Weights were updated, but the cache was not flushed", success=False)
        return {"success": True, "message": "Succeeded to update model weights."}

    def in_session(self, route: str) -> None:
        if not self.session:
            raise Refused(400, f"{route} must run between begin_weight_update() and end_weight_update()", success=False)

    def join(self, body: dict[str, Any]) -> None:
        """As SGLang's `init_custom_process_group` does, of torch's own parts; a server is a world of its own.

        It has no GPU: Gloo stands in for NCCL.
        """
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        address, rank = f"tcp://{body['master_address']}:{body['master_port']}", body["rank_offset"]
        store, rank, world = next(rendezvous(address, rank, body["world_size"]))
        group, _ = distributed_c10d._new_process_group_helper(
            world, rank, [], distributed_c10d.Backend({"nccl": "gloo"}.get(body["backend"], body["backend"])),
            distributed_c10d.PrefixStore(body["group_name"], store), group_name=body["group_name"],
            timeout=distributed_c10d.default_pg_timeout,
        )  # fmt: skip
        distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self.groups[body["group_name"]] = group

    def received(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = {}
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            value = torch.empty(shape, dtype=getattr(torch, dtype))
            torch.distributed.broadcast(value, src=0, group=self.groups[body["group_name"]])
            found[name] = value
        return found


@dataclass(frozen=True)
class SGLangLanguage:
    model: SGLangModel

    def refusal(self, error: Refused) -> object:
        if error.status == 404:
            return {"detail": "Not Found"}
        if error.status >= 500:
            return str(error)
        return {**error.more, "message": str(error)} if error.more else {"error": {"message": str(error)}}

    def get(self, path: str) -> object:
        model = self.model
        if path in ("/health", "/health_generate"):
            return self.healthy()
        if path == "/model_info":
            kind = "llama" if "another_model" in model.faults else model.model.config.model_type
            return {"model_path": model.folder, "is_generation": True, "weight_version": model.version,
                    "model_type": kind, "load_format": "dummy"}  # fmt: skip
        if path == "/server_info":
            version = "0.4.9" if "old" in model.faults else "0.5.23"
            seeded, tells = model.deterministic, model.tells_experts
            return {"version": version, "tp_size": 1, "dtype": model.dtype, "context_length": model.limit,
                    "enable_deterministic_inference": seeded,
                    "enable_return_routed_experts": tells}  # fmt: skip
        raise Refused(404, "Not Found")

    def healthy(self) -> str:
        """A token is sampled, or one of somebody else's is waited for."""
        model, before, until = self.model, self.model.tokens, time.monotonic() + 20
        if model.sleeps:
            raise Refused(503, "")
        if not model.running:
            with model.lock, torch.no_grad():
                model.model(torch.tensor([[0]]))
            return ""
        while model.running and model.tokens == before:
            if time.monotonic() > until:
                raise Refused(503, "")
            time.sleep(0.01)
        return ""

    def post(self, path: str, body: dict[str, Any]) -> object:
        model = self.model
        if path == "/generate":
            if unknown := set(body) - FIELDS:
                raise Refused(400, f"unknown field {unknown.pop()}")
            prompts = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
            masks = bool(body["return_sampling_mask"])
            experts = bool(body.get("return_routed_experts"))
            answers = [
                model.generate(prompt, body["sampling_params"], masks=masks, experts=experts) for prompt in prompts
            ]
            return answers if isinstance(body["input_ids"][0], list) else answers[0]
        if path == "/abort_request":
            return model.abort() or ""
        if path == "/pause_generation":
            model.pause(body.get("mode", "abort"))
            return {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            model.go_on()
            return {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/flush_cache":
            if not model.flush():
                raise Refused(400, "Flush cache failed.")
            return "Cache flushed.\n"
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            sleeps = path.startswith("/release")
            if "no_sleep" in model.faults:
                raise Refused(404, "Not Found")
            if sleeps == model.sleeps:
                os._exit(1)  # SGLang's scheduler dies of a KeyError
            model.sleeps = sleeps
            return ""
        if "no_routes" in model.faults:
            raise Refused(404, "Not Found")
        with self.update():
            return self.weights(path, body)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Paused, or alone."""
        if self.model.paused:
            yield
        else:
            with self.model.lock:
                yield

    def weights(self, path: str, body: dict[str, Any]) -> object:
        model = self.model
        done = {"success": True, "message": "Success"}
        if path == "/update_weights_from_disk":
            if not (files := sorted(glob.glob(f"{body['model_path']}/*.safetensors"))):
                raise Refused(400, "Failed to get weights iterator: no file found", success=False)
            weights = {name: value for file in files for name, value in load_file(file).items()}
            return {**model.updated(body, weights), "num_paused_requests": 0}
        if path == "/begin_weight_update":
            if model.session:
                raise Refused(400, "a weight-update session is already open", success=False)
            model.session = True
            return done
        if path == "/end_weight_update":
            if not model.session:
                raise Refused(400, "no weight-update session is open", success=False)
            model.session = False
            return done
        if path == "/update_weights_from_tensor":
            model.in_session("update_weights_from_tensor")
            (payload,) = body["serialized_named_tensors"]
            weights = dict(Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load())
            return model.updated(body, weights)
        if path == "/init_weights_update_group":
            model.join(body)
            return done
        if path == "/destroy_weights_update_group":
            torch.distributed.destroy_process_group(model.groups.pop(body["group_name"]))
            return done
        if path == "/update_weights_from_distributed":
            model.in_session("update_weights_from_distributed")
            return model.updated(body, model.received(body))
        raise Refused(404, "Not Found")


def serve(
    folder: str,
    port: int,
    faults: set[str],
    limit: int | None = None,
    load_format: str = "dummy",
    *,
    deterministic: bool = True,
    tells_experts: bool = False,
) -> ThreadingHTTPServer:
    model = SGLangModel(folder, faults, limit, load_format, deterministic=deterministic)
    model.tells_experts = tells_experts
    return listening(SGLangLanguage(model), port)


def main() -> None:
    texts = ("host", "model-path", "dtype", "load-format", "device")
    numbers = ("port", "context-length", "max-running-requests", "max-prefill-tokens", "chunked-prefill-size",
               "tp-size", "mem-fraction-static", "sampling-mask-max-tokens", "random-seed")  # fmt: skip
    flags = ("skip-tokenizer-init", "enable-deterministic-inference", "disable-cuda-graph", "disable-radix-cache",
             "enable-memory-saver", "enable-weights-cpu-backup", "enable-return-routed-experts")  # fmt: skip
    chosen = parser(texts, numbers, flags, says_no=False).parse_args()
    assert chosen.module == "sglang.launch_server"
    assert chosen.skip_tokenizer_init
    faults, deterministic = faults_of_environment(FAULTS), chosen.enable_deterministic_inference
    tells = chosen.enable_return_routed_experts
    serve(
        chosen.model_path,
        chosen.port,
        faults,
        chosen.context_length,
        chosen.load_format,
        deterministic=deterministic,
        tells_experts=tells,
    ).serve_forever()
