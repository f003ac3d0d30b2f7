"""The command line that confines a program, and whether this machine can do that."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from tether.rewards.sandbox.limits import Limits
from tether.rewards.sandbox.seccomp import is_known_processor, seccomp_filter

PATH = "/usr/local/bin:/usr/bin:/bin"
"""Where programs inside find others: all of it is in /usr, of which they see a read-only view."""
NOBODY = 65534
FOLDER = "/tmp"
"""Where a program runs. It is in memory and gone with the program."""
_WITHOUT_INIT = ("--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
"""bwrap's own process is outside of the limits, and its memory could be written in ``/proc/1/mem``."""
_ETC = ("alternatives", "ld.so.cache", "java-*")  # what links of /usr lead to
_SUGGESTION = (
    "Code would run with the rights of this process: give reward_model.sandbox_fusion.url, or, where all of this "
    "machine may be lost, reward_model.sandbox.unconfined=true."
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


def command(argv: tuple[str, ...], files: dict[str, int], limits: Limits, *, status: int, seccomp: int) -> list[str]:
    """Run `argv` in namespaces of its own: no network, only /usr of the file system, nothing of the environment.

    Args:
        argv: the program, which sees itself in `FOLDER`.
        files: name -> descriptor of a file that is copied there.
        limits: of the program.
        status: descriptor that bwrap reports to, as JSON.
        seccomp: descriptor that holds `seccomp_filter`.
    """
    size = ["--size", str(limits.files)]
    copies = [word for name, source in files.items() for word in _copy(source, f"{FOLDER}/{name}")]
    return [
        _found("bwrap"), "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
        "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", *_environment(), *_system(),
        "--proc", "/proc", *_WITHOUT_INIT, "--dev", "/dev", *size, "--tmpfs", FOLDER, *size, "--tmpfs", "/dev/shm",
        *copies, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER,
        "--seccomp", str(seccomp), "--json-status-fd", str(status),
        _found("prlimit"), *limits.arguments(confined=True), *argv,
    ]  # fmt: skip


def plain_user() -> dict[str, Any]:
    """Arguments of `subprocess.Popen`: root has no limit on processes, so programs are another user's."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}


@cache
def why_not() -> str | None:
    """Why programs cannot be confined on this machine, with what to do; None where they can.

    A program that makes 64 processes is run, and has to be stopped at 16.
    """
    if missing := missing_package(("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("python3", "python3")):
        return f"{missing}. {_SUGGESTION}"
    if not is_known_processor():
        return f"there is no filter of system calls for {os.uname().machine}. {_SUGGESTION}"
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return f"this kernel does not list the children of a process (CONFIG_PROC_CHILDREN). {_SUGGESTION}"
    problem = _probe()
    return problem and f"bwrap cannot confine a program here: {problem}. {_SUGGESTION}"


def missing_package(*needed: tuple[str, str]) -> str | None:
    """The message where one of these commands, given with its package, is not installed; None where all are."""
    for name, package in needed:
        if shutil.which(name, path=PATH) is None:
            return f"{name} is not installed in {PATH} (apt-get install {package})"
    return None


def _probe() -> str | None:
    with os.fdopen(os.memfd_create("seccomp"), "wb+") as seccomp, open(os.devnull, "wb") as status:
        seccomp.write(seccomp_filter())
        seccomp.flush()
        seccomp.seek(0)
        limits = Limits(seconds=5, memory_mb=512, processes=16)
        descriptors = (status.fileno(), seccomp.fileno())
        words = command(("python3", "-I", "-c", _PROBE), {}, limits, status=descriptors[0], seccomp=descriptors[1])
        try:
            ended = subprocess.run(
                words, capture_output=True, timeout=60, pass_fds=descriptors, env={}, text=True, **plain_user()
            )
        except subprocess.TimeoutExpired:
            return "it does not start within 60 s"
        except OSError as error:
            return str(error)
    if ended.returncode == 3:
        return "the number of processes is not limited"
    return None if ended.returncode == 0 else ended.stderr.strip()[-300:] or f"exit code {ended.returncode}"


def _copy(source: int, place: str) -> list[str]:
    return ["--perms", "0755", "--file", str(source), place]


def _environment() -> list[str]:
    return [word for name, value in environment(FOLDER).items() for word in ("--setenv", name, value)]


def environment(folder: str) -> dict[str, str]:
    """All variables that a program sees. Hashes of strings are the same in every run."""
    return {"PATH": PATH, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@cache
def _system() -> tuple[str, ...]:
    """The read-only view of /usr and what belongs to it, in the shape that it has here."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        place = Path("/", name)
        if place.is_symlink():
            words += ["--symlink", os.readlink(place), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    for pattern in _ETC:
        words += [word for found in sorted(Path("/etc").glob(pattern)) for word in ("--ro-bind", *[str(found)] * 2)]
    return tuple(words)


def _found(name: str) -> str:
    return shutil.which(name, path=PATH) or name
