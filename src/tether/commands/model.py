"""Commands for a single model: generate and export."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.commands.policy import load
from tether.control.build_policies import published_exporter, saved_policy
from tether.runtime.printable import printable
from tether.spelling import did_you_mean

EXPORTS = ("openvla", "npz", "onnx")
"""Formats of `export`."""


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    n: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop: Sequence[str],
    system: str | None,
    seed: int,
    num_threads: int | None,
    trust_remote_code: bool,
) -> None:
    """Print the replies of a model; the arguments are those of `Policy.generate` and `tether.commands.policy.load`.

    A prompt ``-`` is read from standard input, ``@FILE`` is replaced by the lines of a file, and a prompt that begins
    with ``@`` is written with ``@@``.

    Raises:
        ValueError: a prompt file is unreadable or empty, or an argument is invalid.
    """
    disable_progress_bar()
    prompts = [text for prompt in prompts for text in _read_prompts(prompt)]
    responses = load(model, num_threads=num_threads, trust_remote_code=trust_remote_code).generate(
        prompts,
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop,
        system=system,
        seed=seed,
    )
    for response in responses:
        if len(responses) > 1:
            print(printable(f"--- {prompts[response.prompt]}"))
        print(printable(response.text))


def _read_prompts(argument: str) -> list[str]:
    if argument == "-":
        text = sys.stdin.read().strip()
        if not text:
            raise ValueError("-: standard input is empty. Pipe a prompt into it")
        return [text]
    if not argument.startswith("@"):
        return [argument]
    if argument.startswith("@@"):
        return [argument[1:]]
    try:
        lines = Path(argument[1:]).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{argument}: the file of prompts cannot be read ({error}). A prompt that begins with @ is written "
            f"@{argument}"
        ) from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{argument}: the file has no prompts; write one per line")
    return prompts


def export(checkpoint: Path, kind: str, out: Path) -> None:
    """Write the policy of a checkpoint as a published OpenVLA policy, or as a file of npz or ONNX.

    Args:
        checkpoint: a ``global_step_N`` folder, or the folder of a run.
        kind: one of `EXPORTS`.
        out: the new folder or file.

    Raises:
        ValueError: the policy cannot be written in this format, or the folder or file already exists.
    """
    if kind not in EXPORTS:
        raise ValueError(f"--to={kind}: give one of {', '.join(EXPORTS)}.{did_you_mean(kind, EXPORTS)}")
    policy = saved_policy(checkpoint, "CHECKPOINT")
    write = published_exporter(policy, checkpoint) if kind == "openvla" else None
    if out.exists():
        raise ValueError(f"--out={out}: exists already. Name a new one.")
    if write is not None:
        write(out)
        return
    if not out.parent.is_dir():
        raise ValueError(f"--out={out}: there is no folder {out.parent}. Make it first.")
    importlib.import_module("tether.control.policies.export").export_policy(policy, kind, out)
