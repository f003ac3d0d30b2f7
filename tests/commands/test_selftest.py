"""`tether selftest`: checks hold here, fail where something is broken, and never end in a traceback."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tether.commands.cli import app
from tether.commands.selftest import command, engines, kernels, runs, speed
from tether.commands.selftest.checks import CHECKS
from tether.commands.selftest.results import Check, CheckContext, CheckOutcome
from tether.kernels import Reference
from tether.loop.engine import LossSizes, LossTerm
from tether.text.learning.losses import PolicyForward, PolicyLoss

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.fixture
def context(tmp_path: Path) -> CheckContext:
    return CheckContext(torch.device("cpu"), tmp_path, quick=True)


class WrongNorm(Reference):
    """Forgets epsilon's place: two percent too large."""

    def rms_norm_forward(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        out, scale = super().rms_norm_forward(x, weight, eps, offset)
        return out * 1.05, scale


class ByMicroBatch(PolicyLoss):
    """Divides by the tokens of a micro-batch."""

    def __call__(self, outputs: Any, batch: Any, sizes: LossSizes) -> LossTerm:
        return super().__call__(outputs, batch, LossSizes(int(batch.response_mask.sum()), 1))


def test_checks_of_an_update_hold_and_fail_where_it_is_broken(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check, what breaks it, and what its line then says."""

    def forward(**options: Any) -> PolicyForward:
        return PolicyForward(1.0 if options.get("packed", True) else 0.7, **options)

    cases = [
        (kernels.kernels_agree, kernels, "backend", lambda device, dtype: WrongNorm(), "RMS norm is off by 0.05"),
        (engines.first_ratio, engines, "PolicyForward", forward, "ratios from"),
        (engines.memory_settings, engines, "PolicyLoss", ByMicroBatch, "micro-batches"),
        (engines.out_of_memory, engines, "PolicyLoss", ByMicroBatch, "gradients differ by"),
        (kernels.model_agrees, kernels, "PolicyForward", lambda: PolicyForward(0.9), "differ from transformers'"),
    ]
    for check, module, name, broken, line in cases:
        assert check(context).status == "pass", check(context)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            outcome = check(context)
        assert (outcome.status, line in outcome.detail) == ("fail", True), outcome


@pytest.mark.slow
def test_a_resume_that_differs_is_found(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    assert runs.control_ppo(context).status == "pass"
    train = runs.run_tiny

    def otherwise(context: CheckContext, name: str, overrides: list[str]) -> Any:
        more = [f"{runs.ACTOR}.entropy_coeff=0.5"] if name.endswith("resumed") else []
        return train(context, name, [*overrides, *more])

    monkeypatch.setattr(runs, "run_tiny", otherwise)
    outcome = runs.control_ppo(replace(context, folder=context.folder / "otherwise"))
    assert outcome.status == "fail"
    assert "the resumed run differs from the uninterrupted one in step 2" in outcome.detail


def test_whatever_a_check_raises_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> Callable[[CheckContext], CheckOutcome]:
        def run(context: CheckContext) -> CheckOutcome:
            raise error

        return run

    cuda = RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")
    checks = [
        Check("broken CUDA", raising(cuda), "Install a torch for this GPU"),
        Check("no memory", raising(MemoryError()), "Take a larger machine"),
        Check("long", raising(AssertionError("never run by --quick")), "-", quick=False),
    ]
    report = tmp_path / "report.txt"
    assert not command.selftest(quick=True, report=report, as_json=False, checks=checks)
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("FAIL  broken CUDA")
        and line.endswith("no kernel image is available Fix: Install a torch for this GPU.")
        for line in lines
    ), lines
    assert sum(line.startswith("FAIL") for line in lines) == 2
    assert not any("Traceback" in line for line in lines)
    written = report.read_text()
    assert written.startswith("tether: ")
    assert "Traceback" in written  # which an issue needs
    with pytest.raises(ValueError, match=r"report\.txt: cannot be written \(.*\)\. Name another file with --report"):
        command.selftest(quick=True, report=report / "report.txt", as_json=False, checks=[])


def test_a_device_that_does_not_compute_is_named_and_the_cpu_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a package that is missing is named with its command."""
    monkeypatch.setattr(command, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    checks = [check for check in CHECKS if check.name.startswith(("control", "several ranks"))]
    assert command.selftest(quick=False, report=None, as_json=True, checks=checks)
    printed = json.loads(capsys.readouterr().out)
    assert "cuda does not compute, so the CPU is checked" in printed["facts"]["GPUs"]
    assert [finding["status"] for finding in printed["findings"]] == ["not applicable"] * 3
    assert "pip install" in printed["findings"][0]["detail"]


def test_a_slow_speed_is_a_failure_only_where_no_other_program_had_the_cores(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_measured_limits", lambda context: (1e9, 1e9))
    found = {}
    for plain, waited in ((0.1, 0.0), (0.1, 0.4), (2.0, 0.4), (0.1, None)):
        monkeypatch.setattr(speed, "_fastest", lambda context, *calls, plain=plain: [1.0, plain])
        monkeypatch.setattr(speed.CoreClock, "wait_fraction", lambda self, waited=waited: waited)
        outcome = speed._compared(context, abs, abs, 100, lambda rate, bandwidth: 0.5)
        found[plain, waited] = outcome.status
    assert found == {(0.1, 0.0): "fail", (0.1, 0.4): "not applicable", (2.0, 0.4): "pass", (0.1, None): "fail"}


@pytest.mark.slow
def test_the_quick_selftest_passes_here(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    result = CliRunner().invoke(app, ["selftest", "--quick", "--report", str(report)])
    assert result.exit_code == 0, result.output
    expected = sum(check.quick for check in CHECKS)
    assert sum(line.startswith(("pass", "n/a")) for line in report.read_text().splitlines()) == expected
