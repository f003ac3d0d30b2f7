"""Before the first step: is there memory for it, and what is wrong with what the untrained policy does?

Most runs that learn nothing can be told from one screen: a template that was not applied, actions that are all clipped,
rewards that are all the same. Each finding names its cause and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from tether.runtime.machine import available_memory
from tether.training import LOWER, AnyLearner

TRAINING_BYTES = 12
"""Of each number that trains: its gradient and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or likely to be."""

    cause: str
    """Short name, for example ``all_truncated``."""
    message: str
    """The fault, with numbers, and the fix."""
    refuses: bool = False
    """The run does not start with it."""


class Seen(Protocol):
    """A sample of what the untrained policy does."""

    @property
    def findings(self) -> Sequence[Finding]:
        """Its fault."""
        ...

    @property
    def step_rows(self) -> int:
        """Rows that a training step learns from."""
        ...

    def shown(self) -> list[RenderableType]:
        """The sample itself."""
        ...


@dataclass(frozen=True)
class Need:
    """Memory that a run has not taken yet, and keeps from its first step on."""

    what: str
    device: torch.device
    bytes: int


@dataclass(frozen=True)
class Preflight:
    """The samples of a preflight, and its findings."""

    seen: Seen | None
    """None: there is no memory for a step, and so none was tried."""
    findings: Sequence[Finding]

    @property
    def refused(self) -> bool:
        """A finding forbids the run."""
        return any(finding.refuses for finding in self.findings)

    def show(self, console: Console) -> None:
        """Print everything on one screen."""
        parts = self.seen.shown() if self.seen else []
        parts += [
            Text(f"{'refused' if f.refuses else 'warning'}: {f.message}", style="bold red" if f.refuses else "yellow")
            for f in self.findings
        ]
        if not self.findings:
            parts.append(Text("nothing suspicious found", style="green"))
        console.print(Panel(Group(*parts), title="preflight", title_align="left"))


def preflight(look: Callable[[], Seen], learners: Sequence[AnyLearner], needs: Iterable[Need] = ()) -> Preflight:
    """Judge a run that has not begun.

    Args:
        look: takes the sample, which changes nothing in the run.
        learners: the policy first.
        needs: memory beside that of the optimizers.
    """
    lack = memory_findings([*needs, *(need for learner in learners for need in _needs_of(learner))])
    if lack:
        return Preflight(None, lack)
    seen, plan = look(), learners[0].plan
    return Preflight(seen, [*seen.findings, *update_findings(seen.step_rows, plan.mini_batch_rows, plan.epochs)])


def memory_findings(needs: Sequence[Need]) -> list[Finding]:
    """Devices on which the first step cannot fit, however small its micro-batches."""
    found = []
    for device in dict.fromkeys(need.device for need in needs):
        here, free = [need for need in needs if need.device == device], available_memory(device)
        total = sum(need.bytes for need in here)
        if free is None or total <= free:
            continue
        parts = ", ".join(f"{need.what} {_size(need.bytes)}" for need in here if need.bytes)
        message = (
            f"the first step needs {_size(total)} more on {device} ({parts}), where {_size(free)} are free. {LOWER}"
        )
        found.append(Finding("out_of_memory", message, refuses=True))
    return found


def _needs_of(learner: AnyLearner) -> list[Need]:
    trained = {id(weight): weight for _, weight in learner.engine.export().tensors if weight.requires_grad}
    counts: dict[torch.device, int] = {}
    for weight in trained.values():
        counts[weight.device] = counts.get(weight.device, 0) + weight.numel()
    what = "gradients and moments of a model"
    return [Need(what, device, count * TRAINING_BYTES) for device, count in counts.items()]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def update_findings(rows: int, mini_batch_rows: int, epochs: int) -> list[Finding]:
    """One update a batch: the ratio is 1 and the clip never acts."""
    if rows > mini_batch_rows or epochs > 1:
        return []
    return [
        Finding(
            "clipping_inactive",
            "one optimizer step a batch: the probability ratio is always 1, so PPO's clip never acts. That is plain "
            "policy gradient; for PPO lower ppo_mini_batch_size or raise ppo_epochs.",
        )
    ]
