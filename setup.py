"""Puts the recipes and the tested versions into the wheel, as package data; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """An editable install finds them in the clone."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib, "tether")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree("recipes", package / "recipes", ignore=ignored, dirs_exist_ok=True)
            shutil.copy("constraints.txt", package)


setup(cmdclass={"build_py": BuildWithData})
