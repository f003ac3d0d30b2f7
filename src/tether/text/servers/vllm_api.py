"""The API of vLLM 0.32, with its routes for training and its scale-out route for token ids."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tether.text.servers import (
    Connections,
    GenerateRequest,
    Launch,
    SampledRow,
    ServedPolicy,
    ServerGone,
    ServerRefuses,
    WeightPayload,
    check_formats,
    experts_missing,
    is_local,
    shared_file,
)
from tether.text.servers.vllm_weights import TRANSFERS
from tether.types import JsonObject

INSIDE = Path(__file__).parent / "inside"
"""Folder of the module that a server's workers import."""
SERVED = "policy"
"""Name of the model in requests."""
ADAPTED = "policy-with-adapters"
"""Name of the model with adapters in requests."""
SUPPORTED_VERSIONS = ("0.32.",)
"""Tested versions of vLLM."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks of adapters that a server can be started with."""
_EXPERTS_FLAG = "--enable-return-routed-experts"
_CUT_OFF = -9000.0  # vLLM writes -9999 for the log-prob of a token that could not be sampled


def launch_of(python: Path, log: Path, options: Mapping[str, object], environment: Mapping[str, str]) -> Launch:
    """Return a launch with the options that tether needs for every server: routes, log-probs and weight transfer."""
    required = {
        "served_model_name": SERVED,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "worker_extension_cls": "tether_in_vllm.Extension",
        "weight_transfer_config": '{"backend":"tether"}',
    }
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "PYTHONPATH": str(INSIDE)}  # fmt: skip
    module = "vllm.entrypoints.openai.api_server"
    return Launch(
        python,
        module,
        {**required, **options},
        {**variables, **environment},
        log,
        has_negative_flags=True,
        eager="enforce_eager",
        socket_folder="VLLM_RPC_BASE_PATH",
    )


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters that a server applies: ``W x + (alpha / rank) B A x``."""

    rank: int
    alpha: int

    def options(self) -> dict[str, object]:
        """Return the options of a server that supports the adapters."""
        max_rank = next(rank for rank in RANKS if rank >= self.rank)
        return {"enable_lora": True, "max_lora_rank": max_rank, "max_loras": 1}


@dataclass(frozen=True)
class Vllm:
    """The API of vLLM's servers."""

    policy: ServedPolicy
    adapters: Adapters | None = None
    """The policy's adapters, if they are sent separately."""
    returns_experts: bool = False
    """Whether the server has to return the experts of each token."""
    transfer: str = "auto"
    """The method of sending weights, a name in `TRANSFERS`."""

    name = "vllm"
    title = "vLLM"
    how = "Start one by: tether serve vllm --model MODEL"
    options = "--dtype, --logprobs-mode processed_logprobs, --generation-config vllm"
    health_asleep = "/health"

    def check(self, http: Connections, timeout: float) -> None:
        info = http.get("/version", timeout)
        version = str(info.get("version") if isinstance(info, dict) else info)
        models = http.get("/v1/models", timeout)
        if not version.startswith(SUPPORTED_VERSIONS):
            supported = " and ".join(f"{v}x" for v in SUPPORTED_VERSIONS)
            raise ValueError(
                f"{http.url}: runs vLLM {version}; tether supports {supported}. tether setup vllm installs one"
            )
        served = [model["id"] for model in models["data"]]
        if SERVED not in served:
            what = f"serves {', '.join(served)}, not {SERVED} (--served-model-name)"
            raise ValueError(f"{http.url}: {what}. {self.how}")
        model_info = http.post("/collective_rpc", {"method": "about", "args": [[*self.policy.sizes]]}, timeout)[
            "results"
        ][0]
        reported = {**model_info, **model_info.get("sizes", {})}
        policy = {"model_type": self.policy.model_type, "vocabulary": self.policy.vocabulary, **self.policy.sizes}
        for what, ours in policy.items():
            if reported.get(what, ours) != ours:
                theirs = f"{models['data'][0]['root']}, of {what} {reported[what]}"
                path = "--model PATH with the path of the policy"
                raise ValueError(
                    f"{http.url}: runs {theirs}; actor_rollout_ref.model.path has {what} {ours}. Start it with {path}, "
                    "or remove its address from actor_rollout_ref.rollout.server_urls"
                )
        max_length = models["data"][0].get("max_model_len")
        flags = ("--dtype", "--max-model-len")
        check_formats(http.url, self.policy, dtype=model_info.get("dtype"), max_length=max_length, options=flags)
        if self.adapters and model_info["rank"] < self.adapters.rank:
            theirs = f"supports adapters of rank {model_info['rank']} at most; actor_rollout_ref.model.lora_rank is"
            how = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank"
            raise ValueError(
                f"{http.url}: {theirs} {self.adapters.rank}. Start it with {how}, or set "
                "actor_rollout_ref.model.lora.merge=True, which sends merged weights"
            )
        if self.adapters and self.transfer == "auto" and not is_local(http):
            key = "actor_rollout_ref.rollout.weight_transfer"
            raise ValueError(
                f"{http.url}: is on another machine, and adapters are sent in files of this one. "
                f"Set {key}=distributed, which sends weights with the adapters merged"
            )
        if self.returns_experts and not model_info.get("experts", True):
            raise experts_missing(http.url, _EXPERTS_FLAG)
        with contextlib.suppress(ServerRefuses):  # a server without the route is reported when it gets weights
            if http.get("/is_sleeping", timeout)["is_sleeping"]:  # a killed run may have left it asleep
                http.post("/wake_up", timeout=timeout)

    def generate(self, http: Connections, request: GenerateRequest, timeout: float) -> SampledRow:
        sampling = request.sampling
        params = {
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "logprobs": sampling.top_k if request.return_kept_tokens else 0,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": request.stop_token_ids,
            "detokenize": False,
        }
        model = ADAPTED if self.adapters else SERVED
        body = {"model": model, "token_ids": request.prompt_ids, "sampling_params": params}
        response = http.post("/inference/v1/generate", body, timeout)
        try:
            sampled = _read(response["choices"][0], with_kept_tokens=request.return_kept_tokens)
            if sampling.record_experts:
                sampled = sampled.with_experts(request, _experts(response["choices"][0]))
        except (TypeError, KeyError, IndexError, ValueError):
            raise ServerGone(f"{http.url}: incomplete response: {str(response)[:200]}") from None
        if sampling.record_experts and sampled.is_complete and sampled.experts is None:
            raise experts_missing(http.url, _EXPERTS_FLAG)
        return sampled

    def abort(self, http: Connections, timeout: float) -> None:
        http.post("/abort_requests", timeout=timeout)

    def weights_name(self, http: Connections, timeout: float) -> str | None:
        info = http.get("/weight_info", timeout)
        name = info.get("weight_version") if isinstance(info, dict) else None
        return name if isinstance(name, str) else None

    def load_weights(self, http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
        # Abandon an update that a killed run left open.
        with contextlib.suppress(ServerGone, ServerRefuses):  # an external server may not have the method
            http.post("/collective_rpc", {"method": "give_up_update"}, timeout)
        http.post("/start_weight_update", timeout=timeout)
        TRANSFERS[self.transfer](http, name, weights, timeout)
        http.post("/finish_weight_update", {"weight_version": name}, timeout)

    def load_adapters(self, http: Connections, name: str, adapters: dict[str, Tensor], timeout: float) -> None:
        # Unload before loading: adapters that vLLM loads in place of others would be read again for every token.
        assert self.adapters
        layers = sorted({tensor.split(".")[-3] for tensor in adapters})
        config = {"peft_type": "LORA", "r": self.adapters.rank, "lora_alpha": self.adapters.alpha,
                  "target_modules": layers, "bias": "none"}  # fmt: skip
        with shared_file(adapters) as file, tempfile.TemporaryDirectory(prefix="tether-adapters-") as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            Path(folder, "adapter_model.safetensors").symlink_to(file)
            with contextlib.suppress(ServerRefuses):  # no adapters are loaded yet
                http.post("/v1/unload_lora_adapter", {"lora_name": ADAPTED}, timeout)
            http.post("/v1/load_lora_adapter", {"lora_name": ADAPTED, "lora_path": folder}, timeout)
        http.post("/update_weight_version", {"new_version": name}, timeout)

    def reset_prefix_cache(self, http: Connections, timeout: float) -> None:
        # An update does not reset the cache by itself.
        done = http.post("/reset_prefix_cache", timeout=timeout)
        if isinstance(done, dict) and done.get("success") is False:
            raise ServerGone(f"{http.url}/reset_prefix_cache: requests are still running")

    def progress_counter(self, http: Connections, timeout: float) -> float | None:
        # The counter is the number of tokens sampled so far.
        lines = str(http.get("/metrics", timeout)).splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:generation_tokens_total")]
        return sum(map(float, counts)) if counts else None

    def sleep(self, http: Connections, timeout: float) -> None:
        http.post("/sleep?level=1", timeout=timeout)

    def wake(self, http: Connections, timeout: float) -> None:
        http.post("/wake_up", timeout=timeout)

    def recovery_actions(self) -> Mapping[str, Callable[[Connections, float], None]]:
        return {
            "a prefix cache of older weights": self.reset_prefix_cache,
            "an output head that keeps its first weights": self._pack_head,
        }

    def _pack_head(self, http: Connections, timeout: float) -> None:
        with contextlib.suppress(ServerGone, ServerRefuses):  # an external server may not have the method
            http.post("/collective_rpc", {"method": "pack_head"}, timeout)
        self.reset_prefix_cache(http, timeout)


def _experts(choice: JsonObject) -> NDArray[np.int16] | None:
    """Return [tokens, layers, experts per token], for all tokens except the last."""
    encoded = choice.get("routed_experts")
    if encoded is None:
        return None
    experts: NDArray[np.int16] = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.int16)
    return experts


def _read(choice: JsonObject, *, with_kept_tokens: bool) -> SampledRow:
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    is_complete = choice["finish_reason"] != "abort"
    if len(content) != len(tokens) or (is_complete and not tokens):
        raise ValueError("the numbers of tokens and log-probs differ")
    kept_tokens = None
    if with_kept_tokens:
        kept_tokens = [[t["token_id"] for t in token["top_logprobs"] if t["logprob"] > _CUT_OFF] for token in content]
    weight_names = frozenset(span["version"] for span in choice.get("weight_versions") or ())
    log_probs = [token["logprob"] for token in content]
    return SampledRow(tokens, log_probs, kept_tokens, weight_names, is_complete)
