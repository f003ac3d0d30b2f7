"""Prints a constraints file of the lowest versions that pyproject.toml allows: lowest_versions.py EXTRA,EXTRA,..."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_REQUIREMENT = re.compile(r"(?P<name>[\w-]+)(\[(?P<extras>[\w,-]+)\])?(>=(?P<lowest>[\d.]+))?")


def lowest_versions(extras: list[str]) -> dict[str, str]:
    """Return the lowest version of each package that tether with these extras allows.

    torch is left out, because constraints.txt pins the one of which there is a CPU build.
    """
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *(f"tether[{extra}]" for extra in extras)]
    lowest: dict[str, str] = {}
    for text in requirements:  # grows by the requirements of extras
        requirement = _REQUIREMENT.match(text)
        assert requirement is not None, text
        name, bound = requirement["name"], requirement["lowest"]
        if name == "tether":
            for extra in requirement["extras"].split(","):
                requirements += project["optional-dependencies"][extra]
        elif bound is not None and name != "torch":
            lowest[name] = max(lowest.get(name, "0"), bound, key=_numbers)
    return lowest


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


if __name__ == "__main__":
    print(*(f"{name}=={version}" for name, version in lowest_versions(sys.argv[1].split(",")).items()), sep="\n")
