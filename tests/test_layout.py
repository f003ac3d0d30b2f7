"""The layout of design: imports point downwards only, light packages stay light, files and functions stay small."""

import ast
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import pytest

from tether.integrations import INTEGRATIONS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/tether"
LEVELS = {
    "integrations": -2, "spelling": -2, "types": -2, "batch": -1, "observations": -1, "keyed_random": -1,
    "loss_requirements": -1, "runtime": -1, "metrics": 0, "config": 1, "algorithms": 1, "kernels": 1, "checkpoints": 2,
    "plan": 2, "loop": 3, "view": 3, "distributed": 4, "text": 5, "control": 5, "commands": 7, "__main__": 8,
}  # fmt: skip
INTEGRATION = 6
"""Level of each integration. The table of them, which loads one by its name, stands below all rooms."""
WITH_FACES = {"algorithms", "checkpoints", "config", "kernels", "metrics", "runtime"}
"""Rooms of the ground floor, from which others import what the faces export; elsewhere a module is named itself.
Integrations may reach behind a face: RLinf's files are read with the machinery of the configuration."""
FORBIDDEN = {"config": {"torch"}, "plan": {"torch"}, "algorithms": {"transformers", "ray", "omegaconf", "pydantic"},
             "view": {"torch", "transformers", "matplotlib"}}  # fmt: skip
LIGHT = (
    "tether.config.loading.load",
    "tether.commands.cli",
    "tether.commands.plan",
    "tether.view.server",
    "tether.view.export",
)
CONFIG_OF_A_ROOM = re.compile(r"^(text|control|loop)(\.\w+)*\.config(_\w+)?(\.|$)")
"""Sections and rules beside the code that reads them, ``config.py`` and ``config_*.py``. They stand at the level of
`tether.config`, which lists them, and load nothing of their room."""
FILES = sorted(PACKAGE.rglob("*.py"))


def test_a_script_beside_the_clone_or_in_it_imports_the_package(tmp_path: Path) -> None:
    """A folder `tether` that a script finds first, as a namespace without modules, would hide what is installed."""
    clone = tmp_path / "tether"  # what `git clone` names it
    clone.mkdir()
    for folder in (path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")):
        (clone / folder).symlink_to(ROOT / folder)
    for where in (tmp_path, clone):
        code = "import tether; print(tether.__version__)"
        done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_benchmark_without_the_packages_of_the_tests_ends_with_a_sentence(tmp_path: Path) -> None:
    """The quickstart installs no pytest."""
    hide = (
        "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'pytest' else f(n, *a)"
    )
    code = f"{hide}; import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmarks.chaos.soak"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "This needs the packages of the tests: pip install -e '.[test]' in the clone\n",
    )


def area(path: Path) -> str:
    """Return the room of a file; each integration is a room of its own."""
    return room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def room_of(name: str) -> str:
    """Return the room of a name such as ``text.build`` or ``integrations.verl.command.Command``."""
    first, *others = name.split(".")
    is_inside = first == "integrations" and others and others[0] in INTEGRATIONS
    return f"{first}.{others[0]}" if is_inside else first


def level_of(room: str) -> int:
    # The file that is imported as `tether` stands above all rooms.
    return INTEGRATION if "." in room else LEVELS.get(room, max(LEVELS.values()) + 1)


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """All statements inside of it, at any depth."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(block, name, ()):
            yield statement
            yield from statements(statement)


@dataclass(frozen=True)
class Contents:
    """What the tests here ask of a file, which is parsed once."""

    doc: str
    imports: set[str]
    functions: list[tuple[str, int]]
    exported: set[str]
    """The names in its `__all__`; empty without one."""


@cache
def read(path: Path) -> Contents:
    tree = ast.parse(path.read_text())
    contents = Contents(ast.get_docstring(tree) or "", set(), [], set())
    for node in statements(tree):
        if isinstance(node, ast.Import):
            contents.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it from tether on"
            contents.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            contents.functions.append((f"{path.name}:{node.name}", node.end_lineno - node.lineno + 1))
        elif isinstance(node, ast.Assign) and "__all__" in (t.id for t in node.targets if isinstance(t, ast.Name)):
            contents.exported.update(ast.literal_eval(node.value))
    return contents


def room_in_file(path: Path) -> str:
    """Return the room by whose laws a file imports: config for the configuration of another room."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return "config" if CONFIG_OF_A_ROOM.match(name) else area(path)


def is_listed_config(path: Path, name: str) -> bool:
    """Whether a file of the configuration or the plan, which reads all of it, imports that of a room; text and control
    do not see each other's."""
    target = name.removeprefix("tether.")
    if room_in_file(path) not in {"config", "plan"} or not CONFIG_OF_A_ROOM.match(target):
        return False
    return {area(path), room_of(target)} != {"text", "control"}


def wrong_imports(path: Path) -> set[str]:
    """Imports of a room that is not below the file's own, and of what its room must not load."""
    own = room_in_file(path)
    names = read(path).imports
    targets = {name: room_of(name.removeprefix("tether.")) for name in names if name.startswith("tether.")}
    known = {name: to for name, to in targets.items() if to in LEVELS or "." in to}
    upwards = {name for name, to in known.items() if to != own and level_of(to) >= level_of(own)}
    upwards = {name for name in upwards if not is_listed_config(path, name)}
    heavy = {name for name in names if name.split(".")[0] in FORBIDDEN.get(own, set())}
    return {f"{path.relative_to(ROOT)} must not import {name}" for name in upwards | heavy}


def test_imports_point_downwards() -> None:
    assert len(FILES) > 300
    assert sorted(set().union(*map(wrong_imports, FILES))) == []


def test_every_package_has_a_level() -> None:
    assert {area(path) for path in FILES} - {"__init__"} <= {
        *LEVELS,
        *(f"integrations.{name}" for name in INTEGRATIONS),
    }
    assert {path.name for path in (PACKAGE / "integrations").iterdir() if path.is_dir()} >= set(INTEGRATIONS)


def test_light_modules_load_no_torch() -> None:
    lines = [
        "import sys",
        *(f"import {module}; assert 'torch' not in sys.modules, '{module}'" for module in LIGHT),
        "assert 'transformers' not in sys.modules",
        "rooms = ('tether.text.', 'tether.control.', 'tether.loop.')",
        "loaded = [name for name in sys.modules if name.startswith(rooms)]",
        "code = [name for name in loaded if not hasattr(sys.modules[name], '__path__')]",
        "assert code and all('.config' in name for name in code), code",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_section_or_a_rule_may_be_imported_first() -> None:
    """They and the configuration, which lists them, need each other."""
    modules = [".".join(("tether", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES]
    firsts = [name for name in modules if CONFIG_OF_A_ROOM.match(name.removeprefix("tether."))]
    assert len(firsts) > 10
    lines = [
        "import importlib, sys",
        f"for first in {firsts}:",
        "    for name in [name for name in sys.modules if name.split('.')[0] == 'tether']:",
        "        del sys.modules[name]",
        "    importlib.import_module(first)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    exported = importlib.import_module("tether.config")._FOUND_IN
    hidden = {path.stem for path in (PACKAGE / "config").iterdir()} & set(exported)
    assert not hidden, "once its module is imported, the face gives the module in the place of the function"


FACES = {".".join(p.parent.relative_to(PACKAGE.parent).parts): p for p in FILES if p.name == "__init__.py"}


def steps_of(package: str, name: str) -> list[tuple[str, str]]:
    """The faces that an import goes through, with the name that it asks each for: (tether.a, b), (tether.a.b, c)."""
    parts = [*package.split("."), name]
    prefixes = [(".".join(parts[:i]), parts[i]) for i in range(1, len(parts))]
    return [(face, wanted) for face, wanted in prefixes if face in FACES and face != "tether"]


def imports_past_a_face(path: Path) -> set[str]:
    """Imports of another room, of what the faces on the way do not have in `__all__`."""
    return {
        f"{path.relative_to(ROOT)}: {name}"
        for name in read(path).imports
        if name.startswith("tether.")
        and name.split(".")[1] in WITH_FACES - {room_in_file(path)}
        and path.parent != PACKAGE
        if "." not in area(path)
        for face, wanted in steps_of(*name.rsplit(".", 1))
        if wanted not in read(FACES[face]).exported
    }


def faults_of_face(package: str) -> list[str]:
    face = read(FACES[package])
    module = importlib.import_module(package)
    missing = {name for name in face.exported if not hasattr(module, name) and not find_spec(f"{package}.{name}")}
    return [
        *([] if len(face.doc.split()) >= 8 else [f"{package}: what is it for?"]),
        *(
            [f"{package} has no __all__"]
            if package.split(".")[1:2] in [[room] for room in WITH_FACES] and not face.exported
            else []
        ),
        *([f"{package} exports {sorted(missing)}, which it does not have"] if missing else []),
    ]


def test_every_package_has_a_face() -> None:
    assert [fault for package in FACES for fault in faults_of_face(package)] == []


def test_other_rooms_import_through_the_face() -> None:
    assert sorted(set().union(*map(imports_past_a_face, FILES))) == []


def test_a_wrong_import_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"src/tether/{room}/new.py" for room in ("text", "loop", "config", "integrations/robots")]
    for file in files:
        file.parent.mkdir(parents=True)
    text, loop, config, robots = files
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "src/tether")
    text.write_text("from tether.algorithms.kl import k1\nfrom tether.algorithms import KL_ESTIMATORS\n")
    assert imports_past_a_face(text) == {"src/tether/text/new.py: tether.algorithms.kl.k1"}
    assert wrong_imports(text) == set()
    read.cache_clear()
    text.write_text("from tether.control import envs\nfrom tether.integrations import integration\n")
    assert wrong_imports(text) == {"src/tether/text/new.py must not import tether.control.envs"}
    read.cache_clear()
    text.write_text("from tether.integrations.robots.new import Arm\n")
    assert wrong_imports(text) == {"src/tether/text/new.py must not import tether.integrations.robots.new.Arm"}
    robots.write_text("from tether.text import build\nfrom tether.integrations.verl import command\n")
    wrong = "src/tether/integrations/robots/new.py must not import tether.integrations.verl.command"
    assert wrong_imports(robots) == {wrong}
    loop.write_text("from tether.text.models import load\nimport torch\n")
    assert wrong_imports(loop) == {"src/tether/loop/new.py must not import tether.text.models.load"}
    config.write_text(
        "import torch.nn\nfrom tether.runtime import guard\nfrom tether.text.data.config import DataConfig\n"
    )
    assert wrong_imports(config) == {"src/tether/config/new.py must not import torch.nn"}
    section = text.parent / "config.py"
    section.write_text("from tether.text.data import rows\nfrom tether.control.envs.config import EnvConfig\n")
    assert wrong_imports(section) == {
        "src/tether/text/config.py must not import tether.text.data.rows",
        "src/tether/text/config.py must not import tether.control.envs.config.EnvConfig",
    }


def names_in(text: str) -> set[str]:
    """What of tether a file imports or writes with its full name; faster than to parse it."""
    lists = re.findall(r"^ *from (tether[\w.]*) import (?:\(([^)]*)\)|(.*))", text, re.MULTILINE)
    listed = {
        f"{module}.{name}" for module, *names in lists for name in re.findall(r"(\w+)(?: as \w+)?", "".join(names))
    }
    return listed | set(re.findall(r"\btether\.[\w.]+", text))


def test_no_face_exports_what_nobody_imports() -> None:
    users = [*FILES, *(p for folder in ("tests", "benchmarks", "docs") for p in (ROOT / folder).rglob("*.py"))]
    asked = set().union(*(names_in(path.read_text()) for path in users))
    used = {prefix for name in asked for prefix in accumulate(name.split("."), "{}.{}".format)}
    others = set(FACES) - {"tether", "tether.algorithms"}  # these two are for other people's code, too
    assert sorted({f"{face}.{name}" for face in others for name in read(FACES[face]).exported} - used) == []


def test_no_function_is_long() -> None:
    """A file may be: it is one subject."""
    assert [size for path in FILES for size in read(path).functions if size[1] > 100] == []


def occurrences(name: str, code: str) -> int:
    """How often a name stands in code, imports included, comments and texts left out."""
    if name not in code:
        return 0
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return sum(token.type == tokenize.NAME and token.string == name for token in tokens)


def test_any_stands_at_the_edges_only() -> None:
    code = [path.read_text() for path in FILES]
    lines = sum(len(text.splitlines()) for text in code)
    assert sum(occurrences("Any", text) for text in code) <= 10 * lines / 1000, "say a type, or `object`"


def test_occurrences_are_of_code_alone() -> None:
    assert occurrences("Any", 'from typing import Any  # Any\nx: list[Any] = ["Any"]\ny: "Anything"\n') == 2
