"""Commands for a model alone: generate, pull, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tether.assembly.policies import published_of, saved_policy
from tether.commands.policy import load
from tether.runtime.printable import printable


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    n: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    system: str | None,
    seed: int,
    num_threads: int | None,
) -> None:
    """Print the replies of a model; `tether.commands.policy` describes the arguments."""
    disable_progress_bar()
    responses = load(model, num_threads=num_threads).generate(
        prompts, n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, system=system, seed=seed
    )
    for response in responses:
        if len(responses) > 1:
            print(printable(f"--- {prompts[response.prompt]}"))
        print(printable(response.text))


def export(checkpoint: Path, out: Path) -> None:
    """Write the policy of a checkpoint as a published OpenVLA policy.

    Raises:
        ValueError: it is another policy, the folder that it began as is gone, or the new folder exists.
    """
    write = published_of(saved_policy(checkpoint, "CHECKPOINT"), checkpoint)
    if out.exists():
        raise ValueError(f"--out={out}: exists already. Name a new folder.")
    write(out)
