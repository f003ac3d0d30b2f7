"""Execution of a program: input, output, limits, and removal of all its processes and files."""

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

from tether.runtime.guard import descendants
from tether.text.rewards.sandbox import bubblewrap
from tether.text.rewards.sandbox.limits import Finished, Limits, Program, SandboxError
from tether.text.rewards.sandbox.seccomp import seccomp_filter

_POLL_SECONDS = 0.02  # interval of memory checks
_CHUNK = 1 << 16
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TIME_SIGNALS = (128 + signal.SIGXCPU, -signal.SIGXCPU)

Reason = Literal["exit", "time", "memory", "output", "files"]


def run(program: Program, stdin: bytes, limits: Limits, *, confined: bool = True) -> Finished:
    """Run a program in a sandbox, or without confinement as a plain process.

    Raises:
        SandboxError: the sandbox could not start, so the program did not run.
    """
    with ExitStack() as stack:
        started = stack.enter_context(_confined(program, limits) if confined else _plain(program, limits))
        start = time.monotonic()
        exchange = _Exchange(started, stdin, limits, start)
        reason = exchange.wait()
        if reason != "exit":
            started.kill()
        code = started.process.wait()
        started.kill()  # remaining child processes
        if confined and reason == "exit":
            code = _reported_code(started.read_status(), bytes(exchange.stderr))
        if reason == "exit" and code in _TIME_SIGNALS:
            reason = "time"
        seconds = time.monotonic() - start
        return Finished(reason, code, bytes(exchange.stdout), bytes(exchange.stderr), seconds)


@dataclass
class _Started:
    """A running process, and the status reports of bwrap."""

    process: subprocess.Popen[bytes]
    status: int | None = None
    """Descriptor for the reports of bwrap; None for a plain process."""
    reported: bytes = b""
    init: int | None = None
    """PID of the first process of the sandbox; when it ends, all others in the sandbox end."""

    def read_status(self) -> bytes:
        """Return the reports of bwrap so far."""
        assert self.status is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.status, _CHUNK):
                self.reported += chunk
        if self.init is None and b"\n" in self.reported:
            self.init = int(json.loads(self.reported.partition(b"\n")[0])["child-pid"])
        return self.reported

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        if self.status is not None:
            self.process.kill()  # the first process of the sandbox dies with bwrap, and all others with the first one
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
        commands = program.commands
        words = bubblewrap.command(program.argv, files, limits, commands, status=write_end, seccomp=seccomp)
        try:
            inherited = (*files.values(), seccomp, write_end)
            # An empty environment, because the program can read bwrap's in /proc/1/environ.
            process = _spawn(words, pass_fds=inherited, env={}, **bubblewrap.plain_user())
        except OSError as error:
            raise SandboxError(f"{words[0]} could not be started: {error}") from error
        finally:
            os.close(write_end)
        started = _Started(process, read_end)
        with _cleanup(started):
            yield started


@contextmanager
def _plain(program: Program, limits: Limits) -> Iterator[_Started]:
    folder = tempfile.mkdtemp(prefix="tether-program-")
    try:
        for name, content in program.files.items():
            path = Path(folder, name)
            path.write_bytes(content)
            path.chmod(0o755)
        argv = tuple(word.replace(bubblewrap.FOLDER, folder) for word in program.argv)
        words = ["prlimit", *limits.arguments(confined=False), *argv]
        try:
            process = _spawn(words, cwd=folder, env=bubblewrap.environment(folder), start_new_session=True)
        except OSError as error:
            raise SandboxError(f"{words[0]} could not be started: {error}") from error
        started = _Started(process)
        with _cleanup(started):
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _spawn(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program with pipes that its user owns, because many programs open /dev/stdin."""
    with ExitStack() as inside, ExitStack() as outside:
        ends = [os.pipe() for _ in range(3)]
        ends[0] = ends[0][::-1]  # the program reads from the first pipe
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
def _cleanup(started: _Started) -> Iterator[None]:
    """Kill all processes and close all pipes on exit."""
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
    """Writes the input of a program and reads its output until it ends or exceeds a limit."""

    def __init__(self, started: _Started, stdin: bytes, limits: Limits, start: float) -> None:
        process = started.process
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.stdout, self.stderr = bytearray(), bytearray()
        self._started, self._limits, self._unwritten = started, limits, memoryview(stdin)
        self._deadline = start + limits.wall_seconds
        self._selector = selectors.DefaultSelector()
        self._stdin = process.stdin
        self._readers: dict[IO[bytes], bytearray] = {process.stdout: self.stdout, process.stderr: self.stderr}
        for pipe in (process.stdin, *self._readers):
            os.set_blocking(pipe.fileno(), False)
        for pipe in self._readers:
            self._selector.register(pipe, selectors.EVENT_READ)
        self._selector.register(process.stdin, selectors.EVENT_WRITE)

    def wait(self) -> Reason:
        """Wait until the program ends or exceeds a limit, and return which."""
        with self._selector:
            checked = 0.0
            while self._readers:
                for key, _ in self._selector.select(_POLL_SECONDS):
                    if key.fileobj is self._stdin:
                        self._write()
                    else:
                        self._read(key.fileobj)  # type: ignore[arg-type]
                now = time.monotonic()
                if len(self.stdout) + len(self.stderr) > self._limits.output:
                    return "output"
                if now > self._deadline:
                    return "time"
                if now - checked >= _POLL_SECONDS:
                    if exceeded := self._exceeded_limit():
                        return exceeded
                    checked = now
                if self._started.process.poll() is not None:
                    self._drain()
                    return "exit"
            return self._await_exit()

    def _await_exit(self) -> Reason:
        """Wait for a program that has closed its output."""
        while self._started.process.poll() is None:
            if time.monotonic() > self._deadline:
                return "time"
            if exceeded := self._exceeded_limit():
                return exceeded
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._started.process.wait(_POLL_SECONDS)
        return "exit"

    def _exceeded_limit(self) -> Reason | None:
        """Return the limit of memory or files that the processes exceed together, if any."""
        if self._started.status is not None:
            self._started.read_status()
        root_pid = self._started.init or self._started.process.pid
        if _exceeds_memory(root_pid, (self._limits.memory_mb << 20) - _socket_buffers(self._started.init)):
            return "memory"
        return "files" if self._started.init and _inodes(self._started.init) > self._limits.inodes else None

    def _write(self) -> None:
        try:
            if self._unwritten:
                self._unwritten = self._unwritten[os.write(self._stdin.fileno(), self._unwritten[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unwritten = self._unwritten[:0]
        if not self._unwritten:
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, pipe: IO[bytes]) -> bool:
        """Read available output from a pipe; return whether there may be more."""
        try:
            chunk = os.read(pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self._readers[pipe] += chunk
        if not chunk:
            self._selector.unregister(pipe)
            del self._readers[pipe]
        return bool(chunk)

    def _drain(self) -> None:
        """Read the remaining output after the program ended; its child processes may keep a pipe open."""
        for pipe in list(self._readers):
            while len(self._readers[pipe]) <= self._limits.output and self._read(pipe):
                pass


def _socket_buffers(init: int | None) -> int:
    """Return the maximum size in bytes of the kernel buffers of a sandbox's sockets; asyncio creates such sockets."""
    try:
        sockets = Path(f"/proc/{init}/net/unix").read_bytes().count(b"\n") - 1 if init else 0
        return 2 * sockets * int(Path("/proc/sys/net/core/wmem_max").read_text())
    except (OSError, ValueError):  # the process has ended
        return 0


def _exceeds_memory(root_pid: int, limit: int) -> bool:
    """Return whether a process and its descendants use more than `limit` bytes of memory; shared pages count once."""
    # Anonymous shared memory is counted at its mapped size, because unmapping does not free it. Page tables count, too:
    # sparse mappings cost 4 KiB per 2 MiB.
    total_resident, total_mapped, processes = 0, 0, list(_processes(root_pid))
    for process in processes:
        with contextlib.suppress(OSError, ValueError):  # the process has ended
            mapped, resident = _sizes(process)
            total_mapped, total_resident = total_mapped + mapped, total_resident + resident
    if total_mapped <= limit:
        return total_resident > limit and _proportional_size(processes, 0) > limit
    shared, tables = _anonymous_shared(processes), _page_tables(processes)
    return total_resident + shared + tables > limit and _proportional_size(processes, shared) + tables > limit


def _processes(root_pid: int) -> Iterator[Path]:
    """Yield the folder in /proc of a live thread of each process."""
    # The main thread of a process may exit before others, and then reports no memory.
    waiting = [root_pid]
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
    """Return the bytes that a process has mapped, and those that are in memory."""
    mapped, resident, *_ = (process / "statm").read_text().split()
    return int(mapped) * _PAGE, int(resident) * _PAGE


def _anonymous_shared(processes: Sequence[Path]) -> int:
    """Return the bytes of anonymous mappings that processes share, or may share with their children."""
    sizes: dict[tuple[str, str], int] = {}
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            for line in (process / "maps").read_text().splitlines():
                if "/dev/zero" in line and len(fields := line.split()) > 5 and fields[1].endswith("s"):
                    begin, end = (int(address, 16) for address in fields[0].split("-"))
                    key = (fields[3], fields[4])
                    sizes[key] = max(sizes.get(key, 0), int(fields[2], 16) + end - begin)
    return sum(sizes.values())


def _page_tables(processes: Sequence[Path]) -> int:
    """Return the bytes of page tables of processes."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):  # the process has ended
            total += int((process / "status").read_text().partition("VmPTE:")[2].split(maxsplit=1)[0]) << 10
    return total


def _proportional_size(processes: Sequence[Path], shared: int) -> int:
    """Return the memory of processes in bytes, where each page is divided among the processes that use it.

    Args:
        processes: folders of the processes in /proc.
        shared: minimum size of shared memory, in bytes.
    """
    private, resident_shared = 0, 0
    for process in processes:
        with contextlib.suppress(OSError, ValueError):
            try:
                lines = (line.split() for line in (process / "smaps_rollup").read_text().splitlines()[1:])
                sizes = {line[0]: int(line[1]) << 10 for line in lines}
                in_shared = sizes.get("Pss_Shmem:", 0)
                private, resident_shared = private + sizes["Pss:"] - in_shared, resident_shared + in_shared
            except PermissionError:
                private += _sizes(process)[1]
    return private + max(shared, resident_shared)


def _inodes(init: int) -> int:
    """Return the number of files in the fuller of the sandbox's in-memory file systems; 0 before they are mounted."""
    num_files = 0
    for name in ("", "tmp", "dev/shm"):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{init}/root").st_dev == os.stat("/").st_dev:
                break
            usage = os.statvfs(f"/proc/{init}/root/{name}")
            num_files = max(num_files, usage.f_files - usage.f_ffree)
    return num_files


def _reported_code(status: bytes, stderr: bytes) -> int:
    """Return the exit code that bwrap reports.

    Raises:
        SandboxError: there is none, so the program did not start.
    """
    for line in status.splitlines():
        if "exit-code" in (report := json.loads(line)):
            return int(report["exit-code"])
    raise SandboxError(f"the sandbox could not start: {stderr.decode(errors='replace').strip()[-500:] or 'no reason'}")
