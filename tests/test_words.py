"""The words of the code are the field's: names say what they hold, and docstrings are sentences."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src/tether"
DONE = {
    "modules": ("batch.py", "keyed_random.py", "observations.py", "spelling.py", "types.py"),
    "config": (  # without the interpreter of bash
        *(f"config/{path.name}" for path in (PACKAGE / "config").iterdir() if path.name != "importers"),
        "config/importers/rlinf",
        "config/importers/verl/command.py",
    ),
    **{
        package: (package,)
        for package in (
            "algorithms",
            "assembly",
            "checkpoints",
            "commands",
            "data",
            "envs",
            "execution",
            "kernels",
            "metrics",
            "models",
            "rewards",
            "rollout",
            "runtime",
            "tools",
            "trainer",
            "training",
        )
    },
}
"""What has been rewritten; packages are added once they are, and never removed."""
VAGUE = {
    "found", "given", "told", "said", "asked", "whole", "rest", "most", "within", "apart", "beside", "places", "part",
    "parts", "piece", "pieces", "own", "left", "take", "taken", "tried", "known", "held", "kept", "here", "there",
}  # fmt: skip
FRAGMENT = re.compile(r"(Of|That|As|By|With|Where|In|Which|Whose|Those|Without|Beside|None:|See)\b")
MAX_VAGUE, MAX_FRAGMENTS = 5 / 1000, 1 / 100
"""Shares of the names that are bound, and of the docstrings."""


@dataclass
class Words:
    """Counts of a package, and the places that a reader stumbles over."""

    names: int = 0
    docstrings: int = 0
    vague: list[str] = field(default_factory=list)
    fragments: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


def files(package: str) -> list[Path]:
    paths = [PACKAGE / name for name in DONE[package]]
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def bound(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Variables and parameters, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Docstrings of functions, classes and fields, with their lines."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, after in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            first = before is None and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if first or isinstance(before, ast.AnnAssign):
                match after:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield after.lineno, text


def words_of(package: str) -> Words:
    words = Words()
    for path in files(package):
        tree, name = ast.parse(path.read_text()), path.relative_to(ROOT)
        for line, bound_name in bound(tree):
            words.names += 1
            if bound_name in VAGUE:
                words.vague.append(f"{name}:{line} {bound_name}")
        for line, text in docstrings(tree):
            words.docstrings += 1
            if text.startswith("See "):
                words.references.append(f"{name}:{line} {text[:60]}")
            elif FRAGMENT.match(text):
                words.fragments.append(f"{name}:{line} {text[:60]}")
    return words


@pytest.mark.parametrize("package", DONE)
def test_names_say_what_they_hold(package: str) -> None:
    words = words_of(package)
    assert len(words.vague) <= MAX_VAGUE * words.names, "\n".join(words.vague)


@pytest.mark.parametrize("package", DONE)
def test_docstrings_are_sentences(package: str) -> None:
    words = words_of(package)
    assert not words.references, "\n".join(words.references)
    assert len(words.fragments) <= MAX_FRAGMENTS * words.docstrings, "\n".join(words.fragments)


def test_a_class_name_has_one_meaning() -> None:
    where: dict[str, list[str]] = {}
    for path in (path for package in DONE for path in files(package)):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: lines for name, lines in where.items() if len(lines) > 1}
