"""Runs a script that starts verl in a sandbox where a recorder replaces all programs.

bash evaluates the script, and the recorder records each command that the script would have started. The sandbox has no
network and no files of this machine except a few text tools, limits time, memory and output, and is removed afterwards.
"""

from __future__ import annotations

import posixpath
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tether.text.rewards.sandbox.bubblewrap import FOLDER, environment
from tether.text.rewards.sandbox.limits import Finished, Limits, Program
from tether.text.rewards.sandbox.run import run

_TOOLS = (
    "awk", "basename", "bash", "bc", "cat", "cp", "cut", "date", "dirname", "egrep", "expr", "fgrep", "find", "getopt",
    "grep", "head", "id", "jq", "ln", "ls", "md5sum", "mkdir", "mktemp", "mv", "paste", "readlink", "realpath", "rev",
    "rm", "rmdir", "sed", "seq", "sort", "stat", "tac", "tail", "tee", "touch", "tr", "uname", "uniq", "wc",
)  # fmt: skip
"""The programs with which scripts compute settings. All other programs are recorded."""
_LIMITS = Limits(seconds=3, memory_mb=512, processes=64)
_MAX_RUNS = 4  # each run may find further paths of missing programs and folders
_OWN = re.compile(r"TETHER_RECORDER_\w+|BASH_ENV|PATH|PWD|OLDPWD|SHLVL|_")
_NOT_PASSED = re.compile(
    r"BASH\w*|SHELLOPTS|E?UID|PPID|ENV|PATH|OLDPWD|SHLVL|_|POSIXLY_CORRECT|LD_\w+|LC_\w+|LANG\w*|TETHER_RECORDER_\w+"
)
_MISSING = re.compile(r"^\S+: line \d+: ([\w./+-]*/[\w./+-]+): No such file or directory$", re.MULTILINE)

_FUNCTIONS = r"""
command_not_found_handle() {
    local IFS=$' \t\n' index=1 frame=1 name fields line
    while [[ ${BASH_SOURCE[frame]-} == "$BASH_ENV" ]]; do frame=$((frame + 1)); done
    line=${TETHER_RECORDER_LINE:-${BASH_LINENO[frame - 1]}}
    while ((index <= $#)); do  # bash -c TEXT, perhaps behind another program
        name=$((index + 1))
        if [[ ${!index} =~ ^(.*/)?(ba)?sh$ ]] && { ((index == 1)) || [[ ${!name-} =~ ^-[a-z]*c$ ]]; }; then
            TETHER_RECORDER_LINE=$line command /usr/bin/bash "${@:index + 1}"
            return
        fi
        index=$name
    done
    fields=("$line" $# "$@")
    for name in $(compgen -e); do fields+=("$name" "${!name-}"); done
    for ((index = 0; index < 100; index++)); do  # calls of other processes must not be mixed into this one
        if command -p mkdir /tmp/.lock 2> /dev/null; then break; fi
    done
    printf '%s\0' "${fields[@]}" $'\x1d' >&200
    command -p rmdir /tmp/.lock 2> /dev/null
    if [[ " $* " == *' -c '* && $* != *print* ]]; then return 1; fi  # python -c 'import ...' asks what is installed
    printf %s "$TETHER_RECORDER_REPLY"
}
bash() { command_not_found_handle bash "$@"; }
exec() { if (($#)); then "$@"; exit; fi; }
source() { if [[ -e $1 ]]; then builtin source "$@"; else command_not_found_handle source "$@" > /dev/null; fi; }
function . { source "$@"; }
cd() { builtin cd "$@" 2> /dev/null || { mkdir -p -- "${!#}" && builtin cd "$@"; }; }
pushd() { mkdir -p -- "${!#}" 2> /dev/null; builtin pushd "$@"; }
date() { command date --date="@$TETHER_RECORDER_TIME" "$@" 2> /dev/null || command date "$@"; }
ulimit() { :; }
RANDOM=1
"""
"""Functions that bash reads before the script. A command that does not exist is recorded and succeeds."""


@dataclass(frozen=True)
class RecordedCommand:
    """A command that the script would have started."""

    line: int
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the script set for the command."""


@dataclass(frozen=True)
class Recording:
    """The commands that a script would have started, and how it ended."""

    calls: Sequence[RecordedCommand]
    result: Finished

    @property
    def ending(self) -> str:
        """Return how the script ended, and the last line that it wrote."""
        reason, code = self.result.reason, self.result.code
        how = {"exit": f"ended with exit code {code}", "time": f"did not end within {_LIMITS.wall_seconds:.0f} s"}
        lines = self.result.stderr.decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if not line.startswith("+")]  # output of `set -x`
        wrote = f", and last wrote {lines[-1][-200:]!r}" if lines else ""
        return how.get(reason, f"exceeded the limit of {reason}") + wrote


@dataclass(frozen=True)
class Recorder:
    """Runs a script, with a fixed time."""

    script: Path
    text: str
    environment: Mapping[str, str]
    arguments: Sequence[str]
    paths: tuple[str, ...] = ()
    """Paths of programs and files that the script requires."""
    now: float = field(default_factory=time.time)

    def run_until_complete(self) -> tuple[Recorder, Recording]:
        """Record the script, again with each missing path that it reports; return the recorder with these paths, and
        the recording."""
        recorder, recording = self, self.run()
        for _ in range(_MAX_RUNS):
            missing = _MISSING.findall(recording.result.stderr.decode(errors="replace"))
            new = sorted(set(missing) - set(recorder.paths))
            if not new:
                break
            recorder = replace(recorder, paths=(*recorder.paths, *new))
            recording = recorder.run()
        return recorder, recording

    def run(self, reply: str = "1\n") -> Recording:
        """Record the script.

        Args:
            reply: output of recorded programs.
        """
        paths = "".join(f'function {path} {{ command_not_found_handle {path} "$@"; }}\n' for path in self.paths)
        files = {".start": self._start(reply), ".functions": (_FUNCTIONS + paths).encode(), ".script": self._source()}
        program = Program(("bash", f"{FOLDER}/.start", *self.arguments), files, commands=_TOOLS)
        result = run(program, b"", _LIMITS)
        return Recording(list(self._calls(result.stdout)), result)

    def _source(self) -> bytes:
        return self.text.encode(errors="surrogateescape")

    def _start(self, reply: str) -> bytes:
        """Return the script that creates the folders and variables of the recorded script's environment."""
        folder = self.environment.get("PWD", "/")
        place = posixpath.normpath(posixpath.join(folder, self.script))
        variables = {name: value for name, value in self.environment.items() if _is_passed(name)}
        variables |= {
            "TETHER_RECORDER_REPLY": reply,
            "TETHER_RECORDER_TIME": str(int(self.now)),
            "BASH_ENV": f"{FOLDER}/.functions",
        }
        folders = [folder, posixpath.dirname(place), *(posixpath.dirname(path) for path in self.paths)]
        lines = [
            "exec 200>&1 >&2",  # calls are written to stdout, the script's output to stderr
            "unset HOME TMPDIR HOSTNAME PYTHONHASHSEED",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"cd {shlex.quote(folder)} 2> /dev/null || {{ mkdir -p {shlex.quote(folder)}; cd {shlex.quote(folder)}; }}",
            f'mkdir -p "${{HOME-/}}" "${{TMPDIR-/}}" {shlex.join(folder or "." for folder in folders)} 2> /dev/null',
            f"cp {FOLDER}/.script {shlex.quote(place)}",
            f'exec /usr/bin/bash {shlex.quote(str(self.script))} "$@"',
        ]
        return "\n".join(lines).encode(errors="surrogateescape")

    def _calls(self, recorded: bytes) -> Iterator[RecordedCommand]:
        lines, of_sandbox = self.text.splitlines(), environment(FOLDER)
        for one in recorded.decode(errors="surrogateescape").split("\x1d\0")[:-1]:
            line, count, *fields = one.split("\0")[:-1]
            words, variables = fields[: int(count)], fields[int(count) :]
            own = {
                name: value
                for name, value in zip(variables[::2], variables[1::2], strict=True)
                if value not in (self.environment.get(name), of_sandbox.get(name)) and not _OWN.fullmatch(name)
            }
            # bash reports the line of a command's second word, which may be the next line.
            is_next = re.match(r"[ \t]*[^\s#]\S*[ \t]*\\$", "".join(lines[int(line) - 2 : int(line) - 1]))
            yield RecordedCommand(int(line) - bool(is_next), tuple(words), own)


def _is_passed(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not _NOT_PASSED.fullmatch(name)
