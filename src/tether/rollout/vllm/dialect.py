"""vLLM's servers: version 0.32, with the routes for training and the scale-out route for token ids."""

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
    is_here,
    shared_file,
)
from tether.rollout.vllm.weights import WAYS
from tether.types import JsonObject

INSIDE = Path(__file__).parents[1] / "inside"
"""Folder of the module that a server's workers import."""
SERVED = "policy"
"""Name of the model in requests."""
ADAPTED = "policy-with-adapters"
"""Its name there with adapters."""
KNOWN = ("0.32.",)
"""Versions of vLLM that this was run with."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that a server can be started for."""
_TELLING = "--enable-return-routed-experts"
_CUT_OFF = -9000.0  # vLLM writes -9999 for the log-prob of a token that could not be drawn


def launch_of(python: Path, log: Path, options: Mapping[str, object], environment: Mapping[str, str]) -> Launch:
    """A launch with what tether needs of every server: its routes, its log-probs and the weights' way in."""
    needed = {
        "served_model_name": SERVED,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "worker_extension_cls": "tether_in_vllm.Extension",
        "weight_transfer_config": '{"backend":"tether"}',
    }
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "PYTHONPATH": str(INSIDE)}  # fmt: skip
    module = "vllm.entrypoints.openai.api_server"
    return Launch(
        python, module, {**needed, **options}, {**ours, **environment}, log, says_no=True, eager="enforce_eager"
    )


@dataclass(frozen=True)
class Adapters:
    """LoRA that a server computes: ``W x + (alpha / rank) B A x``."""

    rank: int
    alpha: int

    def options(self) -> dict[str, object]:
        """Of a server that takes them."""
        most = next(rank for rank in RANKS if rank >= self.rank)
        return {"enable_lora": True, "max_lora_rank": most, "max_loras": 1}


@dataclass(frozen=True)
class Vllm:
    """See `Dialect`."""

    policy: Policy
    adapters: Adapters | None = None
    """Of the policy, where they travel as such."""
    tells_experts: bool = False
    """It is to tell the experts of each token."""
    way: str = "auto"
    """A name in `WAYS`: how weights travel."""

    name = "vllm"
    title = "vLLM"
    how = "docs/guides/servers.md shows how to start one"
    options = "--dtype, --logprobs-mode processed_logprobs, --generation-config vllm"
    health_asleep = "/health"

    def look(self, http: Connections, within: float) -> None:
        """See `Dialect.look`."""
        found = http.get("/version", within)
        version = str(found.get("version") if isinstance(found, dict) else found)
        models = http.get("/v1/models", within)
        if not version.startswith(KNOWN):
            known = " and ".join(f"{v}x" for v in KNOWN)
            raise ValueError(f"{http.url}: runs vLLM {version}; tether knows {known}. scripts/vllm.sh installs one")
        served = [model["id"] for model in models["data"]]
        if SERVED not in served:
            what = f"serves {', '.join(served)}, not {SERVED} (--served-model-name)"
            raise ValueError(f"{http.url}: {what}; {self.how}")
        about = http.post("/collective_rpc", {"method": "about", "args": [[*self.policy.sizes]]}, within)["results"][0]
        told = {**about, **about.get("sizes", {})}
        policy = {"model_type": self.policy.model_type, "vocabulary": self.policy.vocabulary, **self.policy.sizes}
        for what, ours in policy.items():
            if told.get(what, ours) != ours:
                theirs = f"{models['data'][0]['root']}, of {what} {told[what]}"
                path = "--model PATH with the path of the policy"
                raise ValueError(
                    f"{http.url}: runs {theirs}; actor_rollout_ref.model.path has {what} {ours}. Start it with {path}, "
                    "or take its address out of actor_rollout_ref.rollout.server_urls"
                )
        longest = models["data"][0].get("max_model_len")
        flags = ("--dtype", "--max-model-len")
        check_formats(http.url, self.policy, dtype=about.get("dtype"), longest=longest, options=flags)
        if self.adapters and about["rank"] < self.adapters.rank:
            theirs = f"takes adapters of rank {about['rank']} at most; actor_rollout_ref.model.lora_rank is"
            how = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank"
            raise ValueError(
                f"{http.url}: {theirs} {self.adapters.rank}. Start it with {how}, or set "
                "actor_rollout_ref.model.lora.merge=True, which sends whole weights"
            )
        if self.adapters and self.way == "auto" and not is_here(http):
            key = "actor_rollout_ref.rollout.weight_transfer"
            raise ValueError(
                f"{http.url}: is another machine's, and adapters travel in files of this one. Set {key}=distributed, "
                "which sends whole weights with the adapters added in"
            )
        if self.tells_experts and not about.get("experts", True):
            raise experts_missing(http.url, _TELLING)
        with contextlib.suppress(ServerRefuses):  # one without the route is named when it gets weights
            if http.get("/is_sleeping", within)["is_sleeping"]:  # as a run that was killed left it
                http.post("/wake_up", within=within)

    def sample(self, http: Connections, draw: Draw, within: float) -> Sampled:
        """See `Dialect.sample`."""
        sampling = draw.sampling
        params = {
            "max_tokens": draw.most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": draw.seed,
            "logprobs": sampling.top_k if draw.records else 0,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": draw.ends,
            "detokenize": False,
        }
        asked = {"model": ADAPTED if self.adapters else SERVED, "token_ids": draw.prompt, "sampling_params": params}
        found = http.post("/inference/v1/generate", asked, within)
        try:
            sampled = _read(found["choices"][0], records=draw.records)
            if sampling.record_experts:
                sampled = sampled.with_experts(draw, _experts(found["choices"][0]))
        except (TypeError, KeyError, IndexError, ValueError):
            raise ServerGone(f"{http.url}: half an answer: {str(found)[:200]}") from None
        if sampling.record_experts and sampled.whole and sampled.experts is None:
            raise experts_missing(http.url, _TELLING)
        return sampled

    def interrupt(self, http: Connections, within: float) -> None:
        """See `Dialect.interrupt`."""
        http.post("/abort_requests", within=within)

    def weights(self, http: Connections, within: float) -> str | None:
        """See `Dialect.weights`."""
        found = http.get("/weight_info", within)
        name = found.get("weight_version") if isinstance(found, dict) else None
        return name if isinstance(name, str) else None

    def give(self, http: Connections, name: str, weights: Outgoing, within: float) -> None:
        """See `Dialect.give`; an update that a run left open, which was killed in it, is given up first."""
        with contextlib.suppress(ServerGone, ServerRefuses):  # a server of somebody else may not know how
            http.post("/collective_rpc", {"method": "give_up_update"}, within)
        http.post("/start_weight_update", within=within)
        WAYS[self.way](http, name, weights, within)
        http.post("/finish_weight_update", {"weight_version": name}, within)

    def adapt(self, http: Connections, name: str, adapters: dict[str, Tensor], within: float) -> None:
        """See `TakesAdapters.adapt`. What vLLM loads in place of another it would read again for every token."""
        assert self.adapters
        layers = sorted({tensor.split(".")[-3] for tensor in adapters})
        config = {"peft_type": "LORA", "r": self.adapters.rank, "lora_alpha": self.adapters.alpha,
                  "target_modules": layers, "bias": "none"}  # fmt: skip
        with shared_file(adapters) as file, tempfile.TemporaryDirectory(prefix="tether-adapters-") as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            Path(folder, "adapter_model.safetensors").symlink_to(file)
            with contextlib.suppress(ServerRefuses):  # there are none yet
                http.post("/v1/unload_lora_adapter", {"lora_name": ADAPTED}, within)
            http.post("/v1/load_lora_adapter", {"lora_name": ADAPTED, "lora_path": folder}, within)
        http.post("/update_weight_version", {"new_version": name}, within)

    def forget(self, http: Connections, within: float) -> None:
        """See `Dialect.forget`; an update leaves the cache as it is."""
        done = http.post("/reset_prefix_cache", within=within)
        if isinstance(done, dict) and done.get("success") is False:
            raise ServerGone(f"{http.url}/reset_prefix_cache: requests still run on it")

    def sign_of_life(self, http: Connections, within: float) -> float | None:
        """See `Dialect.sign_of_life`: the tokens that it has sampled so far."""
        lines = str(http.get("/metrics", within)).splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:generation_tokens_total")]
        return sum(map(float, counts)) if counts else None

    def sleep(self, http: Connections, within: float) -> None:
        """See `Dialect.sleep`."""
        http.post("/sleep?level=1", within=within)

    def wake(self, http: Connections, within: float) -> None:
        """See `Dialect.wake`."""
        http.post("/wake_up", within=within)

    def cures(self) -> Mapping[str, Callable[[Connections, float], None]]:
        """See `Dialect.cures`."""
        return {
            "a prefix cache of older weights": self.forget,
            "an output head that keeps its first weights": self._pack_head,
        }

    def _pack_head(self, http: Connections, within: float) -> None:
        with contextlib.suppress(ServerGone, ServerRefuses):  # a server of somebody else may not know how
            http.post("/collective_rpc", {"method": "pack_head"}, within)
        self.forget(http, within)


def _experts(choice: JsonObject) -> NDArray[np.int16] | None:
    """[tokens, layers, experts of a token], of all tokens but the last."""
    told = choice.get("routed_experts")
    if told is None:
        return None
    found: NDArray[np.int16] = np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False).astype(np.int16)
    return found


def _read(choice: JsonObject, *, records: bool) -> Sampled:
    tokens, content = choice["token_ids"], choice["logprobs"]["content"]
    whole = choice["finish_reason"] != "abort"
    if len(content) != len(tokens) or (whole and not tokens):
        raise ValueError("tokens and log-probs are not as many")
    kept = None
    if records:
        kept = [[t["token_id"] for t in token["top_logprobs"] if t["logprob"] > _CUT_OFF] for token in content]
    weights = frozenset(span["version"] for span in choice.get("weight_versions") or ())
    return Sampled(tokens, [token["logprob"] for token in content], kept, weights, whole)
