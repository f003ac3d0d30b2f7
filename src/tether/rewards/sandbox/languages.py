"""The programming languages of answers, with the commands that run them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from tether.rewards.sandbox.bubblewrap import FOLDER, PATH

BINARY = f"{FOLDER}/program"


@dataclass(frozen=True)
class Language:
    """A programming language."""

    remote: str
    """Name of the language in SandboxFusion."""
    file: str
    """Name of the source file."""
    run: tuple[str, ...]
    """Command that runs the program in the folder of the file."""
    compile: tuple[str, ...] = ()
    """Command that compiles the file to `BINARY`."""
    needs: tuple[str, ...] = ()
    """Commands that must be installed."""
    tags: tuple[str, ...] = ()
    """Other names of the language in the info string of a code block."""


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
    """Check that programs in these languages can run.

    Raises:
        ValueError: the list is empty, or a language is unknown or is not installed in `PATH`.
    """
    key = "reward_model.sandbox.languages"
    if not names:
        raise ValueError(f"{key}: the list is empty; known languages are {', '.join(LANGUAGES)}")
    for name in names:
        if name not in LANGUAGES:
            raise ValueError(f"{key}: {name} is not one of {', '.join(LANGUAGES)}")
        missing = [command for command in LANGUAGES[name].needs if not (remote or shutil.which(command, path=PATH))]
        if missing:
            raise ValueError(f"{key}: {name} needs {', '.join(missing)} in {PATH}: install it, or leave {name} out")
