"""SGLang's servers: routes and payloads of version 0.5.23, according to its source (`sglang.srt.entrypoints`);
untested."""

from __future__ import annotations

import base64
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tether.integrations.sglang.weights import TRANSFERS
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
)
from tether.types import JsonObject

SUPPORTED_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose source this client is written against."""
_EXPERTS_FLAG = "--enable-return-routed-experts"
_MEMORY = {"tags": ["weights", "kv_cache"]}

_log = logging.getLogger(__name__)


def launch_of(python: Path, log: Path, options: Mapping[str, object], environment: Mapping[str, str]) -> Launch:
    """Return a launch with the options that tether requires: token ids instead of text, and effective seeds."""
    required = {"skip_tokenizer_init": True, "enable_deterministic_inference": True}
    module, eager = "sglang.launch_server", "disable_cuda_graph"
    return Launch(python, module, {**required, **options}, environment, log, has_negative_flags=False, eager=eager)


@dataclass(frozen=True)
class SGLang:
    """The API of SGLang's servers.

    Seeds are effective only with ``--enable-deterministic-inference``. Log-probs are before top-k and top-p; with
    ``return_sampling_mask``, the server also returns the candidate tokens, and log-probs after top-k and top-p.
    """

    policy: ServedPolicy
    """The policy; its model type is checked, because SGLang ignores weights that its model lacks."""
    transfer: str = "auto"
    """How weights are sent, a name in `TRANSFERS`."""
    experts: tuple[int, int] | None = None
    """Number of decoder layers of the policy, and of experts per token, if it has any."""
    returns_experts: bool = False
    """Whether the server must return the experts of each token."""

    name = "sglang"
    title = "SGLang"
    how = "Start one by: tether serve sglang --model-path MODEL"
    options = "--dtype, --enable-deterministic-inference, SGLANG_RETURN_ORIGINAL_LOGPROB=0"
    health_asleep = "/model_info"  # /health samples a token

    def check(self, http: Connections, timeout: float) -> None:
        server, model = http.get("/server_info", timeout), http.get("/model_info", timeout)
        if not (isinstance(server, dict) and isinstance(model, dict) and "version" in server):
            raise ValueError(f"{http.url}: reports neither its version nor its model. {self.how}")
        if server["version"] not in SUPPORTED_VERSIONS:
            supported = f"tether supports {' and '.join(SUPPORTED_VERSIONS)}. tether setup sglang installs one"
            raise ValueError(f"{http.url}: runs SGLang {server['version']}; {supported}")
        if model.get("model_type") != self.policy.model_type:
            ours = f"actor_rollout_ref.model.path is a {self.policy.model_type}"
            raise ValueError(f"{http.url}: runs {model.get('model_path')}, a {model.get('model_type')}; {ours}")
        dtype, max_length = server.get("dtype"), server.get("context_length")
        known_dtype = None if dtype == "auto" else dtype  # auto: the dtype in the model's folder
        options = ("--dtype", "--context-length")
        check_formats(http.url, self.policy, dtype=known_dtype, max_length=max_length, options=options)
        if not server.get("enable_deterministic_inference"):
            what = "its seeds have no effect: rows that are sampled again, for example after a resume, will differ"
            _log.warning("%s: runs without --enable-deterministic-inference; %s", http.url, what)
        if self.returns_experts and not server.get("enable_return_routed_experts", True):
            raise experts_missing(http.url, _EXPERTS_FLAG)
        http.post("/continue_generation", timeout=timeout)  # a killed run may have left the server paused

    def generate(self, http: Connections, request: GenerateRequest, timeout: float) -> SampledRow:
        sampling = request.sampling
        params = {
            "max_new_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "sampling_seed": request.seed,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        body = {
            "input_ids": request.prompt_ids,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_sampling_mask": request.return_kept_tokens,
            "stream": False,
        } | ({"return_routed_experts": True} if sampling.record_experts else {})
        response = http.post("/generate", body, timeout)
        try:
            sampled = _read(response["output_ids"], response["meta_info"], with_kept_tokens=request.return_kept_tokens)
            if sampling.record_experts:
                sampled = sampled.with_experts(request, self._experts(response["meta_info"]))
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise ServerGone(f"{http.url}: incomplete response ({error}): {str(response)[:200]}") from None
        if sampling.record_experts and sampled.is_complete and sampled.experts is None:
            raise experts_missing(http.url, _EXPERTS_FLAG)
        return sampled

    def _experts(self, meta: JsonObject) -> NDArray[np.int16] | None:
        """Return [tokens, layers, experts per token], for all tokens except the last."""
        encoded = meta.get("routed_experts")
        if encoded is None or self.experts is None:
            return None
        return np.frombuffer(base64.b64decode(encoded), dtype="<i4").reshape(-1, *self.experts).astype(np.int16)

    def abort(self, http: Connections, timeout: float) -> None:
        http.post("/abort_request", {"abort_all": True}, timeout)

    def weights_name(self, http: Connections, timeout: float) -> str | None:
        info = http.get("/model_info", timeout)
        name = info.get("weight_version") if isinstance(info, dict) else None
        return name if isinstance(name, str) else None

    def load_weights(self, http: Connections, name: str, weights: WeightPayload, timeout: float) -> None:
        http.post("/pause_generation", {"mode": "abort"}, timeout)
        try:
            TRANSFERS[self.transfer](http, name, weights, timeout)
        finally:
            with contextlib.suppress(ServerGone, ServerRefuses):  # the next request reports it
                http.post("/continue_generation", timeout=timeout)

    def reset_prefix_cache(self, http: Connections, timeout: float) -> None:
        try:
            http.post(f"/flush_cache?timeout={min(timeout, 30.0):g}", timeout=timeout)
        except ServerRefuses as error:
            if error.status != 400:
                raise
            raise ServerGone(str(error)) from None

    def progress_counter(self, http: Connections, timeout: float) -> float | None:
        http.get("/health_generate", timeout)
        return time.monotonic()

    def sleep(self, http: Connections, timeout: float) -> None:
        http.post("/release_memory_occupation", _MEMORY, timeout)

    def wake(self, http: Connections, timeout: float) -> None:
        http.post("/resume_memory_occupation", _MEMORY, timeout)

    def recovery_actions(self) -> Mapping[str, Callable[[Connections, float], None]]:
        return {"a prefix cache of older weights": self.reset_prefix_cache}


def _read(tokens: list[int], meta: JsonObject, *, with_kept_tokens: bool) -> SampledRow:
    is_complete = meta["finish_reason"]["type"] != "abort"
    entries = meta["output_token_logprobs"] if is_complete else meta.get("output_token_logprobs") or []
    if [token for _, token, *_ in entries] != tokens or (is_complete and not tokens):
        raise ValueError("its log-probs belong to other tokens")
    log_probs, kept_tokens = [log_prob for log_prob, *_ in entries], None
    if with_kept_tokens:
        log_probs, kept_tokens = meta["output_token_sampling_logprobs"], meta["output_token_sampling_mask"]
        if not len(log_probs) == len(kept_tokens) == len(tokens):
            raise ValueError("the numbers of tokens and masks differ")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    return SampledRow(tokens, log_probs, kept_tokens, frozenset(span["version"] for span in spans), is_complete)
