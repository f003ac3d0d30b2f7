"""One vLLM server: started here, or by somebody else; what is asked of it beside samples."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from tether.rollout.vllm.http import Connections, ServerGone, ServerRefuses
from tether.runtime.interrupt import give_up_if_interrupted
from tether.runtime.program import start_program
from tether.runtime.supervised import SupervisedProcess
from tether.types import JsonObject

INSIDE = Path(__file__).parent / "inside"
"""Folder of the module that a server's workers import."""
SERVED = "policy"
"""Name of the model in requests."""
KNOWN = ("0.32.",)
"""Versions of vLLM that this was run with."""
_HOW = "docs/vllm.md shows how to start one"


@dataclass(frozen=True)
class Launch:
    """Settings of a server of our own."""

    python: Path
    """Interpreter of vLLM's environment."""
    options: Mapping[str, object]
    """Of the server: name without dashes -> value; True is a flag, False its negation, None leaves it out."""
    environment: Mapping[str, str]
    log: Path

    def command(self, port: int) -> list[str]:
        """The command line."""
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                words.append(f"--{flag}={value}")
        return words


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
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(INSIDE)}
    return Launch(python, {**needed, **options}, {**ours, **environment}, log)


@dataclass(eq=False)
class Server:
    """One server, and which weights it has."""

    where: Launch | str
    """Its settings, or the address of one that somebody else started."""
    timeout: float
    """Seconds in which it must have started, and must have taken weights."""
    patience: float = math.inf
    """Seconds in which it must sample at least one token; at most the timeout."""
    weights: str | None = None
    """Name of the weights that it has; None: not ours."""
    http: Connections = field(init=False)
    _process: SupervisedProcess | None = field(default=None, init=False)
    _was_up: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.patience = min(self.patience, self.timeout)
        self.http = Connections(self.where if isinstance(self.where, str) else "http://127.0.0.1:0")

    @property
    def url(self) -> str:
        """Its address."""
        return self.http.url

    def begin(self) -> None:
        """Start it where it is ours and does not run; it is not ready yet."""
        if isinstance(self.where, Launch) and self._process is None:
            port = _free_port()
            self.http, self.weights, self._was_up = Connections(f"http://127.0.0.1:{port}"), None, False
            self._process = start_program(self.where.command(port), self.where.log, self.where.environment)

    def ready(self) -> None:
        """Wait until it answers, and see that it is a server that can be used.

        Raises:
            ServerGone: it was up, and is not any more; or a signal ended it while it started.
            ValueError: it does not come up, or is of another kind or version.
        """
        self.begin()
        begun = time.monotonic()
        while not self.answers():
            if self._was_up:
                raise ServerGone(f"{self.url}: the server does not answer any more")
            if self._process is not None and self._process.has_ended():
                how = self._process.close()
                self._process = None
                kind = ServerGone if how.startswith("was killed") else ValueError  # what kills may leave the next alone
                raise kind(f"the vLLM server {how} while it started. {self._last_words()}")
            if time.monotonic() - begun > self.timeout:
                self.stop()
                key = f"actor_rollout_ref.rollout.server_timeout={self.timeout:g}"
                raise ValueError(f"{self.url}: no vLLM server answers within {key} seconds. {self._last_words()}")
            give_up_if_interrupted(begun, "the vLLM server did not start")
            time.sleep(0.1)
        if not self._was_up:
            self._look()
        self._was_up = True

    def answers(self) -> bool:
        """Whether it says that it is well."""
        try:
            self.http.get("/health", within=min(10.0, self.timeout))
        except (ServerGone, ServerRefuses):
            return False
        return True

    def _look(self) -> None:
        try:
            found = self.http.get("/version", within=self.timeout)
            version = str(found.get("version") if isinstance(found, dict) else found)
            models = self.http.get("/v1/models", within=self.timeout)
        except (ServerGone, ServerRefuses) as error:
            raise ValueError(f"{error}. This is no vLLM server that tether can use; {_HOW}") from None
        if not version.startswith(KNOWN):
            known = " and ".join(f"{v}x" for v in KNOWN)
            raise ValueError(f"{self.url}: runs vLLM {version}; tether knows {known}. scripts/vllm.sh installs one")
        served = [model["id"] for model in models["data"]]
        if SERVED not in served:
            raise ValueError(f"{self.url}: serves {', '.join(served)}, not {SERVED} (--served-model-name); {_HOW}")
        with contextlib.suppress(ServerRefuses):  # one without the route is named when it gets weights
            if self.http.get("/is_sleeping", within=self.timeout)["is_sleeping"]:  # as a run that was killed left it
                self.http.post("/wake_up", within=self.timeout)

    def has(self, weights: str) -> bool:
        """Whether it still has these weights: a server that was started again has not."""
        if self.weights != weights:
            return False
        try:
            return bool(self.http.get("/weight_info", within=min(30.0, self.timeout))["weight_version"] == weights)
        except (ServerGone, ServerRefuses, TypeError, KeyError):
            return False

    def take(self, weights: str, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, bucket: int) -> int:
        """Give it new weights, and let it forget what it computed with the old ones.

        Args:
            weights: name of the weights.
            tensors: as `WeightUpdate.tensors`.
            dtype: that it computes in.
            bucket: bytes that travel at a time.

        Returns:
            The bytes that travelled.

        Raises:
            ServerGone: it died meanwhile.
            ValueError: it does not take them.
        """
        self.weights, moved = None, 0
        try:
            self.http.post("/start_weight_update", within=self.timeout)
            for part in _buckets(tensors, dtype, bucket):
                moved += sum(value.nbytes for value in part.values())
                with _shared_file(part) as path:
                    self.http.post("/update_weights", {"update_info": {"path": path}}, self.timeout)
            self.http.post("/finish_weight_update", {"weight_version": weights}, self.timeout)
            self.forget()
        except ServerRefuses as error:
            missing = "it has no such route" if error.status in (404, 405) else "it refuses them"
            raise ValueError(f"{error}. The server takes no weights: {missing}; {_HOW}") from None
        except ServerGone as error:
            if not self.answers() or "HTTP 5" not in str(error):
                raise
            raise ValueError(
                f"{error}. The server did not take the weights. It must run the model of actor_rollout_ref.model.path "
                f"and see this machine's memory; {_HOW}"
            ) from None
        self.weights = weights
        return moved

    def forget(self) -> None:
        """Empty its prefix cache, which an update leaves as it is.

        Raises:
            ServerGone: it does not, as requests still run.
        """
        done = self.http.post("/reset_prefix_cache", within=self.timeout)
        if isinstance(done, dict) and done.get("success") is False:
            raise ServerGone(f"{self.url}/reset_prefix_cache: requests still run on it")

    def tokens_sampled(self) -> float | None:
        """Tokens that it has sampled so far; None where it does not say."""
        try:
            text = self.http.get("/metrics", within=min(10.0, self.timeout))
        except (ServerGone, ServerRefuses):
            return None
        lines = str(text).splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:generation_tokens_total")]
        return sum(map(float, counts)) if counts else None

    def restart(self) -> None:
        """End it and start it again, where it is ours; else only break off what waits for it."""
        self.stop()
        self.begin()

    def stop(self) -> None:
        """End it where it is ours, and break off what waits for it."""
        self.http.cut()
        self.weights, self._was_up = None, False
        if self._process is not None:
            self._process.close()
            self._process = None

    def _last_words(self) -> str:
        if isinstance(self.where, str):
            return "Start it, or take its address out of actor_rollout_ref.rollout.server_urls"
        try:
            lines = self.where.log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        telling = [line[:300] for line in lines if line.strip()][-12:]
        return "\n".join([f"{self.where.log} ends with:", *telling])


class _shared_file:
    """A safetensors file in memory that other processes of this user can read; nothing is left of it afterwards."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> str:
        self._descriptor = os.memfd_create("tether-weights")
        with open(self._descriptor, "wb", closefd=False) as file:
            file.write(save(self._tensors))
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _buckets(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in this format, at most `limit` bytes at a time or one that is larger."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, value in tensors:
        moved = value.detach().to("cpu", dtype if value.is_floating_point() else None).contiguous()
        if part and size + moved.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = moved
        size += moved.nbytes
    if part:
        yield part


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def answer_of(server: Server, request: JsonObject, within: float) -> JsonObject:
    """The only choice of a generate request.

    Raises:
        ServerGone: no answer, or half of one.
        ServerRefuses: the request is refused.
    """
    found = server.http.post("/inference/v1/generate", request, within)
    try:
        choice = found["choices"][0]
        content = choice["logprobs"]["content"]
        whole = len(content) == len(choice["token_ids"]) > 0
    except (TypeError, KeyError, IndexError):
        whole = False
    if not whole:
        raise ServerGone(f"{server.url}: half an answer: {str(found)[:200]}")
    answer: JsonObject = choice
    return answer
