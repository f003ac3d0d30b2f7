"""The versions that are installed: pinned ones lie inside the bounds, and the lowest ones are the bounds themselves."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def lowest(extras: str) -> set[str]:
    command = [sys.executable, ROOT / "scripts" / "lowest_versions.py", extras]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_the_lowest_versions_are_the_bounds_of_the_extras_and_of_the_extras_that_they_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {r.name for text in project["dependencies"] if (r := Requirement(text)).specifier} - {"torch"}
    assert {line.split("==")[0] for line in lowest("dev")} == core
    assert "gymnasium==1.1" in lowest("box2d")
    assert lowest("mcp") < lowest("test")
    # the extra asks for more than tether does
    assert "pydantic==2.10.1" in lowest("lora")
    assert "pydantic==2.12" in lowest("test")


def test_pinned_versions_lie_inside_the_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    pinned = [
        Requirement(line.split("#")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    ]
    outside = [
        f"{pin} is not {requirement}"
        for pin in pinned
        for requirement in map(Requirement, texts)
        if pin.name == requirement.name and not requirement.specifier.contains(str(pin.specifier).removeprefix("=="))
    ]
    assert outside == ["mujoco==4.0.0 is not mujoco<4,>=3.3"]  # of robotics, which has an environment of its own
