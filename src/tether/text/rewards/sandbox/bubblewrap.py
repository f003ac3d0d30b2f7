"""The command line of bubblewrap that confines a program, and a check that this machine supports it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tether.text.rewards.sandbox.limits import Limits
from tether.text.rewards.sandbox.seccomp import is_known_processor, seccomp_filter

PATH = "/usr/local/bin:/usr/bin:/bin"
"""PATH inside the sandbox. Everything in it is in /usr, which is mounted read-only."""
NOBODY = 65534
FOLDER = "/tmp"
"""Working directory of a program. It is in memory and disappears with the program."""
_HIDDEN_INIT = ("--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
"""Hides bwrap's process, which is outside the limits, so that a program cannot write to ``/proc/1/mem``."""
_ETC = ("alternatives", "ld.so.cache", "java-*")  # targets of symbolic links in /usr
_SUGGESTION = (
    "Programs would run with the permissions of this process: set reward_model.sandbox_fusion.url, or, if nothing on "
    "this machine needs protection, reward_model.sandbox.unconfined=true."
)
_PROBE = (
    "import os, sys, time\n"
    "for count in range(64):\n"
    "    try:\n"
    "        child = os.fork()\n"
    "    except OSError:\n"
    "        sys.exit(0 if count < 16 else 3)\n"
    "    if not child:\n"
    "        time.sleep(5)\n"
    "        os._exit(0)\n"
    "sys.exit(3)\n"
)


def command(
    argv: tuple[str, ...],
    files: dict[str, int],
    limits: Limits,
    commands: tuple[str, ...] = (),
    *,
    status: int,
    seccomp: int,
) -> list[str]:
    """Return the command that runs `argv` in new namespaces: no network, only /usr, and an empty environment.

    Args:
        argv: command of the program, whose working directory is `FOLDER`.
        files: name -> descriptor of a file that is copied to `FOLDER`.
        limits: limits of the program.
        commands: the only commands in PATH, with a writable root folder; empty: all of /usr, read-only.
        status: descriptor for the JSON reports of bwrap.
        seccomp: descriptor of a file with `seccomp_filter`.
    """
    size = ["--size", str(limits.files)]
    copies = [word for name, source in files.items() for word in _copy(source, f"{FOLDER}/{name}")]
    root = [*size, "--tmpfs", "/"] if commands else []
    chosen = [*_only(commands), "--remount-ro", "/usr/bin"] if commands else ["--remount-ro", "/"]
    return [
        _executable("bwrap"), "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
        "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", *_environment(), *root, *_system(),
        "--proc", "/proc", *_HIDDEN_INIT, "--dev", "/dev", *size, "--tmpfs", FOLDER, *size, "--tmpfs", "/dev/shm",
        *copies, "--remount-ro", "/dev", *chosen, "--chdir", FOLDER,
        "--seccomp", str(seccomp), "--json-status-fd", str(status),
        _executable("prlimit"), *limits.arguments(confined=True), *argv,
    ]  # fmt: skip


def plain_user() -> dict[str, Any]:
    """Return arguments of `subprocess.Popen` that switch from root, which has no limit on processes, to `NOBODY`."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}


def confinement_advice() -> str | None:
    """Return why rewards cannot confine programs on this machine, and what to do; None if they can."""
    missing = confinement_problem()
    return missing and f"{missing}. {_SUGGESTION}"


@cache
def confinement_problem() -> str | None:
    """Return why programs cannot be confined on this machine; None if they can be."""
    if missing := missing_package(("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("python3", "python3")):
        return missing
    if not is_known_processor():
        return f"there is no filter of system calls for {os.uname().machine}"
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return "this kernel does not list the children of a process (CONFIG_PROC_CHILDREN)"
    problem = _probe()
    return problem and f"bwrap cannot confine a program here: {problem}"


def missing_package(*needed: tuple[str, str]) -> str | None:
    """Return a message if one of these commands, listed with their packages, is not installed; None if all are."""
    for name, package in needed:
        if shutil.which(name, path=PATH) is None:
            return f"{name} is not installed in {PATH} (apt-get install {package})"
    return None


def _probe() -> str | None:
    # The program tries to start 64 processes, and must be stopped at 16.
    with os.fdopen(os.memfd_create("seccomp"), "wb+") as seccomp, open(os.devnull, "wb") as status:
        seccomp.write(seccomp_filter())
        seccomp.flush()
        seccomp.seek(0)
        limits = Limits(seconds=5, memory_mb=512, processes=16)
        descriptors = (status.fileno(), seccomp.fileno())
        words = command(("python3", "-I", "-c", _PROBE), {}, limits, status=descriptors[0], seccomp=descriptors[1])
        try:
            result = subprocess.run(
                words, capture_output=True, timeout=60, pass_fds=descriptors, env={}, text=True, **plain_user()
            )
        except subprocess.TimeoutExpired:
            return "it does not start within 60 s"
        except OSError as error:
            return str(error)
    if result.returncode == 3:
        return "the number of processes is not limited"
    return None if result.returncode == 0 else result.stderr.strip()[-300:] or f"exit code {result.returncode}"


def _copy(source: int, path: str) -> list[str]:
    return ["--perms", "0755", "--file", str(source), path]


def _environment() -> list[str]:
    return [word for name, value in environment(FOLDER).items() for word in ("--setenv", name, value)]


def environment(folder: str) -> dict[str, str]:
    """Return the environment variables of a program. They make string hashes the same in every run."""
    return {"PATH": PATH, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@cache
def _system() -> tuple[str, ...]:
    """Return the arguments that mount /usr read-only, with the same links to it as on this machine."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for pattern in _ETC:
        words += [word for path in sorted(Path("/etc").glob(pattern)) for word in ("--ro-bind", *[str(path)] * 2)]
    return tuple(words)


def _only(commands: tuple[str, ...]) -> list[str]:
    """Return the arguments that leave only these commands in PATH."""
    words = ["--tmpfs", "/usr/bin", "--tmpfs", "/usr/local"]
    for name in (*commands, "prlimit"):
        if source := shutil.which(name, path=PATH):
            words += ["--ro-bind", os.path.realpath(source), f"/usr/bin/{name}"]
    return words


def _executable(name: str) -> str:
    return shutil.which(name, path=PATH) or name
