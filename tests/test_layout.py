"""The layout of design: imports point downwards only, light packages stay light, files and functions stay small."""

import ast
import importlib
import io
import re
import statistics
import subprocess
import sys
import tokenize
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tether"
LEVELS = {
    "batch": -1, "observations": -1, "keyed_random": -1, "loss_requirements": -1, "spelling": -2, "types": -2,
    "runtime": -1, "metrics": 0, "config": 1, "algorithms": 1, "kernels": 1, "models": 2, "data": 2,
    "envs": 2, "rewards": 1, "tools": 1, "checkpoints": 2, "rollout": 3, "training": 3, "execution": 4,
    "trainer": 5, "assembly": 6, "commands": 7,
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


def test_a_control_run_loads_no_transformers(tmp_path: Path) -> None:
    """Which takes a second to import."""
    pytest.importorskip("gymnasium")
    code = f"""
import sys, tether
run = tether.train(None, ["env.train.id=CartPole-v1", "trainer.total_training_steps=1", "trainer.test_freq=1",
    "trainer.save_freq=1", "trainer.logger=[]", "trainer.default_local_dir={tmp_path}"])
tether.load(run.folder).predict([0.0, 0.0, 0.0, 0.0])
sys.exit("transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def functions(path: Path) -> list[tuple[str, int]]:
    nodes = ast.walk(ast.parse(path.read_text()))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(f"{path.name}:{n.name}", n.end_lineno - n.lineno + 1) for n in nodes if isinstance(n, kinds)]


FACES = {".".join(p.parent.relative_to(ROOT).parts): p for p in FILES if p.name == "__init__.py"}


def exported(face: Path) -> set[str]:
    """The names in its `__all__`; empty without one."""
    for node in ast.parse(face.read_text()).body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


def steps_of(package: str, name: str) -> list[tuple[str, str]]:
    """The faces that an import goes through, with the name that it asks each for: (tether.a, b), (tether.a.b, c)."""
    parts = [*package.split("."), name]
    prefixes = [(".".join(parts[:i]), parts[i]) for i in range(1, len(parts))]
    return [(face, wanted) for face, wanted in prefixes if face in FACES and face != "tether"]


def imports_past_a_face(path: Path) -> set[str]:
    """Imports of another room, of what the faces on the way do not have in `__all__`."""
    return {
        f"{path.relative_to(ROOT)}: {name}"
        for name in imports(path)
        if name.startswith("tether.") and name.split(".")[1] != area(path) and path.parent != PACKAGE
        for face, wanted in steps_of(*name.rsplit(".", 1))
        if wanted not in exported(FACES[face])
    }


@pytest.mark.parametrize("package", FACES)
def test_every_package_has_a_face(package: str) -> None:
    face = FACES[package]
    assert len((ast.get_docstring(ast.parse(face.read_text())) or "").split()) >= 8, f"{package}: what is it for?"
    assert exported(face), f"{package} has no __all__"
    module = importlib.import_module(package)
    missing = {name for name in exported(face) if not hasattr(module, name) and not find_spec(f"{package}.{name}")}
    assert not missing, f"{package} exports what it does not have"


def test_other_rooms_import_through_the_face() -> None:
    assert not {found for path in FILES for found in imports_past_a_face(path)}


def test_an_import_past_a_face_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = tmp_path / "tether" / "trainer"
    room.mkdir(parents=True)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "tether")
    (room / "new.py").write_text("from tether.rewards.pool import Slot\nfrom tether.rewards import Score\n")
    assert imports_past_a_face(room / "new.py") == {"tether/trainer/new.py: tether.rewards.pool.Slot"}


def test_no_face_exports_what_nobody_imports() -> None:
    users = [*FILES, *(p for folder in ("tests", "benchmarks", "docs") for p in (ROOT / folder).rglob("*.py"))]
    asked = {"tether." + name for path in users for name in re.findall(r"\btether\.([\w.]+)", path.read_text())}
    asked |= {name for path in users for name in imports(path)}
    for package in set(FACES) - {"tether", "tether.algorithms"}:  # these two are for other people's code, too
        for name in exported(FACES[package]):
            assert any(f"{a}.".startswith(f"{package}.{name}.") for a in asked), f"{package}.{name} is imported nowhere"


def test_size_budgets() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not {p.name: n for p, n in lines.items() if n > 500}, "no file over 500 lines"
    assert statistics.median(lines.values()) <= 180
    sizes = [size for path in FILES for size in functions(path)]
    assert not [size for size in sizes if size[1] > 100], "no function over 100 lines"
    assert statistics.median(size for _, size in sizes) <= 12


def occurrences(name: str, code: str) -> int:
    """How often a name stands in code, imports included, comments and texts left out."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(token.type == tokenize.NAME and token.string == name for token in tokens)


def test_any_stands_at_the_edges_only() -> None:
    code = [path.read_text() for path in FILES]
    lines = sum(len(text.splitlines()) for text in code)
    assert sum(occurrences("Any", text) for text in code) <= 10 * lines / 1000, "say a type, or `object`"


def test_occurrences_are_of_code_alone() -> None:
    assert occurrences("Any", 'from typing import Any  # Any\nx: list[Any] = ["Any"]\ny: "Anything"\n') == 2
