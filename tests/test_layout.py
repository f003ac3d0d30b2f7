"""The layout of design: imports point downwards only, light packages stay light, files and functions stay small."""

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tether"
LEVELS = {
    "batch": -1, "observations": -1, "keyed_random": -1, "loss_requirements": -1, "spelling": -2, "runtime": -1,
    "metrics": 0, "config": 1, "algorithms": 1, "kernels": 1, "models": 2, "data": 2,
    "envs": 2, "rewards": 1, "checkpoints": 2, "rollout": 3, "training": 3, "trainer": 5, "assembly": 6, "commands": 7,
}  # fmt: skip
FORBIDDEN = {"config": {"torch"}, "algorithms": {"transformers", "ray", "omegaconf", "pydantic"}}
FILES = sorted(PACKAGE.rglob("*.py"))


def area(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it from tether on"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    own = area(path)
    for name in imports(path):
        if name.startswith("tether.") and own in LEVELS:
            target = name.split(".")[1]
            if target in LEVELS and target != own:
                assert LEVELS[target] < LEVELS[own], f"{path.name} ({own}) imports {name}, which is not below it"
        assert name.split(".")[0] not in FORBIDDEN.get(own, set()), f"{own} must not import {name}"


def test_every_package_has_a_level() -> None:
    assert {area(path) for path in FILES} - {"__init__"} <= set(LEVELS)


@pytest.mark.parametrize("module", ["tether.config", "tether.commands.cli"])
def test_light_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def functions(path: Path) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(f"{path.name}:{n.name}", n.end_lineno - n.lineno + 1) for n in nodes if isinstance(n, kinds)]


def test_size_budgets() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not {p.name: n for p, n in lines.items() if n > 500}, "no file over 500 lines"
    assert statistics.median(lines.values()) <= 180
    sizes = [size for path in FILES for size in functions(path)]
    assert not [size for size in sizes if size[1] > 100], "no function over 100 lines"
    assert statistics.median(size for _, size in sizes) <= 12
