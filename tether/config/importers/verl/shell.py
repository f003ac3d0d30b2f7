"""The part of bash that training scripts are written in: variables, quotes, arrays, and commands over many lines.

Nothing is run. What only a run of the script could tell (`$(...)`, `if`, positional parameters) stays unknown: a word
that depends on it says so, and where.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

UNKNOWN = "\0"
"""Stands before and after what is not known, as it is written in the script."""
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=")
_PARAMETER = re.compile(rf"\$({_NAME}|[@*])")
_BRACED = re.compile(rf"(?P<name>{_NAME})(?P<all>\[[@*]\])?(?P<or>:?-(?P<default>.*))?|[@*](:\d+)?", re.DOTALL)
_OPENING, _CLOSING = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}
_WITHIN = {"then", "else", "elif", "do", "!", "{", "}", "time"}
_BUILTINS = {"export", "declare", "local", "readonly"}
_NUMBER = re.compile(r"0|-?[1-9]\d*")
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_WHOLE = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: math.trunc(Fraction(left, right)),  # towards zero, as bash does
    ast.Mod: lambda left, right: left - right * math.trunc(Fraction(left, right)),
}  # fmt: skip


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
    return _Reader(text, environment).read()


class _Reader:
    def __init__(self, text: str, environment: Mapping[str, str]) -> None:
        self._text, self._at = text, 0
        self._variables: dict[str, list[str]] = {name: [value] for name, value in environment.items()}
        self._script = Script()
        self._depth = 0  # of what depends on a condition
        self._heredocs: list[str] = []  # the last lines of those that begin in the next line

    def read(self) -> Script:
        while self._at < len(self._text):
            line = self._line()
            words = self._command()
            if words:
                self._take(line, words)
        return self._script

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _note(self, line: int, text: str, fix: str = "move comments above the command") -> None:
        self._script.notes.append(Note(f"line {line}: {text}", fix))

    def _take(self, line: int, words: list[str]) -> None:
        """Assign, or note a command."""
        while words and words[0] in _OPENING | _CLOSING | _WITHIN:
            word = words.pop(0)
            self._depth += (word in _OPENING) - (word in _CLOSING)
            if word in _OPENING:
                what = f"{word} ... is not evaluated; variables that are set in it are unknown"
                self._note(line, what, "take what is to run out of it")
                return
        assigned: dict[str, str] = {}
        is_builtin = bool(words) and words[0] in _BUILTINS
        rest = words[1:] if is_builtin else words
        while rest and (match := _ASSIGNMENT.match(rest[0])):
            name, value = match[1], rest.pop(0)[match.end() :]
            assigned[name] = "".join(self._variables.get(name, [])) + value if match[2] else value
        if rest and not is_builtin:
            self._script.commands.append(Command(line, tuple(rest), assigned))
            return
        for name, value in assigned.items():
            self._variables[name] = [_unknown(f"${name}")] if self._depth else [value]
        if is_builtin and words[0] == "export":
            names = [*assigned, *(word for word in rest if not word.startswith("-"))]
            self._script.exported |= {name: "".join(self._variables.get(name, [""])) for name in names}

    def _command(self) -> list[str]:
        """The words up to the end of a command."""
        words: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._warn_of_a_comment_in_a_command()
                self._at = self._end_of_line()
            elif char in "\n;&|":
                self._at += 1
                if char == "\n":
                    self._skip_heredocs()
                break
            elif char in "()<>":
                self._skip_operator(char)
            else:
                self._warn_of_a_broken_continuation()
                may_assign = all(word in _BUILTINS or _ASSIGNMENT.match(word) for word in words)
                words += self._word(may_assign=may_assign)
        return words

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _skip_operator(self, char: str) -> None:
        heredoc = None if self._text.startswith("<<<", self._at) else _HEREDOC.match(self._text, self._at)
        if heredoc:
            self._heredocs.append(heredoc[2])
            self._at = heredoc.end()
            return
        self._at += 1
        if char in "<>":  # a redirection, with its target
            while self._text[self._at : self._at + 1] in ("<", ">", "&", " "):
                self._at += 1
            self._word()

    def _skip_heredocs(self) -> None:
        for last in self._heredocs:
            end = re.compile(rf"^\t*{last}$\n?", re.MULTILINE).search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._heredocs = []

    def _warn_of_a_comment_in_a_command(self) -> None:
        """A line of its own between lines that backslashes join, and so the end of them."""
        joined = re.search(r"\\\n[ \t]*$", self._text[: self._at])
        if joined and re.compile(r"[^\n]*\n[ \t]*[^\s]").match(self._text, self._at):
            self._note(self._line(), "a comment between the lines of a command ends it; what is below is not passed")

    def _warn_of_a_broken_continuation(self) -> None:
        if match := re.compile(r"\\[ \t]+(#[^\n]*)?(\n|$)").match(self._text, self._at):
            what = "a comment follows" if match[1] else "spaces follow"
            self._note(self._line(), f"{what} the backslash, so the command ends here; what is below is not passed")

    def _word(self, *, may_assign: bool = False) -> list[str]:
        """One word; several, or none, where an unquoted variable is split, which an assignment's is not."""
        words: list[str] = []
        current, is_quoted = "", False
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t\n;&|()<>":
                if char == "(" and _ASSIGNMENT.fullmatch(current):
                    self._array(current)
                    return []
                if char in "<>" and current.isdecimal() and not words:
                    return []  # the file descriptor of a redirection
                break
            if char == "\\":
                follows = self._text[self._at + 1 : self._at + 2]
                current += "" if follows == "\n" else follows
                self._at += 2
            elif char == "'":
                end = self._text.find("'", self._at + 1)
                end = len(self._text) if end < 0 else end
                current, is_quoted = current + self._text[self._at + 1 : end], True
                self._at = end + 1
            elif char == '"':
                parts = self._quoted()
                is_quoted = is_quoted or bool(parts)
                words += [current + parts[0], *parts[1:-1]] if len(parts) > 1 else []
                current = parts[-1] if len(parts) > 1 else current + "".join(parts)
            elif char in "$`":
                assigns = may_assign and bool(_ASSIGNMENT.match(current))
                value = " ".join(self._expansion())
                parts = [value] if assigns or UNKNOWN in value else re.split(r"[ \t\n]+", value)
                current += parts[0]
                if len(parts) > 1:
                    words += [current, *parts[1:-1]] if current or is_quoted else parts[1:-1]
                    current, is_quoted = parts[-1], False  # quotes before the split are those of the first word
            else:
                current += char
                self._at += 1
        return [*words, current] if current or is_quoted else words

    def _array(self, assignment: str) -> None:
        """``NAME=( ... )``, which may have comments and many lines."""
        match = _ASSIGNMENT.fullmatch(assignment)
        assert match
        self._at += 1
        items: list[str] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            char = self._text[self._at]
            if char in " \t\n":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._at = self._end_of_line()
            else:
                items += self._word()
        self._at += 1
        before = self._variables.get(match[1], []) if match[2] else []
        self._variables[match[1]] = [_unknown(f"${match[1]}")] if self._depth else [*before, *items]

    def _quoted(self) -> list[str]:
        """Text in double quotes; the elements of ``"${NAME[@]}"``, of which there may be none."""
        self._at += 1
        parts, has_text = [""], False
        while self._at < len(self._text) and self._text[self._at] != '"':
            char = self._text[self._at]
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                follows = self._text[self._at + 1]
                parts[-1] += "" if follows == "\n" else follows
                self._at, has_text = self._at + 2, True
            elif char in "$`":
                values = self._expansion()
                has_text = has_text or bool(values)
                parts = [*parts[:-1], parts[-1] + values[0], *values[1:]] if values else parts
            else:
                parts[-1] += char
                self._at, has_text = self._at + 1, True
        is_empty_list = not has_text and self._text[self._at - 1 : self._at] != '"'
        self._at += 1
        return [] if is_empty_list else parts

    def _expansion(self) -> list[str]:
        """The value of what begins with $; of an array all its elements."""
        begin = self._at
        if match := _PARAMETER.match(self._text, begin):
            self._at = match.end()
            if match[1] in "@*":
                return []
            if match[1] in self._variables:
                return self._variables[match[1]][:1]
        elif self._text.startswith("${", begin):
            self._at = self._end_of_braces(begin)
            braced = _BRACED.fullmatch(self._text[begin + 2 : self._at - 1])
            if braced and braced["name"] is None:
                return []
            if braced:
                values = self._variables.get(braced["name"])
                is_empty = values in ([], [""]) and (braced["or"] or "").startswith(":")
                if values is not None and not is_empty:
                    return values if braced["all"] else values[:1]
                if braced["default"] is not None:
                    return [_Reader(braced["default"], {}).filled(self._variables)]
        elif self._text.startswith(("$(", "`"), begin):
            self._at = self._end_of_substitution(begin)
            written = self._text[begin : self._at]
            if written.startswith("$((") and (value := self._arithmetic(written[3:-2])) is not None:
                return [str(value)]
        else:
            self._at += 1
            return ["$"]
        return [_unknown(self._text[begin : self._at])]

    def _arithmetic(self, text: str) -> int | None:
        """The whole number that ``$((...))`` is, where its variables are known."""
        known = {name: values[0] for name, values in self._variables.items() if values and _NUMBER.fullmatch(values[0])}
        digits = re.sub(rf"\$?({_NAME})|\$\{{({_NAME})\}}", lambda name: known.get(name[1] or name[2], "?"), text)
        try:
            return _whole(ast.parse(digits.replace("/", "//").strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def filled(self, variables: Mapping[str, list[str]]) -> str:
        """The whole text as in double quotes, with these variables."""
        self._variables = dict(variables)
        self._text = f'"{self._text.strip(chr(34))}"'
        return " ".join(self._quoted())

    def _end_of_braces(self, begin: int) -> int:
        """Behind a ``${...}``, in whose default others may be."""
        depth, at = 1, begin + 2
        while at < len(self._text) and depth:
            if self._text.startswith("$(", at):
                at = self._end_of_substitution(at)
            elif self._text.startswith("${", at):
                depth, at = depth + 1, at + 2
            else:
                depth, at = depth - (self._text[at] == "}"), at + 1
        return at

    def _end_of_substitution(self, begin: int) -> int:
        if self._text[begin] == "`":
            end = self._text.find("`", begin + 1)
            return len(self._text) if end < 0 else end + 1
        depth, at = 0, begin + 1
        while at < len(self._text):
            depth += {"(": 1, ")": -1}.get(self._text[at], 0)
            at += 1
            if depth == 0:
                break
        return at


def _whole(node: ast.expr) -> int:
    """The value of an expression of whole numbers.

    Raises:
        ValueError: it is something else.
    """
    match node:
        case ast.Constant(value=int(value)) if type(value) is int:
            return value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return -_whole(operand) if isinstance(node.op, ast.USub) else _whole(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _WHOLE:
            return int(_WHOLE[type(sign)](_whole(left), _whole(right)))
    raise ValueError(ast.dump(node))


def _unknown(written: str) -> str:
    return f"{UNKNOWN}{written}{UNKNOWN}"
