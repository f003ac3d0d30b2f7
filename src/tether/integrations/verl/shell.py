"""The part of bash that training scripts are written in: variables, quotes, arrays, functions, and long commands.

Nothing is run. What only a run of the script could tell (`$(...)`, `if`, the arguments of the script) stays unknown: a
word that depends on it says so, and where.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tether.integrations.verl.arithmetic import NAME, assigned_names
from tether.integrations.verl.brackets import HEREDOC, Heredoc, end_of_heredocs, end_of_substitution
from tether.integrations.verl.words import ARGUMENTS, ASSIGNMENT, UNKNOWN, TooLong, WordReader, unknown

_ELEMENT = re.compile(rf"({NAME})\[[^]]*\]\+?=")
_BLOCKS, _ENDS = {"if", "for", "while", "until", "select", "case", "{"}, {"fi", "done", "esac", "}"}
_WITHIN = {"then", "else", "elif", "do", "!", "time"}
_DECLARING = {"export", "declare", "typeset", "local", "readonly"}
_CHANGING = re.compile("-[a-zA-Z]*[iuln]")
"""Options of `declare` by which a variable holds something else than what is assigned to it."""
_READING = {"read", "mapfile", "readarray", "getopts"}
_SUCCEEDING = {"set", "cd", "pushd", "popd", "mkdir", "echo", "printf", "true", ":", "ulimit", "unset", "shopt"}
_NOT_READ = {"source", ".", "eval"}
_SHELL = re.compile(r"(?:\S*/)?(?:ba)?sh")
_MOST_CALLS = 1_000
_APART = ("|", "|&", "&")
"""Operators behind a command that runs in a subshell."""


@dataclass(frozen=True)
class Command:
    """A simple command, its variables filled in."""

    line: int
    words: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment of the command alone: NAME=value before it."""


@dataclass(frozen=True)
class Note:
    """A likely mistake of the author, or a part that is not evaluated."""

    text: str
    """Begins with its line."""
    fix: str


@dataclass
class Script:
    """Commands that a script would run."""

    commands: list[Command] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


def read_script(text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> Script:
    """Read a script without running it.

    Args:
        text: of the script.
        environment: variables that it finds set, such as HOME.
        arguments: its own; without any, `$1` and the like are unknown.
    """
    variables = {name: [value] for name, value in environment.items()}
    return _Reader(text, variables | ({ARGUMENTS: list(arguments)} if arguments else {})).read()


@dataclass(frozen=True)
class _Block:
    """A compound command that has not ended yet: ``if``, ``case``, ``{``, ``(``, ..., or the call of a function."""

    kind: str
    is_conditional: bool
    is_apart: bool
    """Whether it runs in a subshell."""
    before: Mapping[str, list[str]]
    """The variables when it began."""
    own: set[str] = field(default_factory=set)
    """Variables of a function that are as before when it returns."""


class _Reader:
    def __init__(self, text: str, variables: dict[str, list[str]], *, skips: bool = False) -> None:
        self._text, self._variables = text, variables
        self._inherited = frozenset(variables) - {ARGUMENTS}
        self._words = WordReader(text, variables, self._is_conditional)
        self._script = Script()
        self._blocks: list[_Block] = []
        self._functions: dict[str, int | None] = {}  # where the body begins; None: only a run could tell which is meant
        self._called: list[str] = []  # functions that have not returned
        self._calls = 0
        self._skips = skips  # the body of a function that is only defined: its end is looked for
        self._before: Mapping[str, list[str]] = {}  # the variables when the present command began
        self._made: set[str] = set()  # folders
        self._assignments = 0  # of the present command, before its name
        self._is_certain = True  # whether the next command runs whenever its block does: not after && and ||
        self._is_piped = False  # whether the next command is behind a |
        self._has_ended = False
        self._heredocs: list[Heredoc] = []  # those that begin in the next line

    def read(self) -> Script:
        try:
            self._run()
        except TooLong as error:
            raise TooLong(f"line {self._line()}: {error}") from None
        return self._script

    def _run(self, outside: int | None = None) -> None:
        """Read commands to the end, or until all blocks have ended but those outside of the first one."""
        has_begun = False
        while self._words.at < len(self._text) and not self._has_ended:
            line = self._line()
            before = self._before = dict(self._variables)
            words, end = self._command()
            depth, kind = len(self._blocks), self._blocks[-1].kind if self._blocks else ""
            if kind == "case" and end == ")" and words != ["esac"]:
                words = []  # a pattern
            is_command = bool(words or self._words.arrays)
            succeeds = self._take(line, words, end) if is_command else end != "&&"  # behind a )
            if is_command and len(self._blocks) >= depth and (self._is_piped or end in _APART):
                self._set_back(before)
            if end == ")" and self._blocks and self._blocks[-1].kind == "(":
                self._close(end)
            if is_command or end not in ("", "\n"):
                is_certain = end != "||" and (end not in ("&&", "|", "|&") or (succeeds and self._is_certain))
                self._is_certain, self._is_piped = is_certain, end in ("|", "|&")
            if outside is not None:
                has_begun = has_begun or max(depth, len(self._blocks)) > outside
                if has_begun and len(self._blocks) <= outside:
                    break

    def _line(self) -> int:
        return self._text.count("\n", 0, self._words.at) + 1

    def _note(self, line: int, text: str, fix: str = "move comments above the command") -> None:
        self._script.notes.append(Note(f"line {line}: {text.replace(UNKNOWN, '')}", fix))

    def _is_conditional(self) -> bool:
        return not self._is_certain or any(block.is_conditional for block in self._blocks)

    def _open(self, kind: str) -> None:
        is_conditional = kind not in ("{", "(") or not self._is_certain
        is_apart = kind == "(" or self._is_piped
        self._blocks.append(_Block(kind, is_conditional, is_apart, self._before))
        self._is_certain, self._is_piped = True, False

    def _close(self, end: str) -> None:
        if self._blocks and self._blocks[-1].kind != "call":
            block = self._blocks.pop()
            if block.is_apart or end in _APART:
                self._set_back(block.before)

    def _set_back(self, variables: Mapping[str, list[str]]) -> None:
        self._variables.clear()
        self._variables |= variables

    def _define(self, name: str) -> None:
        """Note a function, whose body is next, and read past it."""
        begin = re.compile(r"\s*(?:\(\s*\))?(?:\s+|#[^\n]*\n)*").match(self._text, self._words.at)
        assert begin
        self._words.at = begin.end()
        if self._skips:  # it looks for the end of another
            return
        is_another = name in self._functions and self._is_conditional()
        self._functions[name] = None if is_another else begin.end()
        skipped = _Reader(self._text, dict(self._variables), skips=True)
        skipped._words.at = begin.end()
        skipped._run(0)
        self._words.at = skipped._words.at
        if self._text[begin.end() : begin.end() + 1] != "(" and self._text.endswith(")", 0, self._words.at):
            self._words.at -= 1  # it ends what is around the function

    def _call(self, line: int, words: Sequence[str], environment: Mapping[str, list[str]]) -> None:
        """Read the body of a function with the arguments of a call."""
        name, *arguments = words
        body = self._functions[name]
        if body is None or name in self._called:
            why = "has several bodies" if body is None else "calls itself"
            self._note(line, f"{name} {why}, which is not followed", "write out what it runs")
            for variable in list(self._variables):
                self._words.assign(variable, None)
            return
        self._calls += 1
        if self._calls > _MOST_CALLS:
            raise TooLong(f"functions are called more than {_MOST_CALLS:,} times")
        outer = self._words.at, self._heredocs, self._is_certain, self._is_piped
        own = {ARGUMENTS, *environment}
        self._blocks.append(_Block("call", not self._is_certain, False, dict(self._variables), own))
        depth = len(self._blocks)
        self._variables |= {**environment, ARGUMENTS: arguments}
        self._words.at, self._heredocs, self._is_certain, self._is_piped = body, [], True, False
        self._called.append(name)
        self._run(depth)
        self._called.pop()
        block = self._blocks[depth - 1]
        del self._blocks[depth - 1 :]
        for variable in block.own:
            if variable in block.before:
                self._variables[variable] = block.before[variable]
            else:
                self._variables.pop(variable, None)
        self._words.at, self._heredocs, self._is_certain, self._is_piped = outer

    def _take(self, line: int, words: list[str], end: str) -> bool:
        """Open and close blocks, assign, or note a command.

        Returns:
            Whether it succeeds for certain, so that what follows ``&&`` runs.
        """
        has_closed = bool(words) and words[0] in _ENDS
        while words and words[0] in _BLOCKS | _ENDS | _WITHIN:
            word = words.pop(0)
            if word in _ENDS:
                self._close(end)
            elif word in _BLOCKS:
                self._open(word)
            if word in _BLOCKS - {"{"}:
                what = f"{word} ... is not evaluated; variables that are set in it are unknown"
                self._note(line, what, "move the lines that should run out of it")
            if word in ("for", "select", "case"):
                if word != "case" and words:
                    self._words.assign(words[0], None)
                return False
        declares = bool(words) and words[0] in _DECLARING
        options = [word for word in words[1:] if word.startswith("-")] if declares else []
        rest = [word for word in words[1:] if word not in options] if declares else words
        assigned: dict[str, list[str] | None] = {}
        names: list[str] = []
        while rest and (declares or self._assignments):
            word = rest.pop(0)
            self._assignments -= not declares
            if match := ASSIGNMENT.match(word):
                assigned[match[1]] = self._words.assigned(word)
            elif match := _ELEMENT.match(word):
                assigned[match[1]] = None
            names.append(match[1] if match else word)
        if rest:
            own = {name: values or [unknown(f"${name}")] for name, values in assigned.items()}
            return self._simple(line, rest, own)
        if declares:
            self._declare(line, words[0], options, names, [name for name in names if name not in assigned])
        for name, values in assigned.items():
            self._words.assign(name, values)
        if declares and words[0] == "export":
            self._script.exported |= {name: "".join(self._variables.get(name, [""])) for name in names}
        return not has_closed

    def _declare(self, line: int, what: str, options: Sequence[str], names: list[str], bare: Sequence[str]) -> None:
        """Note which variables are of a function alone, or hold something else than what is assigned to them.

        Args:
            bare: those of the names that are given no value; in a function, they have none.
        """
        for name in [name for name in names if UNKNOWN in name]:
            self._note(line, f"{what} {name} is not read: variables that it sets are unknown", "write them out")
            names.remove(name)
        if what != "export" and any(map(_CHANGING.match, options)):
            self._words.changing |= set(names)
        calls = [block for block in self._blocks if block.kind == "call"]
        if calls and what in ("local", "declare", "typeset") and "-g" not in options:
            calls[-1].own.update(names, self._words.arrays)
            self._unset(bare)

    def _simple(self, line: int, words: list[str], environment: Mapping[str, list[str]]) -> bool:
        """Note a command, or call a function; returns whether it succeeds for certain."""
        if self._skips:
            return False
        if words[0] in self._functions:
            self._call(line, words, environment)
            return False
        own = {name: "".join(values) for name, values in environment.items()}
        self._script.commands.append(Command(line, tuple(words), own))
        self._run_builtin(line, words)
        for place in range(len(words) - 2):
            if _SHELL.fullmatch(words[place]) and re.fullmatch("-[a-z]*c", words[place + 1]):
                self._read_inner(line, words[place + 2], inherits=place == 0)
        return words[0] in _SUCCEEDING

    def _read_inner(self, line: int, text: str, *, inherits: bool) -> None:
        """Read the script of ``bash -c``, which inherits the environment only where it starts on the same machine."""
        known = (self._inherited | set(self._script.exported)) & set(self._variables) if inherits else ()
        inner = _Reader(text, {name: self._variables[name] for name in known}).read()
        self._script.commands += [Command(line, one.words, one.environment) for one in inner.commands]
        self._script.notes += [Note(f"line {line}, within the quotes: {one.text}", one.fix) for one in inner.notes]

    def _run_builtin(self, line: int, words: Sequence[str]) -> None:
        """Apply the effect of a builtin of bash."""
        name, *arguments = words
        if name in _NOT_READ:
            what = f"{' '.join(words[:2])} is not read: what it sets is unknown, or keeps its earlier value"
            self._note(line, what, "write what it sets into the script")
        changed: list[str] = []
        if name in _READING:
            changed = [word for word in arguments if re.fullmatch(NAME, word)]
        elif name == "printf" and arguments[:1] == ["-v"]:
            changed = arguments[1:2]
        elif name == "let":
            changed = [one for word in arguments for one in assigned_names(word)]
        elif name == "unset":
            changed = [word.partition("[")[0] for word in arguments if "[" in word]
            self._unset(set(arguments) - set(changed))
        elif name in ("cd", "pushd", "popd"):
            self._change_folder(name, [word for word in arguments if word != "--"])
        elif name == "mkdir":
            self._made |= set(map(self._path, arguments))
        elif name == "shift" and (left := self._variables.get(ARGUMENTS)):
            count = arguments[0] if arguments else "1"
            if not count.isdecimal() or UNKNOWN in "".join(left[: int(count)]):
                changed = [ARGUMENTS]
            elif int(count) <= len(left):  # else it does nothing
                self._words.assign(ARGUMENTS, left[int(count) :])
        elif name == "set" and "--" in arguments:
            self._words.assign(ARGUMENTS, list(arguments[arguments.index("--") + 1 :]))
        elif name == "set" and arguments and not arguments[0].startswith(("-", "+")):
            self._words.assign(ARGUMENTS, arguments)
        elif name in ("exit", "exec", "return") and self._ends_for_certain(name, arguments):
            self._words.at = len(self._text)
            self._has_ended = name != "return"
        for variable in changed:
            self._words.assign(variable, None)

    def _unset(self, names: Collection[str]) -> None:
        for name in names:
            if self._is_conditional():
                self._words.assign(name, None)
            else:
                self._script.exported.pop(name, None)
                self._variables.pop(name, None)

    def _change_folder(self, command: str, arguments: Sequence[str]) -> None:
        before = self._variables.get("PWD")
        to = self._path(arguments[0] if arguments else self._words.home())
        is_there = to in self._made or (posixpath.isabs(to) and os.path.isdir(to))
        is_known = is_there and command != "popd"
        self._words.assign("PWD", [to] if is_known else None)
        self._words.assign("OLDPWD", before if is_known else None)

    def _path(self, name: str) -> str:
        """Where a folder is; a name that is not absolute where the present one is unknown."""
        return posixpath.normpath(posixpath.join("".join(self._variables.get("PWD", [])), name))

    def _ends_for_certain(self, name: str, arguments: Sequence[str]) -> bool:
        """Whether what is below `exit`, `exec` or `return` never runs."""
        calls = [place for place, block in enumerate(self._blocks) if block.kind == "call"]
        if name == "return":
            if not calls:
                return False
            is_certain = self._is_certain and not any(map(_may_be_left, self._blocks[calls[-1] + 1 :]))
            if not is_certain:  # the rest of the function may not run
                self._blocks[calls[-1]] = replace(self._blocks[calls[-1]], is_conditional=True)
            return is_certain
        is_passed = self._is_piped or not self._is_certain or any(map(_may_be_left, self._blocks))
        return not is_passed and (name == "exit" or bool(arguments))

    def _command(self) -> tuple[list[str], str]:
        """The words up to the end of a command, and the operator that ends it."""
        before: dict[str, list[str]] = {}
        try:
            return self._read_command(before)
        finally:
            self._words.take_back(before)

    def _read_command(self, before: dict[str, list[str]]) -> tuple[list[str], str]:
        """See `_command`.

        Args:
            before: takes the values of variables that are assigned at its beginning: ``A=1 B=$A`` sees them, and the
                words of a command behind them do not.
        """
        words: list[str] = []
        self._words.arrays.clear()
        self._assignments = 0
        compares = False  # within [[ ... ]], where operators are part of it
        while self._words.at < len(self._text):
            char = self._text[self._words.at]
            if char in " \t":
                self._words.at += 1
            elif self._text.startswith("\\\n", self._words.at):
                self._words.at += 2
            elif char == "#":
                self._warn_of_a_comment_in_a_command(words)
                self._words.at = self._words.end_of_line()
            elif compares and char in "&|()<>":
                self._words.at += 1
            elif words[-2:-1] == ["function"] and all(word in _BLOCKS | _WITHIN for word in words[:-2]):
                self._define(words[-1])
                return words[:-2], ";"
            elif self._text.startswith("&>", self._words.at):
                self._skip_redirection()
            elif char in "\n;&|)":
                end = re.compile(r"&&|\|\||\|&|;;|.", re.DOTALL).match(self._text, self._words.at)
                assert end
                self._words.at = end.end()
                if char == "\n":
                    self._skip_heredocs()
                return words, end[0]
            elif char == "(":
                if ended := self._opened_parenthesis(words):
                    return words, ended
            elif char in "<>":
                if self._text.startswith(("<(", ">("), self._words.at):
                    words.append(self._words.substitution())
                else:
                    self._skip_redirection()
            else:
                self._warn_of_a_broken_continuation()
                begins = [word for word in words if word not in _WITHIN | _BLOCKS | _ENDS]
                is_prefix = len(begins) == self._assignments
                written = ASSIGNMENT.match(self._text, self._words.at) or _ELEMENT.match(self._text, self._words.at)
                assigns = is_prefix and written is not None
                if not assigns:
                    self._words.take_back(before)
                declares = not is_prefix and begins[0] in _DECLARING
                found = self._words.word(may_assign=is_prefix, declares=declares)
                self._assignments += assigns and bool(found)
                if assigns and found and (match := ASSIGNMENT.match(found[0])):
                    before.setdefault(match[1], self._variables.get(match[1], []))
                    self._variables[match[1]] = self._words.assigned(found[0])
                words += found
                compares = bool(words) and (words[-1] == "[[" or (compares and words[-1] != "]]"))
        return words, ""

    def _opened_parenthesis(self, words: list[str]) -> str:
        """Read past a ``(``; returns what ends the command, which is nothing within one."""
        text = self._text
        if all(word in _BLOCKS | _WITHIN for word in words) and text.startswith("((", self._words.at):
            begin, self._words.at = self._words.at, end_of_substitution(text, self._words.at - 1)
            for name in assigned_names(text[begin : self._words.at]):
                self._words.assign(name, None)
            words += ["let"]
            return ""
        empty = re.compile(r"\(\s*\)").match(text, self._words.at)
        if words and empty:
            self._words.at = empty.end()
            self._define(words.pop())
            return ";"
        words[:] = [word for word in words if word not in _WITHIN]
        if words and all(word in _BLOCKS for word in words):
            return ";"  # they begin first
        self._words.at += 1
        if not words and not (self._blocks and self._blocks[-1].kind == "case"):
            self._open("(")
        return ""

    def _skip_redirection(self) -> None:
        if heredoc := HEREDOC.match(self._text, self._words.at):
            self._heredocs.append(Heredoc.of(heredoc))
            self._words.at = heredoc.end()
            return
        operator = re.compile(r"[<>&]+(?:[ \t]|\\\n)*").match(self._text, self._words.at)
        assert operator
        self._words.at = operator.end()
        if self._text.startswith(("<(", ">("), self._words.at):
            self._words.substitution()
        elif self._text.startswith("(", self._words.at):
            self._words.at = end_of_substitution(self._text, self._words.at - 1)
        else:
            self._words.word()  # its target

    def _skip_heredocs(self) -> None:
        self._words.at = end_of_heredocs(self._text, self._words.at, self._heredocs)
        self._heredocs = []

    def _warn_of_a_comment_in_a_command(self, words: Sequence[str]) -> None:
        """A comment that ends a command whose next line was to belong to it."""
        begin, end = self._text.rfind("\n", 0, self._words.at) + 1, self._words.end_of_line()
        has_its_own_line = not self._text[begin : self._words.at].strip() and self._text.endswith("\\\n", 0, begin)
        if not re.compile(r"\n[^\n]*\S").match(self._text, end):  # nothing is below
            return
        if has_its_own_line:
            self._note(self._line(), "a comment between the lines of a command ends it; what is below is not passed")
        elif words and self._text.endswith("\\", self._words.at, end):
            what = "the backslash is part of a comment, so the command ends here; what is below is not passed"
            self._note(self._line(), what)

    def _warn_of_a_broken_continuation(self) -> None:
        if match := re.compile(r"\\[ \t]+(#[^\n]*)?(\n|$)").match(self._text, self._words.at):
            what = "a comment follows" if match[1] else "spaces follow"
            self._note(self._line(), f"{what} the backslash, so the command ends here; what is below is not passed")


def _may_be_left(block: _Block) -> bool:
    """Whether a block may not be reached, or ends without ending what is around it."""
    return block.is_conditional or block.is_apart
