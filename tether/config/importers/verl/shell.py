"""The part of bash that training scripts are written in: variables, quotes, arrays, and commands over many lines.

Nothing is run. What only a run of the script could tell (`$(...)`, `if`, the arguments of the script) stays unknown: a
word that depends on it says so, and where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tether.config.importers.verl.arithmetic import NAME, assigned_names
from tether.config.importers.verl.brackets import end_of_substitution
from tether.config.importers.verl.words import ARGUMENTS, ASSIGNMENT, UNKNOWN, WordReader, unknown

_ELEMENT = re.compile(rf"({NAME})\[[^]]*\]\+?=")
_BLOCKS, _ENDS = {"if", "for", "while", "until", "select", "case", "{"}, {"fi", "done", "esac", "}"}
_WITHIN = {"then", "else", "elif", "do", "!", "time"}
_DECLARING = {"export", "declare", "typeset", "local", "readonly"}
_READING = {"read", "mapfile", "readarray", "getopts"}
_SUCCEEDING = {"set", "cd", "pushd", "popd", "mkdir", "echo", "printf", "true", ":", "ulimit", "unset", "shopt"}
_NOT_READ = {"source", ".", "eval"}
_HEREDOC = re.compile(r"""<<-?[ \t]*(?:'([^'\n]*)'|"([^"\n]*)"|\\?([^\s;&|<>()'"\\]+))""")


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


def read_script(text: str, environment: Mapping[str, str]) -> Script:
    """Read a script without running it.

    Args:
        text: of the script.
        environment: variables that it finds set, such as HOME.
    """
    return _Reader(text, {name: [value] for name, value in environment.items()}).read()


@dataclass(frozen=True)
class _Block:
    """A compound command that has not ended yet: ``if``, ``case``, ``{``, ``(``, ..."""

    kind: str
    is_conditional: bool
    outside: Mapping[str, list[str]]
    """Of a subshell: the variables as they are again when it ends; of a function: the arguments."""


class _Reader:
    def __init__(self, text: str, variables: dict[str, list[str]]) -> None:
        self._text, self._variables = text, variables
        self._words = WordReader(text, variables, self._is_conditional)
        self._script = Script()
        self._blocks: list[_Block] = []
        self._is_certain = True  # whether the next command runs whenever its block does: not after && and ||
        self._defines = False  # whether the next block is the body of a function
        self._heredocs: list[str] = []  # the last lines of those that begin in the next line

    def read(self) -> Script:
        while self._words.at < len(self._text):
            line = self._line()
            words, end = self._command()
            kind = self._blocks[-1].kind if self._blocks else ""
            if kind == "case" and end == ")":
                words = []  # a pattern
            is_last = words[:1] == ["exit"] and not self._is_conditional() and kind != "("
            succeeds = self._take(line, words) if words else True
            if is_last:
                break
            if end == ")" and kind == "(":
                self._close()
            if words or end not in ("", "\n"):
                self._is_certain = end != "||" and (end not in ("&&", "|") or (succeeds and self._is_certain))
        return self._script

    def _line(self) -> int:
        return self._text.count("\n", 0, self._words.at) + 1

    def _note(self, line: int, text: str, fix: str = "move comments above the command") -> None:
        self._script.notes.append(Note(f"line {line}: {text}", fix))

    def _is_conditional(self) -> bool:
        return not self._is_certain or any(block.is_conditional for block in self._blocks)

    def _open(self, kind: str) -> None:
        conditional = kind not in ("{", "(") or self._defines or not self._is_certain
        of_function = {ARGUMENTS: self._variables.get(ARGUMENTS, [])} if self._defines else {}
        self._blocks.append(_Block(kind, conditional, dict(self._variables) if kind == "(" else of_function))
        if self._defines:
            self._variables[ARGUMENTS] = [unknown("$@")]  # those that it is called with
        self._defines, self._is_certain = False, True

    def _close(self) -> None:
        if not self._blocks:
            return
        block = self._blocks.pop()
        if block.kind == "(":
            self._variables.clear()
        self._variables |= block.outside

    def _take(self, line: int, words: list[str]) -> bool:
        """Open and close blocks, assign, or note a command.

        Returns:
            Whether it succeeds for certain, so that what follows ``&&`` runs.
        """
        if words[0] == "function":
            words, self._defines = words[2:], True
        while words and words[0] in _BLOCKS | _ENDS | _WITHIN:
            word = words.pop(0)
            if word in _ENDS:
                self._close()
            elif word in _BLOCKS:
                self._open(word)
            if word in _BLOCKS - {"{"}:
                what = f"{word} ... is not evaluated; variables that are set in it are unknown"
                self._note(line, what, "take what is to run out of it")
            if word in ("for", "select", "case"):
                if word != "case" and words:
                    self._words.assign(words[0], None)
                return False
        declares = bool(words) and words[0] in _DECLARING
        is_arithmetic = declares and words[0] != "export" and any(re.match("-[a-zA-Z]*i", word) for word in words[1:])
        rest = [word for word in words[1:] if not word.startswith("-")] if declares else words
        assigned: dict[str, list[str] | None] = {}
        names: list[str] = []
        while rest and (declares or ASSIGNMENT.match(rest[0]) or _ELEMENT.match(rest[0])):
            word = rest.pop(0)
            if match := ASSIGNMENT.match(word):
                before = "".join(self._variables.get(match[1], [])) if match[2] else ""
                assigned[match[1]] = None if is_arithmetic else [before + word[match.end() :]]
            elif match := _ELEMENT.match(word):
                assigned[match[1]] = None
            names.append(match[1] if match else word)
        if rest:
            environment = {name: "".join(values or [unknown(f"${name}")]) for name, values in assigned.items()}
            self._script.commands.append(Command(line, tuple(rest), environment))
            self._run_builtin(line, rest)
            return rest[0] in _SUCCEEDING
        for name, values in assigned.items():
            self._words.assign(name, values)
        if declares and words[0] == "export":
            self._script.exported |= {name: "".join(self._variables.get(name, [""])) for name in names}
        return True

    def _run_builtin(self, line: int, words: Sequence[str]) -> None:
        """Apply the effect of a builtin of bash on the variables."""
        name, *arguments = words
        if name in _NOT_READ:
            what = (
                f"{' '.join(words[:2])} is not read: variables that it sets are unknown, or keep their earlier values"
            )
            self._note(line, what.replace(UNKNOWN, ""), "write what it sets into the script")
        changed: list[str] = []
        if name in _READING:
            changed = [word for word in arguments if re.fullmatch(NAME, word)]
        elif name == "printf" and arguments[:1] == ["-v"]:
            changed = arguments[1:2]
        elif name == "let":
            changed = [one for word in arguments for one in assigned_names(word)]
        for variable in changed:
            self._words.assign(variable, None)
        if name == "unset":
            for variable in arguments:
                self._script.exported.pop(variable, None)
                if self._is_conditional():
                    self._words.assign(variable, None)
                else:
                    self._variables.pop(variable, None)
        elif name == "shift":
            self._words.assign(ARGUMENTS, None)
        elif name == "set" and "--" in arguments:
            self._words.assign(ARGUMENTS, list(arguments[arguments.index("--") + 1 :]))

    def _command(self) -> tuple[list[str], str]:
        """The words up to the end of a command, and the operator that ends it."""
        words: list[str] = []
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
            elif char in "\n;&|)":
                end = re.compile(r"&&|\|\||;;|.", re.DOTALL).match(self._text, self._words.at)
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
                may_assign = all(word in _DECLARING | _WITHIN or ASSIGNMENT.match(word) for word in words)
                words += self._words.word(may_assign=may_assign)
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
        if words and empty:  # the name of a function
            self._words.at, self._defines = empty.end(), True
            words.clear()
            return "\n"
        self._words.at += 1
        if not words and not (self._blocks and self._blocks[-1].kind == "case"):
            self._open("(")
        return ""

    def _skip_redirection(self) -> None:
        heredoc = None if self._text.startswith("<<<", self._words.at) else _HEREDOC.match(self._text, self._words.at)
        if heredoc:
            self._heredocs.append(heredoc[1] or heredoc[2] or heredoc[3] or "")
            self._words.at = heredoc.end()
            return
        self._words.at += 1
        while self._text[self._words.at : self._words.at + 1] in ("<", ">", "&", " "):
            self._words.at += 1
        if self._text.startswith("(", self._words.at):
            self._words.at = end_of_substitution(self._text, self._words.at - 1)
        else:
            self._words.word()  # its target

    def _skip_heredocs(self) -> None:
        for last in self._heredocs:
            end = re.compile(rf"^\t*{re.escape(last)}$\n?", re.MULTILINE).search(self._text, self._words.at)
            self._words.at = end.end() if end else len(self._text)
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
