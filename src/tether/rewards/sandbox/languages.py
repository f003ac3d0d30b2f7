"""The languages that answers may be written in, and how each is run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from tether.rewards.sandbox.bubblewrap import FOLDER, PATH

BINARY = f"{FOLDER}/program"


@dataclass(frozen=True)
class Language:
    """The commands that run programs of a language."""

    remote: str
    """Its name for SandboxFusion."""
    file: str
    """Name of the source file."""
    run: tuple[str, ...]
    """The command, in the folder of the file."""
    compile: tuple[str, ...] = ()
    """The command that makes `BINARY` of the file."""
    needs: tuple[str, ...] = ()
    """Commands that have to be installed."""
    tags: tuple[str, ...] = ()
    """Other names of it behind the three marks that begin a block of code."""


LANGUAGES: dict[str, Language] = {
    "python": Language(
        "python",
        "answer.py",
        ("python3", "-I", "-X", "int_max_str_digits=0", f"{FOLDER}/answer.py"),
        needs=("python3",),
        tags=("py", "pypy"),
    ),
    "c": Language(
        "cpp", "answer.c", (BINARY,), ("gcc", "-O2", "-std=c17", "-o", BINARY, "answer.c", "-lm"), needs=("gcc",)
    ),
    "cpp": Language(
        "cpp",
        "answer.cpp",
        (BINARY,),
        ("g++", "-O2", "-std=c++17", "-o", BINARY, "answer.cpp"),
        needs=("g++",),
        tags=("c++", "cxx", "cc"),
    ),
    "javascript": Language(
        "nodejs", "answer.js", ("node", "answer.js"), needs=("node",), tags=("js", "node", "nodejs")
    ),
    "java": Language(
        "java",
        "Main.java",
        ("java", "-Xss64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-jar", BINARY),
        ("sh", "-c", f"javac -d made Main.java && jar cfe {BINARY} Main -C made ."),
        needs=("java", "javac", "jar"),
    ),
    "bash": Language("bash", "answer.sh", ("bash", "answer.sh"), needs=("bash",), tags=("sh", "shell")),
    "perl": Language("perl", "answer.pl", ("perl", "answer.pl"), needs=("perl",), tags=("pl",)),
}


def check_languages(names: tuple[str, ...], *, remote: bool) -> None:
    """Refuse languages that programs cannot be run in.

    Raises:
        ValueError: no language, an unknown one, or one that is not installed where programs look for it.
    """
    key = "reward_model.sandbox.languages"
    if not names:
        raise ValueError(f"{key}: names no language; known are {', '.join(LANGUAGES)}")
    for name in names:
        if name not in LANGUAGES:
            raise ValueError(f"{key}: {name} is not one of {', '.join(LANGUAGES)}")
        missing = [command for command in LANGUAGES[name].needs if not (remote or shutil.which(command, path=PATH))]
        if missing:
            raise ValueError(f"{key}: {name} needs {', '.join(missing)} in {PATH}: install it, or leave {name} out")
