"""Checks before the first step: whether there is enough memory, and whether the untrained policy's samples look right.

Most runs that would learn nothing can be recognised early: the chat template was not applied, all actions are clipped,
all rewards are the same. Each finding names its cause and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from tether.loop.engine import LOWER, AnyLearner
from tether.runtime.machine import available_memory

TRAINING_BYTES = 12
"""Bytes per trainable parameter: its gradient and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class Finding:
    """A problem of the run, certain or likely."""

    cause: str
    """A short name, for example ``all_truncated``."""
    message: str
    """The problem, with numbers, and the fix."""
    refuses: bool = False
    """Whether the run refuses to start because of it."""


class PreflightSample(Protocol):
    """A sample of the untrained policy's behaviour."""

    @property
    def findings(self) -> Sequence[Finding]:
        """Return the problems of the sample."""
        ...

    @property
    def step_rows(self) -> int | None:
        """The number of rows that a training step of PPO learns from; None for another loss, which clips no ratio."""
        ...

    def render(self) -> list[RenderableType]:
        """Return what is printed about the sample."""
        ...


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that a run allocates in its first step and does not free."""

    purpose: str
    device: torch.device
    bytes: int


@dataclass(frozen=True)
class Preflight:
    """The sample of the policy before training, and the findings."""

    sample: PreflightSample | None
    """The sample; None if there is not enough memory for a step, so that nothing was sampled."""
    findings: Sequence[Finding]

    @property
    def refused(self) -> bool:
        """Whether a finding prevents the run from starting."""
        return any(finding.refuses for finding in self.findings)

    def show(self, console: Console) -> None:
        """Print the sample and the findings on one screen."""
        renderables = self.sample.render() if self.sample else []
        renderables += [
            Text(f"{'refused' if f.refuses else 'warning'}: {f.message}", style="bold red" if f.refuses else "yellow")
            for f in self.findings
        ]
        if not self.findings:
            renderables.append(Text("nothing suspicious found", style="green"))
        console.print(Panel(Group(*renderables), title="preflight", title_align="left"))


def preflight(
    take_sample: Callable[[], PreflightSample], learners: Sequence[AnyLearner], needs: Iterable[MemoryNeed] = ()
) -> Preflight:
    """Check a run that has not begun.

    Args:
        take_sample: samples without changing the state of the run.
        learners: the learners, with the policy first.
        needs: memory in addition to that of the optimizers.
    """
    lacking = memory_findings([*needs, *(need for learner in learners for need in _optimizer_needs(learner))])
    if lacking:
        return Preflight(None, lacking)
    sample, plan = take_sample(), learners[0].plan
    updates = [] if sample.step_rows is None else update_findings(sample.step_rows, plan.mini_batch_rows, plan.epochs)
    return Preflight(sample, [*sample.findings, *updates])


def memory_findings(needs: Sequence[MemoryNeed]) -> list[Finding]:
    """Return a finding for each device without enough memory for the first step at any micro-batch size."""
    findings = []
    for device in dict.fromkeys(need.device for need in needs):
        device_needs, free = [need for need in needs if need.device == device], available_memory(device)
        total = sum(need.bytes for need in device_needs)
        if free is None or total <= free:
            continue
        listing = ", ".join(f"{need.purpose} {_size(need.bytes)}" for need in device_needs if need.bytes)
        message = (
            f"the first step needs {_size(total)} more on {device} ({listing}), where {_size(free)} are free. {LOWER}"
        )
        findings.append(Finding("out_of_memory", message, refuses=True))
    return findings


def _optimizer_needs(learner: AnyLearner) -> list[MemoryNeed]:
    trained = {id(weight): weight for _, weight in learner.engine.export().tensors if weight.requires_grad}
    counts: dict[torch.device, int] = {}
    for weight in trained.values():
        counts[weight.device] = counts.get(weight.device, 0) + weight.numel()
    purpose = "gradients and moments of a model"
    return [MemoryNeed(purpose, device, count * TRAINING_BYTES) for device, count in counts.items()]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def update_findings(rows: int, mini_batch_rows: int, epochs: int) -> list[Finding]:
    """Return a finding if each batch gets one update, where the ratio is always 1 and the clip has no effect."""
    if rows > mini_batch_rows or epochs > 1:
        return []
    return [
        Finding(
            "clipping_inactive",
            "one optimizer step per batch: the probability ratio is always 1, so PPO's clip has no effect and this is "
            "plain policy gradient. For PPO lower ppo_mini_batch_size or raise ppo_epochs.",
        )
    ]
