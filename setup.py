"""Puts recipes and tested versions into the wheel, and makes the README of a package index; see pyproject.toml."""

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LINK = re.compile(r"(!?)\[([^\]]*)\]\(((?!https?:)[\w./-]+)(#[\w-]+)?\)")


class BuildWithData(build_py):
    """An editable install finds them in the clone."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib, "tether")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree("recipes", package / "recipes", ignore=ignored, dirs_exist_ok=True)
            shutil.copy("constraints.txt", package)


def index_readme(text: str, repository: str | None) -> str:
    """Return a README whose links lead somewhere on the page of a package index.

    Args:
        text: the README of the clone, with links to its files.
        repository: address of the published repository; None: links become plain text, and pictures are left out.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, words, file, anchor = match.groups()
        if repository is None:
            return "" if picture else words
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/main/{file}{anchor or ''})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    urls = tomllib.loads(Path("pyproject.toml").read_text())["project"].get("urls", {})
    setup(
        cmdclass={"build_py": BuildWithData},
        long_description=index_readme(Path("README.md").read_text(), urls.get("Repository")),
        long_description_content_type="text/markdown",
    )
