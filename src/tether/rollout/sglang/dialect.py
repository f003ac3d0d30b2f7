"""SGLang's servers: the routes and payloads of version 0.5.23, read in its source (`sglang.srt.entrypoints`)."""

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

from tether.rollout.servers import (
    Connections,
    Draw,
    Launch,
    Outgoing,
    Policy,
    Sampled,
    ServerGone,
    ServerRefuses,
    check_formats,
    experts_missing,
)
from tether.rollout.sglang.weights import WAYS
from tether.types import JsonObject

KNOWN = ("0.5.23",)
"""Versions of SGLang whose source was read."""
_TELLING = "--enable-return-routed-experts"
_MEMORY = {"tags": ["weights", "kv_cache"]}

_log = logging.getLogger(__name__)


def launch_of(python: Path, log: Path, options: Mapping[str, object], environment: Mapping[str, str]) -> Launch:
    """A launch with what tether needs of every server: token ids, and seeds that act."""
    needed = {"skip_tokenizer_init": True, "enable_deterministic_inference": True}
    module, eager = "sglang.launch_server", "disable_cuda_graph"
    return Launch(python, module, {**needed, **options}, environment, log, says_no=False, eager=eager)


@dataclass(frozen=True)
class SGLang:
    """See `Dialect`.

    Its seeds act with ``--enable-deterministic-inference`` only. Its log-probs are those before top-k and top-p; what
    these left, and the log-probs after them, come with ``return_sampling_mask``.
    """

    policy: Policy
    """Its type is compared, as SGLang passes over weights that its own model has not."""
    way: str = "auto"
    """A name in `WAYS`: how weights travel."""
    experts: tuple[int, int] | None = None
    """Decoder layers of the policy, and experts of a token, where it has any."""
    tells_experts: bool = False
    """It is to tell the experts of each token."""

    name = "sglang"
    title = "SGLang"
    how = "docs/guides/servers.md shows how to start one"
    options = "--dtype, --enable-deterministic-inference, SGLANG_RETURN_ORIGINAL_LOGPROB=0"
    health_asleep = "/model_info"  # /health samples a token

    def look(self, http: Connections, within: float) -> None:
        """See `Dialect.look`."""
        server, model = http.get("/server_info", within), http.get("/model_info", within)
        if not (isinstance(server, dict) and isinstance(model, dict) and "version" in server):
            raise ValueError(f"{http.url}: tells neither its version nor its model. {self.how}")
        if server["version"] not in KNOWN:
            known = f"tether knows {' and '.join(KNOWN)}. scripts/sglang.sh installs one"
            raise ValueError(f"{http.url}: runs SGLang {server['version']}; {known}")
        if model.get("model_type") != self.policy.model_type:
            ours = f"actor_rollout_ref.model.path is a {self.policy.model_type}"
            raise ValueError(f"{http.url}: runs {model.get('model_path')}, a {model.get('model_type')}; {ours}")
        dtype, longest = server.get("dtype"), server.get("context_length")
        told = None if dtype == "auto" else dtype  # auto: that of the model's folder
        check_formats(http.url, self.policy, dtype=told, longest=longest, options=("--dtype", "--context-length"))
        if not server.get("enable_deterministic_inference"):
            what = "its seeds have no effect: rows that are drawn again, as after a resume, are others"
            _log.warning("%s: runs without --enable-deterministic-inference; %s", http.url, what)
        if self.tells_experts and not server.get("enable_return_routed_experts", True):
            raise experts_missing(http.url, _TELLING)
        http.post("/continue_generation", within=within)  # a run that was killed may have left it paused

    def sample(self, http: Connections, draw: Draw, within: float) -> Sampled:
        """See `Dialect.sample`."""
        sampling = draw.sampling
        params = {
            "max_new_tokens": draw.most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "sampling_seed": draw.seed,
            "stop_token_ids": draw.ends,
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        asked = {
            "input_ids": draw.prompt,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_sampling_mask": draw.records,
            "stream": False,
        } | ({"return_routed_experts": True} if sampling.record_experts else {})
        found = http.post("/generate", asked, within)
        try:
            sampled = _read(found["output_ids"], found["meta_info"], records=draw.records)
            if sampling.record_experts:
                sampled = sampled.with_experts(draw, self._experts(found["meta_info"]))
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise ServerGone(f"{http.url}: half an answer ({error}): {str(found)[:200]}") from None
        if sampling.record_experts and sampled.whole and sampled.experts is None:
            raise experts_missing(http.url, _TELLING)
        return sampled

    def _experts(self, meta: JsonObject) -> NDArray[np.int16] | None:
        """[tokens, layers, experts of a token], of all tokens but the last."""
        told = meta.get("routed_experts")
        if told is None or self.experts is None:
            return None
        return np.frombuffer(base64.b64decode(told), dtype="<i4").reshape(-1, *self.experts).astype(np.int16)

    def interrupt(self, http: Connections, within: float) -> None:
        """See `Dialect.interrupt`."""
        http.post("/abort_request", {"abort_all": True}, within)

    def weights(self, http: Connections, within: float) -> str | None:
        """See `Dialect.weights`."""
        found = http.get("/model_info", within)
        name = found.get("weight_version") if isinstance(found, dict) else None
        return name if isinstance(name, str) else None

    def give(self, http: Connections, name: str, weights: Outgoing, within: float) -> None:
        """See `Dialect.give`; what still runs there, of a run that was killed, is broken off first."""
        http.post("/pause_generation", {"mode": "abort"}, within)
        try:
            WAYS[self.way](http, name, weights, within)
        finally:
            with contextlib.suppress(ServerGone, ServerRefuses):  # what comes next finds out
                http.post("/continue_generation", within=within)

    def forget(self, http: Connections, within: float) -> None:
        """See `Dialect.forget`; an update has emptied the cache already, where nothing ran."""
        try:
            http.post(f"/flush_cache?timeout={min(within, 30.0):g}", within=within)
        except ServerRefuses as error:
            if error.status != 400:
                raise
            raise ServerGone(str(error)) from None

    def sign_of_life(self, http: Connections, within: float) -> float | None:
        """See `Dialect.sign_of_life`: the server itself knows whether anything has been computed since it was asked."""
        http.get("/health_generate", within)
        return time.monotonic()

    def sleep(self, http: Connections, within: float) -> None:
        """See `Dialect.sleep`; with ``--enable-weights-cpu-backup`` the weights come back as they were."""
        http.post("/release_memory_occupation", _MEMORY, within)

    def wake(self, http: Connections, within: float) -> None:
        """See `Dialect.wake`."""
        http.post("/resume_memory_occupation", _MEMORY, within)

    def cures(self) -> Mapping[str, Callable[[Connections, float], None]]:
        """See `Dialect.cures`."""
        return {"a prefix cache of older weights": self.forget}


def _read(tokens: list[int], meta: JsonObject, *, records: bool) -> Sampled:
    whole = meta["finish_reason"]["type"] != "abort"
    told = meta["output_token_logprobs"] if whole else meta.get("output_token_logprobs") or []
    if [token for _, token, *_ in told] != tokens or (whole and not tokens):
        raise ValueError("its log-probs are those of other tokens")
    log_probs, kept = [log_prob for log_prob, *_ in told], None
    if records:
        log_probs, kept = meta["output_token_sampling_logprobs"], meta["output_token_sampling_mask"]
        if not len(log_probs) == len(kept) == len(tokens):
            raise ValueError("tokens and masks are not as many")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    return Sampled(tokens, log_probs, kept, frozenset(span["version"] for span in spans), whole)
