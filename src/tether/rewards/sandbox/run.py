"""Runs one program to its end: its input, its output, its limits, and nothing of it left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from tether.rewards.sandbox import bubblewrap
from tether.rewards.sandbox.limits import Finished, Limits, Program, SandboxError
from tether.rewards.sandbox.seccomp import seccomp_filter
from tether.runtime.guard import descendants

_SLICE = 0.02  # seconds between two looks at memory
_CHUNK = 1 << 16
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TIME_SIGNALS = (128 + signal.SIGXCPU, -signal.SIGXCPU)

Reason = Literal["exit", "time", "memory", "output", "files"]


def run(program: Program, stdin: bytes, limits: Limits, *, confined: bool = True) -> Finished:
    """Run a program in a sandbox, or, where that is not wanted, as a plain process.

    Raises:
        SandboxError: the sandbox could not be set up, so that the program never ran.
    """
    with ExitStack() as stack:
        started = stack.enter_context(_confined(program, limits) if confined else _plain(program, limits))
        begun = time.monotonic()
        exchange = _Exchange(started, stdin, limits, begun)
        reason = exchange.until_its_end()
        if reason != "exit":
            started.kill()
        code = started.process.wait()
        started.kill()  # what it left behind
        if confined and reason == "exit":
            code = _reported_code(started.read_status(), bytes(exchange.stderr))
        if reason == "exit" and code in _TIME_SIGNALS:
            reason = "time"
        seconds = time.monotonic() - begun
        return Finished(reason, code, bytes(exchange.stdout), bytes(exchange.stderr), seconds)


@dataclass
class _Started:
    """A process that runs, and where its end is reported."""

    process: subprocess.Popen[bytes]
    status: int | None = None
    """Descriptor that bwrap reports to; None for a plain process."""
    reported: bytes = b""
    init: int | None = None
    """The first process of the sandbox, with which all others in it end."""

    def read_status(self) -> bytes:
        """The reports of bwrap so far."""
        assert self.status is not None
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.status, _CHUNK):
                self.reported += part
        if self.init is None and b"\n" in self.reported:
            self.init = int(json.loads(self.reported.partition(b"\n")[0])["child-pid"])
        return self.reported

    def kill(self) -> None:
        """End every process of it."""
        if self.status is not None:
            self.process.kill()  # its first process dies with it, and all others with that
            return
        for pid in (*descendants(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def _confined(program: Program, limits: Limits) -> Iterator[_Started]:
    with ExitStack() as stack:
        files = {name: stack.enter_context(_in_memory(content)) for name, content in program.files.items()}
        seccomp = stack.enter_context(_in_memory(seccomp_filter()))
        read_end, write_end = os.pipe()
        stack.callback(os.close, read_end)
        os.set_blocking(read_end, False)
        words = bubblewrap.command(program.argv, files, limits, status=write_end, seccomp=seccomp)
        try:
            inherited = (*files.values(), seccomp, write_end)
            # Without this environment, which the first process of the sandbox keeps: /proc/1/environ shows it.
            process = _spawn(words, pass_fds=inherited, env={}, **bubblewrap.plain_user())
        except OSError as error:
            raise SandboxError(f"{words[0]} could not be started: {error}") from error
        finally:
            os.close(write_end)
        started = _Started(process, read_end)
        with _ended(started):
            yield started


@contextmanager
def _plain(program: Program, limits: Limits) -> Iterator[_Started]:
    folder = tempfile.mkdtemp(prefix="tether-program-")
    try:
        for name, content in program.files.items():
            place = Path(folder, name)
            place.write_bytes(content)
            place.chmod(0o755)
        argv = tuple(word.replace(bubblewrap.FOLDER, folder) for word in program.argv)
        words = ["prlimit", *limits.arguments(confined=False), *argv]
        try:
            process = _spawn(words, cwd=folder, env=bubblewrap.environment(folder), start_new_session=True)
        except OSError as error:
            raise SandboxError(f"{words[0]} could not be started: {error}") from error
        started = _Started(process)
        with _ended(started):
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _spawn(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program with pipes that belong to its user: else it could not open /dev/stdin, as many do."""
    with ExitStack() as inside, ExitStack() as outside:
        ends = [os.pipe() for _ in range(3)]
        ends[0] = ends[0][::-1]  # it reads the first
        for ours, theirs in ends:
            outside.callback(os.close, ours)
            inside.callback(os.close, theirs)
            if "user" in options:
                os.fchown(theirs, options["user"], -1)
        stdin, stdout, stderr = (theirs for _, theirs in ends)
        process = subprocess.Popen(words, bufsize=0, stdin=stdin, stdout=stdout, stderr=stderr, **options)
        outside.pop_all()
        files = [os.fdopen(ours, mode, 0) for (ours, _), mode in zip(ends, ("wb", "rb", "rb"), strict=True)]
        process.stdin, process.stdout, process.stderr = files
        return process


@contextmanager
def _ended(started: _Started) -> Iterator[None]:
    """Leave no process and no pipe behind, whatever happens."""
    process = started.process
    try:
        yield
    finally:
        started.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def _in_memory(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("tether")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


class _Exchange:
    """Writes a program's input and reads its output until it ends or goes beyond a limit."""

    def __init__(self, started: _Started, stdin: bytes, limits: Limits, begun: float) -> None:
        process = started.process
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.stdout, self.stderr = bytearray(), bytearray()
        self._started, self._limits, self._rest = started, limits, memoryview(stdin)
        self._due = begun + limits.wall_seconds
        self._selector = selectors.DefaultSelector()
        self._stdin = process.stdin
        self._readers: dict[IO[bytes], bytearray] = {process.stdout: self.stdout, process.stderr: self.stderr}
        for pipe in (process.stdin, *self._readers):
            os.set_blocking(pipe.fileno(), False)
        for pipe in self._readers:
            self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)

    def until_its_end(self) -> Reason:
        """Why the program ended, or has to end."""
        with self._selector:
            looked = 0.0
            while self._readers:
                for key, _ in self._selector.select(_SLICE):
                    if key.fileobj is self._stdin:
                        self._write()
                    else:
                        self._read(key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                if len(self.stdout) + len(self.stderr) > self._limits.output:
                    return "output"
                if now > self._due:
                    return "time"
                if now - looked >= _SLICE and (beyond := self._look()):
                    return beyond
                looked = now if now - looked >= _SLICE else looked
                if self._started.process.poll() is not None:
                    self._drain()
                    return "exit"
            return self._await_exit()

    def _await_exit(self) -> Reason:
        """It closed its output and runs on."""
        while self._started.process.poll() is None:
            if time.monotonic() > self._due:
                return "time"
            if beyond := self._look():
                return beyond
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.process.wait(_SLICE)
        return "exit"

    def _look(self) -> Reason | None:
        """The limit that its processes together, or its files, are beyond."""
        if self._started.status is not None:
            self._started.read_status()
        first = self._started.init or self._started.process.pid
        if _takes_more(first, (self._limits.memory_mb << 20) - _in_sockets(self._started.init)):
            return "memory"
        return "files" if self._started.init and _inodes(self._started.init) > self._limits.inodes else None

    def _write(self) -> None:
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._stdin.fileno(), self._rest[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._rest = self._rest[:0]
        if not self._rest:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, pipe: IO[bytes]) -> bool:
        """Take what a pipe has; whether there may be more."""
        try:
            part = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self._readers[pipe] += part
        if not part:
            self._selector.unregister(pipe)
            del self._readers[pipe]
        return bool(part)

    def _drain(self) -> None:
        """Read what is left after its end; a process that it left behind may hold a pipe open."""
        for pipe in list(self._readers):
            while len(self._readers[pipe]) <= self._limits.output and self._read(pipe):
                pass


def _in_sockets(init: int | None) -> int:
    """The most bytes that the kernel may hold for the socket pairs of a sandbox, as a program of asyncio has one."""
    try:
        sockets = Path(f"/proc/{init}/net/unix").read_bytes().count(b"\n") - 1 if init else 0
        return 2 * sockets * int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):  # gone meanwhile
        return 0


def _takes_more(first: int, limit: int) -> bool:
    """Whether a process and all below it take more bytes of memory; what they share counts once.

    Shared memory without a file counts as it was asked for: its pages stay where a process gives them back. So do the
    page tables: a page of each two megabytes of nothing costs 4 KiB of them.
    """
    resident, mapped, processes = 0, 0, list(_processes(first))
    for process in processes:
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile
            all_of_it, in_memory = _sizes(process)
            mapped, resident = mapped + all_of_it, resident + in_memory
    if mapped <= limit:
        return resident > limit and _exactly(processes, 0) > limit
    shared, tables = _shared_without_file(processes), _page_tables(processes)
    return resident + shared + tables > limit and _exactly(processes, shared) + tables > limit


def _processes(first: int) -> Iterator[Path]:
    """The folder of a living thread of each process: a main thread that exited before the others shows no memory."""
    waiting = [first]
    while waiting:
        process = Path("/proc", str(waiting.pop()))
        threads: list[Path] = []
        with contextlib.suppress(OSError):
            threads += (process / "task").iterdir()
        yield next(filter(_has_memory, threads), process)
        for thread in threads:
            with contextlib.suppress(OSError, ValueError):
                waiting += map(int, (thread / "children").read_text().split())


def _has_memory(thread: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return _sizes(thread)[0] > 0
    return False


def _sizes(process: Path) -> tuple[int, int]:
    """Bytes that a process has mapped, and those of them in memory."""
    mapped, resident, *_ = (process / "statm").read_text().split()
    return int(mapped) * _PAGE, int(resident) * _PAGE


def _shared_without_file(processes: Sequence[Path]) -> int:
    """Bytes of the mappings that processes share, or may share with those that they start."""
    sizes: dict[tuple[str, str], int] = {}
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            for line in (process / "maps").read_text().splitlines():
                if "/dev/zero" in line and len(parts := line.split()) > 5 and parts[1].endswith("s"):
                    begin, end = (int(at, 16) for at in parts[0].split("-"))
                    key = (parts[3], parts[4])
                    sizes[key] = max(sizes.get(key, 0), int(parts[2], 16) + end - begin)
    return sum(sizes.values())


def _page_tables(processes: Sequence[Path]) -> int:
    """Bytes of the tables that say where the pages of processes are."""
    found = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):  # gone meanwhile
            found += int((process / "status").read_text().partition("VmPTE:")[2].split(maxsplit=1)[0]) << 10
    return found


def _exactly(processes: Sequence[Path], shared: int) -> int:
    """Bytes of processes, each page divided among those that have it; of shared memory at least so many."""
    own, resident_shared = 0, 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            try:
                lines = (line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:])
                sizes = {line[0]: int(line[1]) << 10 for line in lines}
                in_shared = sizes.get("Pss_Shmem:", 0)
                own, resident_shared = own + sizes["Pss:"] - in_shared, resident_shared + in_shared
            except PermissionError:
                own += _sizes(process)[1]
    return own + max(shared, resident_shared)


def _inodes(init: int) -> int:
    """The most files that one of the file systems in memory of a sandbox has, once it has them."""
    most = 0
    for name in ("tmp", "dev/shm"):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{init}/root").st_dev == os.stat("/").st_dev:
                break
            found = os.statvfs(f"/proc/{init}/root/{name}")
            most = max(most, found.f_files - found.f_ffree)
    return most


def _reported_code(status: bytes, stderr: bytes) -> int:
    """The exit code that bwrap reports.

    Raises:
        SandboxError: it reports none, so that the program never began.
    """
    for line in status.splitlines():
        if "exit-code" in (report := json.loads(line)):
            return int(report["exit-code"])
    raise SandboxError(
        f"the sandbox could not be set up: {stderr.decode(errors='replace').strip()[-500:] or 'no reason'}"
    )
