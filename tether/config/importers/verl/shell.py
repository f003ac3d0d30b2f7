"""The part of bash that training scripts are written in: variables, quotes, arrays, and commands over many lines.

Nothing is run. What only a run of the script could tell (`$(...)`, `if`, the arguments of the script) stays unknown: a
word that depends on it says so, and where.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tether.config.importers.verl.arithmetic import NAME, assigned_names, whole_number
from tether.config.importers.verl.brackets import end_of_braces, end_of_substitution

UNKNOWN = "\0"
"""Stands before and after what is not known, as it is written in the script."""
_ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_ELEMENT = re.compile(rf"({NAME})\[[^]]*\]\+?=")
_PARAMETER = re.compile(rf"\$({NAME}|[@*#?$!0-9])")
_BRACED = re.compile(
    rf"(?P<name>{NAME}|\d+|[@*])(?P<all>\[[@*]\])?((?P<colon>:?)(?P<sign>[-=?+])(?P<word>.*))?", re.DOTALL
)
_ARGUMENTS_FROM = re.compile(r"[@*]:\d+")
_BLOCKS, _ENDS = {"if", "for", "while", "until", "select", "case", "{"}, {"fi", "done", "esac", "}"}
_WITHIN = {"then", "else", "elif", "do", "!", "time"}
_DECLARING = {"export", "declare", "typeset", "local", "readonly"}
_READING = {"read", "mapfile", "readarray", "getopts"}
_SUCCEEDING = {"set", "cd", "pushd", "popd", "mkdir", "echo", "printf", "true", ":", "ulimit", "unset", "shopt"}
_NOT_READ = {"source", ".", "eval"}
_HEREDOC = re.compile(r"""<<-?[ \t]*(?:'([^'\n]*)'|"([^"\n]*)"|\\?([^\s;&|<>()'"\\]+))""")
_ARGUMENTS = "@"
"""Among the variables: the arguments, where `set -- ...` has set them; without, the script is run without any."""


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
        self._text, self._at = text, 0
        self._variables = variables  # which it changes
        self._script = Script()
        self._blocks: list[_Block] = []
        self._is_certain = True  # whether the next command runs whenever its block does: not after && and ||
        self._defines = False  # whether the next block is the body of a function
        self._heredocs: list[str] = []  # the last lines of those that begin in the next line

    def read(self) -> Script:
        while self._at < len(self._text):
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
        return self._text.count("\n", 0, self._at) + 1

    def _note(self, line: int, text: str, fix: str = "move comments above the command") -> None:
        self._script.notes.append(Note(f"line {line}: {text}", fix))

    def _is_conditional(self) -> bool:
        return not self._is_certain or any(block.is_conditional for block in self._blocks)

    def _open(self, kind: str) -> None:
        conditional = kind not in ("{", "(") or self._defines or not self._is_certain
        of_function = {_ARGUMENTS: self._variables.get(_ARGUMENTS, [])} if self._defines else {}
        self._blocks.append(_Block(kind, conditional, dict(self._variables) if kind == "(" else of_function))
        if self._defines:
            self._variables[_ARGUMENTS] = [_unknown("$@")]  # those that it is called with
        self._defines, self._is_certain = False, True

    def _close(self) -> None:
        if not self._blocks:
            return
        block = self._blocks.pop()
        if block.kind == "(":
            self._variables.clear()
        self._variables |= block.outside

    def _assign(self, name: str, values: list[str] | None) -> None:
        """Set a variable; None: to what only a run could tell."""
        self._variables[name] = [_unknown(f"${name}")] if values is None or self._is_conditional() else values

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
                    self._assign(words[0], None)
                return False
        declares = bool(words) and words[0] in _DECLARING
        is_arithmetic = declares and words[0] != "export" and any(re.match("-[a-zA-Z]*i", word) for word in words[1:])
        rest = [word for word in words[1:] if not word.startswith("-")] if declares else words
        assigned: dict[str, list[str] | None] = {}
        names: list[str] = []
        while rest and (declares or _ASSIGNMENT.match(rest[0]) or _ELEMENT.match(rest[0])):
            word = rest.pop(0)
            if match := _ASSIGNMENT.match(word):
                before = "".join(self._variables.get(match[1], [])) if match[2] else ""
                assigned[match[1]] = None if is_arithmetic else [before + word[match.end() :]]
            elif match := _ELEMENT.match(word):
                assigned[match[1]] = None
            names.append(match[1] if match else word)
        if rest:
            environment = {name: "".join(values or [_unknown(f"${name}")]) for name, values in assigned.items()}
            self._script.commands.append(Command(line, tuple(rest), environment))
            self._run_builtin(line, rest)
            return rest[0] in _SUCCEEDING
        for name, values in assigned.items():
            self._assign(name, values)
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
            self._assign(variable, None)
        if name == "unset":
            for variable in arguments:
                self._script.exported.pop(variable, None)
                if self._is_conditional():
                    self._assign(variable, None)
                else:
                    self._variables.pop(variable, None)
        elif name == "shift":
            self._assign(_ARGUMENTS, None)
        elif name == "set" and "--" in arguments:
            self._assign(_ARGUMENTS, list(arguments[arguments.index("--") + 1 :]))

    def _command(self) -> tuple[list[str], str]:
        """The words up to the end of a command, and the operator that ends it."""
        words: list[str] = []
        compares = False  # within [[ ... ]], where operators are part of it
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._warn_of_a_comment_in_a_command(words)
                self._at = self._end_of_line()
            elif compares and char in "&|()<>":
                self._at += 1
            elif char in "\n;&|)":
                end = re.compile(r"&&|\|\||;;|.", re.DOTALL).match(self._text, self._at)
                assert end
                self._at = end.end()
                if char == "\n":
                    self._skip_heredocs()
                return words, end[0]
            elif char == "(":
                if ended := self._opened_parenthesis(words):
                    return words, ended
            elif char in "<>":
                if self._text.startswith(("<(", ">("), self._at):
                    words.append(self._substitution())
                else:
                    self._skip_redirection()
            else:
                self._warn_of_a_broken_continuation()
                may_assign = all(word in _DECLARING | _WITHIN or _ASSIGNMENT.match(word) for word in words)
                words += self._word(may_assign=may_assign)
                compares = bool(words) and (words[-1] == "[[" or (compares and words[-1] != "]]"))
        return words, ""

    def _end_of_line(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _opened_parenthesis(self, words: list[str]) -> str:
        """Read past a ``(``; returns what ends the command, which is nothing within one."""
        text = self._text
        if all(word in _BLOCKS | _WITHIN for word in words) and text.startswith("((", self._at):
            begin, self._at = self._at, end_of_substitution(text, self._at - 1)
            for name in assigned_names(text[begin : self._at]):
                self._assign(name, None)
            words += ["let"]
            return ""
        empty = re.compile(r"\(\s*\)").match(text, self._at)
        if words and empty:  # the name of a function
            self._at, self._defines = empty.end(), True
            words.clear()
            return "\n"
        self._at += 1
        if not words and not (self._blocks and self._blocks[-1].kind == "case"):
            self._open("(")
        return ""

    def _skip_redirection(self) -> None:
        heredoc = None if self._text.startswith("<<<", self._at) else _HEREDOC.match(self._text, self._at)
        if heredoc:
            self._heredocs.append(heredoc[1] or heredoc[2] or heredoc[3] or "")
            self._at = heredoc.end()
            return
        self._at += 1
        while self._text[self._at : self._at + 1] in ("<", ">", "&", " "):
            self._at += 1
        if self._text.startswith("(", self._at):
            self._at = end_of_substitution(self._text, self._at - 1)
        else:
            self._word()  # its target

    def _skip_heredocs(self) -> None:
        for last in self._heredocs:
            end = re.compile(rf"^\t*{re.escape(last)}$\n?", re.MULTILINE).search(self._text, self._at)
            self._at = end.end() if end else len(self._text)
        self._heredocs = []

    def _warn_of_a_comment_in_a_command(self, words: Sequence[str]) -> None:
        """A comment that ends a command whose next line was to belong to it."""
        begin, end = self._text.rfind("\n", 0, self._at) + 1, self._end_of_line()
        has_its_own_line = not self._text[begin : self._at].strip() and self._text.endswith("\\\n", 0, begin)
        if not re.compile(r"\n[^\n]*\S").match(self._text, end):  # nothing is below
            return
        if has_its_own_line:
            self._note(self._line(), "a comment between the lines of a command ends it; what is below is not passed")
        elif words and self._text.endswith("\\", self._at, end):
            what = "the backslash is part of a comment, so the command ends here; what is below is not passed"
            self._note(self._line(), what)

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
                if char == "(" and (match := _ASSIGNMENT.fullmatch(current)):
                    self._array(match[1], is_appended=bool(match[2]))
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
            elif self._text.startswith(("$'", '$"'), self._at):
                self._at += 1
                if self._text[self._at] == "'" and (
                    match := re.compile(r"'((?:[^'\\]|\\.)*)'").match(self._text, self._at)
                ):
                    current += match[1] if "\\" not in match[1] else _unknown("$" + match[0])
                    is_quoted, self._at = True, match.end()
            elif (
                char == "~"
                and re.compile(r"~(?=[/\s;]|$)").match(self._text, self._at)
                and (_ASSIGNMENT.fullmatch(current) or not (current or is_quoted))
            ):
                self._at += 1
                current += "".join(self._variables.get("HOME", [_unknown("~")]))
            elif char in "$`":
                assigns = may_assign and bool(_ASSIGNMENT.match(current))
                begin, value = self._at, " ".join(self._expansion())
                is_whole = assigns or UNKNOWN in value or '"' in self._text[begin : self._at]  # a default in quotes
                parts = [value] if is_whole else re.split(r"[ \t\n]+", value)
                current += parts[0]
                if len(parts) > 1:
                    words += [current, *parts[1:-1]] if current or is_quoted else parts[1:-1]
                    current, is_quoted = parts[-1], False  # quotes before the split are those of the first word
            else:
                current += char
                self._at += 1
        return [*words, current] if current or is_quoted else words

    def _array(self, name: str, *, is_appended: bool) -> None:
        """``NAME=( ... )``, which may have comments and many lines."""
        self._at += 1
        items: list[str] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            char = self._text[self._at]
            if self._text.startswith(("<(", ">("), self._at):
                items.append(self._substitution())
            elif char in " \t\n;&|<>(":  # bash takes no operator here
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "#":
                self._at = self._end_of_line()
            else:
                items += self._word()
        self._at += 1
        has_places = any(re.match(r"\[[^]]*\]=", item) for item in items)
        before = self._variables.get(name, []) if is_appended else []
        self._assign(name, None if has_places else [*before, *items])

    def _substitution(self) -> str:
        """``$(...)``, ``<(...)`` and the like, which only a run could tell."""
        begin, self._at = self._at, end_of_substitution(self._text, self._at)
        return _unknown(self._text[begin : self._at])

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
                values = self._expansion(in_quotes=True)
                has_text = has_text or bool(values)
                parts = [*parts[:-1], parts[-1] + values[0], *values[1:]] if values else parts
            else:
                parts[-1] += char
                self._at, has_text = self._at + 1, True
        is_empty_list = not has_text and self._text[self._at - 1 : self._at] != '"'
        self._at += 1
        return [] if is_empty_list else parts

    def _expansion(self, *, in_quotes: bool = False) -> list[str]:
        """The value of what begins with $; of an array all its elements."""
        begin = self._at
        if match := _PARAMETER.match(self._text, begin):
            self._at = match.end()
            values = self._values(match[1])
            if values is not None:
                return values if match[1] in "@*" else values[:1]
        elif self._text.startswith("${", begin):
            self._at = end_of_braces(self._text, begin)
            inside = self._text[begin + 2 : self._at - 1]
            if _ARGUMENTS_FROM.fullmatch(inside) and not self._values("@"):
                return []
            if (braced := _BRACED.fullmatch(inside)) and (values := self._braced(braced, in_quotes)) is not None:
                return values
        elif self._text.startswith(("$(", "`"), begin):
            self._at = end_of_substitution(self._text, begin)
            written = self._text[begin : self._at]
            if written.startswith("$((") and (value := whole_number(written[3:-2], self._variables)) is not None:
                return [str(value)]
        else:
            self._at += 1
            return ["$"]
        return [_unknown(self._text[begin : self._at])]

    def _values(self, name: str) -> list[str] | None:
        """The elements of a variable, or the arguments; None: unknown, or not set."""
        if name in "@*":
            return self._variables.get(_ARGUMENTS, [])
        if name.isdecimal():
            arguments = self._variables.get(_ARGUMENTS)
            is_known = arguments is not None and UNKNOWN not in "".join(arguments) and name != "0"
            return (arguments[int(name) - 1 : int(name)] or [""]) if arguments and is_known else None
        return self._variables.get(name)

    def _braced(self, braced: re.Match[str], in_quotes: bool) -> list[str] | None:
        """The value of ``${NAME}`` and of its forms with a word for where it is not set; None: unknown."""
        name, sign = braced["name"], braced["sign"]
        if name.isdecimal() and UNKNOWN in "".join(self._variables.get(_ARGUMENTS, [])):
            return None
        values = self._values(name)
        is_set = values is not None and not (values in ([], [""]) and (braced["colon"] or not values))
        if is_set and values is not None and sign != "+":
            return values if braced["all"] or name in "@*" else values[:1]
        if values is not None and any(UNKNOWN in value for value in values):
            return None
        if sign is None or sign == "?":
            return values
        if sign == "+":
            return [self._filled(braced["word"], in_quotes)] if is_set else [""]
        word = self._filled(braced["word"], in_quotes)
        if sign == "=":
            self._assign(name, [word])
        return [word]

    def _filled(self, word: str, in_quotes: bool) -> str:
        """The word of ``${NAME:-word}``, its variables filled in."""
        inner = _Reader(word, self._variables)
        filled = ""
        while inner._at < len(word):
            char = word[inner._at]
            if char in "$`":
                filled += " ".join(inner._expansion(in_quotes=in_quotes))
            elif char == '"':
                filled += " ".join(inner._quoted())
            elif char == "'" and not in_quotes:
                end = word.find("'", inner._at + 1)
                filled += word[inner._at + 1 : end if end >= 0 else None]
                inner._at = end + 1 if end >= 0 else len(word)
            else:
                inner._at += char == "\\" and (
                    not in_quotes or word[inner._at + 1 : inner._at + 2] in ("$", '"', "\\", "}")
                )
                filled += word[inner._at : inner._at + 1]
                inner._at += 1
        return filled


def _unknown(written: str) -> str:
    return f"{UNKNOWN}{written}{UNKNOWN}"
