"""Programs that attack: none gets out, none takes more than its limits, and nothing of any of them is left."""

import json
import os
import platform
import socket
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest

from tests.processes import runs
from tests.text.rewards.sandbox.attacks import EACH, GREED, HEAD, OUTSIDE, POWERS, WRITES
from tests.text.rewards.sandbox.machine import confined, needs_prlimit
from tether.text.rewards.sandbox import seccomp
from tether.text.rewards.sandbox.limits import Limits, Program
from tether.text.rewards.sandbox.run import run

LIMITS = Limits(seconds=1, memory_mb=256, processes=32, files=16 << 20, output=4 << 20, startup=1)
PATIENT = replace(LIMITS, seconds=20)  # for what ends for another reason than time, on a slow machine, too
SECRET = "only outside"
CALLS = {**seccomp._DENIED, **seccomp._ABSENT, "clone": seccomp._CLONE, "exit": (60, 93)}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """The machine outside: a secret, a mark in the environment, a process, and sockets that listen."""
    (tmp_path / "secret").write_text(SECRET)
    name = f"TETHER_SANDBOX_MARK_{os.getpid()}"  # another run of these tests may listen beside this one
    monkeypatch.setenv(name, SECRET)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        subprocess.Popen(["sleep", "600"]) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        unix.bind(f"\0{name}")
        unix.listen()
        yield {
            "folder": str(tmp_path),
            "secret": str(tmp_path / "secret"),
            "mark": name,
            "pid": process.pid,
            "spared": [child.pid for child in psutil.Process().children(recursive=True)],  # of tests before this one
            "port": tcp.getsockname()[1],
            "name": socket.gethostname(),
            "calls": {name: numbers[platform.machine() != "x86_64"] for name, numbers in CALLS.items()},
        }
        assert process.poll() is None, "a process outside was ended"
        assert sorted(os.listdir(tmp_path)) == ["secret"]


def attack(body, host, *, limits=PATIENT, is_confined=True):
    program = Program(("python3", "-I", "answer.py"), {"answer.py": (HEAD + body).encode()})
    return run(program, json.dumps(host).encode() + b"\n", limits, confined=is_confined)


def below(spared):
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in spared]


def assert_nothing_left(host):
    end = time.monotonic() + 10
    while remaining := list(filter(runs, below(host["spared"]))):
        assert time.monotonic() < end, f"processes are left: {remaining}"
        time.sleep(0.02)


@confined
@pytest.mark.parametrize("attacks", [OUTSIDE, WRITES, POWERS], ids=["outside", "writes", "powers"])
def test_nothing_outside_is_reached(attacks, host):
    """Each attack is a process of its own; all of a kind share a sandbox, one after the other."""
    ended = attack(EACH.format(attacks=attacks), host)
    assert b"ESCAPED" not in ended.stdout, ended.stdout
    assert SECRET.encode() not in ended.stdout + ended.stderr
    assert b"SyntaxError" not in ended.stderr
    assert ended.reason == "exit", ended
    assert [line.split()[1] for line in ended.stdout.decode().splitlines() if line.startswith("over")] == [*attacks]
    assert_nothing_left(host)


@confined
@pytest.mark.parametrize("name", GREED)
def test_no_program_takes_more_than_its_share(name, host):
    body, reasons = GREED[name]
    ended = attack(body, host, limits=LIMITS if "time" in reasons else PATIENT)
    assert b"ESCAPED" not in ended.stdout, ended.stdout[-500:]
    assert ended.reason in reasons.split(), (ended.reason, ended.code, ended.stderr[-500:])
    assert len(ended.stdout) + len(ended.stderr) < LIMITS.output + (1 << 20)
    assert ended.seconds < PATIENT.wall_seconds + 10
    assert_nothing_left(host)


@needs_prlimit
def test_the_same_programs_succeed_where_nothing_confines_them(host):
    """The negative control: otherwise every attack could be one that never works."""
    host["mark"] = "PATH"
    attacks = OUTSIDE | POWERS
    names = ["reads_a_file", "reads_the_environment_of_init", "opens_a_connection"]
    bodies = {name: attacks[name].replace("/proc/1/", f"/proc/{os.getpid()}/") for name in names}
    ended = attack(EACH.format(attacks=bodies), host, is_confined=False)
    assert ended.stdout.count(b"ESCAPED") == len(names), ended
