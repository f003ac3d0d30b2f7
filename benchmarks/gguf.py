"""Are the weights of a GGUF file those that llama.cpp reads? Greedy tokens and log-probs of both, on the same file.

    python -m benchmarks.gguf --folder /tmp/gguf
    python -m benchmarks.gguf --folder /tmp/gguf --write docs/guides/models.md

The prompts are signatures and docstrings of functions of Python's standard library, which the model continues.
llama.cpp (the package xllamacpp, in an environment of its own in the folder) chooses its tokens greedily; tether's
model, in float32, then reads the same tokens. llama.cpp multiplies in the numbers of the file and rounds activations to
8 bits, so that log-probs differ a little, and where two tokens are about as likely the other one may be chosen.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.oracles.environment import ROOT, last_line, make
from benchmarks.resumable import write_between
from benchmarks.speed.table import grid

BEGIN, END = "<!-- gguf:begin -->", "<!-- gguf:end -->"
MODULES = ("statistics", "textwrap", "bisect", "shlex", "fractions", "calendar", "random", "colorsys", "difflib",
           "functools", "heapq", "inspect", "ipaddress", "json", "operator", "os", "pathlib", "shutil", "string",
           "tempfile", "tokenize", "urllib.parse", "uuid", "zipfile")  # fmt: skip
TIE = 0.1
"""Nats between the two likeliest tokens, below which either may be chosen."""


@dataclass(frozen=True)
class Compared:
    """A prompt that both have continued."""

    agrees: bool
    """Whether tether chooses the same tokens up to the first tie."""
    differences: list[float]
    """|difference| of the log-probs of each token, in nats."""


def signatures(count: int) -> list[str]:
    """Return the beginnings of functions: signature and docstring."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        for key, function in sorted(vars(module).items()):
            if inspect.isfunction(function) and function.__module__ == name and not key.startswith("_"):
                doc = (inspect.getdoc(function) or "").split("\n\n")[0].strip()
                if doc:
                    found.append(f'def {key}{inspect.signature(function)}:\n    """{doc}"""\n')
    if len(found) < count:
        raise SystemExit(f"--prompts {count}: the standard library has {len(found)}")
    return [found[index * len(found) // count] for index in range(count)]


def theirs(python: Path, file: Path, prompts: list[list[int]], tokens: int) -> list[list[dict[str, Any]]]:
    """Return the tokens that llama.cpp chooses, each with its log-prob, for each prompt."""
    request = json.dumps({"file": str(file), "prompts": prompts, "tokens": tokens})
    command = [str(python), "-m", "benchmarks.gguf", "--worker"]
    paths = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, cwd=ROOT, input=request, env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(last_line(done.stderr))
    answers: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def worker() -> None:
    """Continue prompts with llama.cpp; runs in its environment."""
    import xllamacpp

    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = request["file"]
    params.n_ctx, params.n_parallel, params.warmup = 2048, 1, False
    server = xllamacpp.Server(params)
    options = {"n_predict": request["tokens"], "temperature": 0.0, "n_probs": 2, "cache_prompt": False}
    answers = []
    for prompt in request["prompts"]:
        answer = server.handle_completions({"prompt": prompt, **options})
        tokens = answer["choices"][0]["logprobs"]["content"]
        answers.append([{"id": token["id"], "logprob": token["logprob"]} for token in tokens])
    print(json.dumps(answers))


def compare(model: Any, prompt: list[int], chosen: list[dict[str, Any]]) -> Compared:
    """Let tether's model read what llama.cpp chose."""
    import torch

    ids = torch.tensor([[*prompt, *(one["id"] for one in chosen)]])
    with torch.no_grad():
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
    log_probs = logits.float().log_softmax(-1)
    best, agrees = log_probs.topk(2), True
    for at, one in enumerate(chosen):
        if best.indices[at, 0] != one["id"]:
            agrees = float(best.values[at, 0] - best.values[at, 1]) < TIE
            break
    ours = [float(log_probs[at, one["id"]]) for at, one in enumerate(chosen)]
    return Compared(agrees, [abs(a - one["logprob"]) for a, one in zip(ours, chosen, strict=True)])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="a known model that is a GGUF file")
    kept = "for the file and the environment of llama.cpp, which stay"
    parser.add_argument("--folder", type=Path, default=Path("/tmp/gguf"), help=kept)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a continuation")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    import torch

    from tether.integrations.hubs.registry_download import gguf_file
    from tether.runtime.cache import cache_dir
    from tether.text.models.load import load_causal_lm, load_tokenizer
    from tether.text.models.model_path import KNOWN_MODELS, resolve_model_path

    options.folder.mkdir(parents=True, exist_ok=True)
    file = gguf_file(options.model, KNOWN_MODELS[options.model], options.folder, print)
    python = make(options.folder / "venv")
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "xllamacpp"]
    subprocess.run(install, check=True)
    folder = resolve_model_path(options.model, cache_dir())
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer(text)["input_ids"] for text in signatures(options.prompts)]
    print(f"llama.cpp continues {len(prompts)} prompts ...", flush=True)
    chosen = theirs(python, file, prompts, options.tokens)
    model = load_causal_lm(folder, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    compared = [compare(model, prompt, one) for prompt, one in zip(prompts, chosen, strict=True)]
    differences = sorted(difference for one in compared for difference in one.differences)
    count = len(differences)
    lines = grid(
        ("model", "prompts", "the same tokens up to a tie", "log-prob of a token: mean difference", "99 % below"),
        [
            (
                options.model,
                str(len(compared)),
                str(sum(one.agrees for one in compared)),
                f"{math.fsum(differences) / count:.3f} nats",
                f"{differences[int(0.99 * count)]:.3f} nats",
            )
        ],
    )
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_between(options.write, BEGIN, END, text)


if __name__ == "__main__":
    main()
