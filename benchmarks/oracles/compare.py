"""Two functions, many batches, the largest difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.oracles.cases import SEEDS, Case, make_case

Outputs = Mapping[str, Tensor]
ESTIMATOR_SCENARIOS = ("ragged", "tools", "lone", "empty", "equal", "poison")
LOSS_SCENARIOS = ("ragged", "tools", "empty", "far", "poison")


@dataclass(frozen=True)
class Check:
    """One function of tether against the same function of a peer."""

    function: str
    ours: Callable[[Case], Outputs]
    theirs: Callable[[Case], Outputs]
    scenarios: tuple[str, ...]
    differs: Mapping[str, str] = field(default_factory=dict)
    """Scenario -> why the results differ there, and who is right."""
    raises: Mapping[str, str] = field(default_factory=dict)
    """Scenario -> why the peer raises there instead."""
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Difference:
    """The result of a check in one scenario, the worst over all seeds and outputs."""

    function: str
    peer: str
    scenario: str
    absolute: float
    relative: float
    """`absolute` over the largest number in either result."""
    agrees: bool
    reason: str | None
    """The check's explanation of a difference or an error."""
    error: str | None
    """The exception that the peer raised."""

    @property
    def unexplained(self) -> bool:
        """A difference without a reason, or a reason without a difference."""
        return self.agrees != (self.reason is None)


def run_checks(peer: str, checks: Iterable[Check]) -> list[Difference]:
    """Run every check of a peer in each of its scenarios."""
    return [_run(peer, check, scenario) for check in checks for scenario in check.scenarios]


def _run(peer: str, check: Check, scenario: str) -> Difference:
    """Run a check in one scenario.

    Functions agree within 1e-6 of the largest number in float64, 2e-5 in float32: peers add constants such as 1e-8 to
    denominators, which is a difference that nobody has to explain.
    """
    absolute = relative = 0.0
    error = None
    for seed in SEEDS:
        case = make_case(scenario, seed).to(check.dtype)
        ours = check.ours(case)
        try:
            theirs = check.theirs(case)
        except (ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError, IndexError) as problem:
            error, absolute, relative = f"{type(problem).__name__}: {problem}", math.inf, math.inf
            break
        assert ours.keys() == theirs.keys(), f"{check.function}: {sorted(ours)} against {sorted(theirs)}"
        for name in ours:
            found = largest_difference(ours[name], theirs[name], case.mask)
            absolute, relative = max(absolute, found[0]), max(relative, found[1])
    double = check.dtype is torch.float64 and scenario != "equal"
    agrees = relative <= (1e-6 if double else 2e-5) or absolute <= (1e-12 if double else 1e-6)
    reason = (check.raises if error or scenario in check.raises else check.differs).get(scenario)
    return Difference(check.function, peer, scenario, absolute, relative, agrees, reason, error)


def largest_difference(ours: Tensor, theirs: Tensor, mask: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and the same over the largest number in either tensor.

    Tensors of the mask's shape are compared where the mask is true. A NaN or infinity that only one side has is an
    infinite difference.
    """
    ours, theirs = ours.detach().double(), theirs.detach().double()
    assert ours.shape == theirs.shape, f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if ours.shape == mask.shape:
        ours, theirs = ours[mask], theirs[mask]
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    distance = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=math.inf)
    if not distance.numel() or not (absolute := float(distance.max())):
        return 0.0, 0.0
    scale = float(torch.stack([ours, theirs]).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return absolute, absolute / scale if scale else math.inf
