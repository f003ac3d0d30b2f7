"""The common part of the stand-ins of inference servers: a tiny model that samples, faults on demand, and the process.

`vllm_stand_in` and `sglang_stand_in` speak the languages. Each is a process of its own where `environment` made it the
"python" of an environment, and takes the real server's command line; or a thread of the tests.
"""

import argparse
import copy
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.text.servers.forked import PROGRAM, address
from tether.integrations.megatron.layout import experts_of
from tether.text.models.expert_choice import ExpertChoice, follow_choice, recorded_choice
from tether.text.models.fused_experts import fused

Draw = Callable[[torch.Tensor, int], int]
ROOT = Path(__file__).resolve().parents[3]


class Refused(Exception):
    def __init__(self, status: int, message: str, **more: object) -> None:
        super().__init__(message)
        self.status, self.more = status, more


class Model:
    """The policy, its prefix cache, and the weights that are on their way."""

    def __init__(self, folder: str, faults: set[str], limit: int | None, load_format: str = "dummy") -> None:
        torch.manual_seed(12345)  # not those of the trainer
        config = AutoConfig.from_pretrained(folder)
        self.folder, self.faults = folder, faults
        if load_format == "dummy":
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        else:
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.version, self.tokens, self.sleeps = "default", 0, False
        self.limit = limit or config.max_position_embeddings
        self.cache: dict[tuple[int, ...], Any] = {}
        self.lock = threading.Lock()
        self.aborts = 0
        self.tells_experts = False
        self.dtype = "bfloat16" if "another_dtype" in faults else "float32"
        self.head: torch.Tensor | None = None
        if "stale_head" in faults:
            self.head = self.model.lm_head.weight.detach().clone()

    @torch.no_grad()
    def sample(
        self,
        ids: list[int],
        most: int,
        ends: set[int],
        draw: Callable[[torch.Tensor, int], int],
        on: Callable[[], bool],
    ) -> list[int]:
        """Up to `most` tokens, the last of them one of `ends`, while it is `on`; at least one, as no request waits for
        another in a server that batches them.

        Args:
            ids: the prompt.
            most: tokens at most.
            ends: tokens that end it.
            draw: (logits [V], position) -> token.
            on: False: break off.
        """
        if "dies_at_once" in self.faults or ("dies" in self.faults and self.tokens > 20):
            print("RuntimeError: out of blocks", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        past = self.cache.get(tuple(ids[:-1]))
        if past is None and len(ids) > 1:
            past = self.model.model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
            self.cache[tuple(ids[:-1])] = past
        past, last, tokens = copy.deepcopy(past), ids[-1], []
        while len(tokens) < most and (on() or not tokens):
            output = self.model.model(torch.tensor([[last]]), past_key_values=past, use_cache=True)
            past = output.past_key_values
            head = self.model.lm_head.weight if self.head is None else self.head
            last = draw(output.last_hidden_state[0, -1] @ head.T, len(ids) + len(tokens) - 1)
            tokens.append(last)
            self.tokens += 1
            if last in ends:
                break
        return tokens

    @torch.no_grad()
    def experts(self, ids: list[int]) -> np.ndarray:
        """[tokens, L, k] of all but the last."""
        follow_choice(self.model)
        choice = ExpertChoice(records=True)
        self.model.model(torch.tensor([ids[:-1]]), expert_choice=choice)
        return recorded_choice(self.model, choice).numpy()

    def abort(self) -> None:
        """Break off what is sampled, and what waits for that."""
        self.aborts += 1

    def tempered(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        if temperature > 0 and "deaf_to_temperature" not in self.faults:
            return logits / temperature
        return logits

    @property
    def names(self) -> set[str]:
        """Of the weights that have to come; a tied head is another name of one of them."""
        tied = {"lm_head.weight"} if self.model.config.tie_word_embeddings else set()
        return set(self.model.state_dict()) - tied

    def load(self, weights: dict[str, torch.Tensor], version: str) -> None:
        if experts := experts_of(self.model.config):
            weights = dict(fused(weights.items(), experts))
        if not ("lost_update" in self.faults and version.endswith("-2")):
            self.model.load_state_dict(weights, strict=False)


def cut(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The logits that top-k and top-p leave; -inf elsewhere."""
    if 0 < top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        probs, order = logits.softmax(-1).sort()
        logits = logits.index_fill(0, order[probs.cumsum(-1) <= 1 - top_p], -torch.inf)
    return logits


class Language(Protocol):
    """The routes of a kind of server; `get` and `post` raise `Refused`."""

    @property
    def model(self) -> Model: ...

    def get(self, path: str) -> object: ...

    def post(self, path: str, body: dict[str, Any]) -> object: ...

    def refusal(self, error: Refused) -> object:
        """The body of an answer that refuses."""


class Handler(BaseHTTPRequestHandler):
    """Answers in a language."""

    protocol_version = "HTTP/1.1"
    speaks: Language

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            half = "half_answers" in self.speaks.model.faults and "generate" in self.path and "health" not in self.path
            self.wfile.write(data[: len(data) // 2] if half else data)
            self.close_connection = half

    def _respond(self, what: Callable[[], object]) -> None:
        try:
            if "fails" in self.speaks.model.faults and "generate" in self.path:
                raise Refused(500, "Internal Server Error")
            self.answer(200, what())
        except Refused as error:
            self.answer(error.status, self.speaks.refusal(error))

    def do_GET(self) -> None:
        self._respond(lambda: self.speaks.get(urlsplit(self.path).path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self._respond(lambda: self.speaks.post(urlsplit(self.path).path, body))


class _Listening(ThreadingHTTPServer):
    request_queue_size = 1024  # a step asks for all of its rows at once


def listening(speaks: Language, port: int) -> ThreadingHTTPServer:
    """A server that answers in this language."""
    server = _Listening(("127.0.0.1", port), type("Bound", (Handler,), {"speaks": speaks}))
    server.daemon_threads = True
    return server


def environment(folder: Path, faults: str = "", kind: str = "vllm", *, is_fork: bool = True) -> Path:
    """Make an "environment" of that kind of server whose python runs its stand-in, and return the folder.

    Args:
        folder: of the environment.
        faults: of the stand-in, separated by commas.
        kind: of server.
        is_fork: the stand-in is forked (`tests.text.servers.forked`) and ends with this process; False: an interpreter
            of its own.
    """
    python, module = folder / "bin/python", f"tests.text.servers.{kind}_stand_in"
    python.parent.mkdir(parents=True, exist_ok=True)
    imported = f"import gc; gc.disable(); from {module} import main; gc.enable()"  # quicker so
    program = ["-I", "-S", "-c", PROGRAM, address(), module] if is_fork else ["-c", f"{imported}; main()"]
    python.write_text(
        '#!/bin/sh\n[ "$1" = -I ] && exit 0  # asked whether it has the package\n'
        f'cd {ROOT}\nexport STAND_IN_FAULTS="{faults}" PYTHONPATH={ROOT}/src:{ROOT} OMP_NUM_THREADS=1\n'
        f'exec {shlex.join([sys.executable, *program])} "$@"\n'
    )
    python.chmod(0o755)
    return folder


def faults_of_environment(known: tuple[str, ...]) -> set[str]:
    torch.set_num_threads(1)
    faults = set(filter(None, os.environ.get("STAND_IN_FAULTS", "").split(",")))
    assert faults <= set(known)
    return faults


def parser(texts: tuple[str, ...], numbers: tuple[str, ...], flags: tuple[str, ...], *, says_no: bool) -> Any:
    """Of a command line of a real server."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("-m", dest="module")
    for name in texts:
        made.add_argument(f"--{name}")
    for name in numbers:
        made.add_argument(f"--{name}", type=float if name.endswith(("utilization", "static")) else int)
    for name in flags:
        made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction if says_no else "store_true")
    return made
