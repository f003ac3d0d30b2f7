"""A word of bash: quotes, variables and arrays filled in."""

from __future__ import annotations

import re
from collections.abc import Callable

from tether.config.importers.verl.arithmetic import NAME, whole_number
from tether.config.importers.verl.brackets import end_of_braces, end_of_substitution

UNKNOWN = "\0"
"""Stands before and after what is not known, as it is written in the script."""
ARGUMENTS = "@"
"""Among the variables: the arguments, where `set -- ...` has set them; without, the script is run without any."""
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_PARAMETER = re.compile(rf"\$({NAME}|[@*#?$!0-9])")
_BRACED = re.compile(
    rf"(?P<name>{NAME}|\d+|[@*])(?P<all>\[[@*]\])?((?P<colon>:?)(?P<sign>[-=?+])(?P<word>.*))?", re.DOTALL
)
_ARGUMENTS_FROM = re.compile(r"[@*]:\d+")


def unknown(written: str) -> str:
    """Mark a part of a script as not known."""
    return f"{UNKNOWN}{written}{UNKNOWN}"


class WordReader:
    """Reads words of a script, and keeps its variables.

    Args:
        text: of the script.
        variables: name -> elements; an array has any number of them. They are changed.
        is_conditional: whether only a run could tell that the present command is reached.
    """

    def __init__(self, text: str, variables: dict[str, list[str]], is_conditional: Callable[[], bool]) -> None:
        self._text = text
        self.at = 0  # in the text: what is read next
        self.variables = variables
        self._is_conditional = is_conditional

    def assign(self, name: str, values: list[str] | None) -> None:
        """Set a variable; None: to what only a run could tell."""
        self.variables[name] = [unknown(f"${name}")] if values is None or self._is_conditional() else values

    def end_of_line(self) -> int:
        """Place of the next end of a line."""
        end = self._text.find("\n", self.at)
        return len(self._text) if end < 0 else end

    def word(self, *, may_assign: bool = False) -> list[str]:
        """One word; several, or none, where an unquoted variable is split, which an assignment's is not."""
        words: list[str] = []
        current, is_quoted = "", False
        while self.at < len(self._text):
            char = self._text[self.at]
            if char in " \t\n;&|()<>":
                if char == "(" and (match := ASSIGNMENT.fullmatch(current)):
                    self._array(match[1], is_appended=bool(match[2]))
                    return []
                if char in "<>" and current.isdecimal() and not words:
                    return []  # the file descriptor of a redirection
                break
            if char == "\\":
                follows = self._text[self.at + 1 : self.at + 2]
                current += "" if follows == "\n" else follows
                self.at += 2
            elif char == "'":
                end = self._text.find("'", self.at + 1)
                end = len(self._text) if end < 0 else end
                current, is_quoted = current + self._text[self.at + 1 : end], True
                self.at = end + 1
            elif char == '"':
                parts = self._quoted()
                is_quoted = is_quoted or bool(parts)
                words += [current + parts[0], *parts[1:-1]] if len(parts) > 1 else []
                current = parts[-1] if len(parts) > 1 else current + "".join(parts)
            elif self._text.startswith(("$'", '$"'), self.at):
                self.at += 1
                if self._text[self.at] == "'" and (
                    match := re.compile(r"'((?:[^'\\]|\\.)*)'").match(self._text, self.at)
                ):
                    current += match[1] if "\\" not in match[1] else unknown("$" + match[0])
                    is_quoted, self.at = True, match.end()
            elif (
                char == "~"
                and re.compile(r"~(?=[/\s;]|$)").match(self._text, self.at)
                and (ASSIGNMENT.fullmatch(current) or not (current or is_quoted))
            ):
                self.at += 1
                current += "".join(self.variables.get("HOME", [unknown("~")]))
            elif char in "$`":
                assigns = may_assign and bool(ASSIGNMENT.match(current))
                begin, value = self.at, " ".join(self._expansion())
                is_whole = assigns or UNKNOWN in value or '"' in self._text[begin : self.at]  # a default in quotes
                parts = [value] if is_whole else re.split(r"[ \t\n]+", value)
                current += parts[0]
                if len(parts) > 1:
                    words += [current, *parts[1:-1]] if current or is_quoted else parts[1:-1]
                    current, is_quoted = parts[-1], False  # quotes before the split are those of the first word
            else:
                current += char
                self.at += 1
        return [*words, current] if current or is_quoted else words

    def _array(self, name: str, *, is_appended: bool) -> None:
        """``NAME=( ... )``, which may have comments and many lines."""
        self.at += 1
        items: list[str] = []
        while self.at < len(self._text) and self._text[self.at] != ")":
            char = self._text[self.at]
            if self._text.startswith(("<(", ">("), self.at):
                items.append(self.substitution())
            elif char in " \t\n;&|<>(":  # bash takes no operator here
                self.at += 1
            elif self._text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = self.end_of_line()
            else:
                items += self.word()
        self.at += 1
        has_places = any(re.match(r"\[[^]]*\]=", item) for item in items)
        before = self.variables.get(name, []) if is_appended else []
        self.assign(name, None if has_places else [*before, *items])

    def substitution(self) -> str:
        """``$(...)``, ``<(...)`` and the like, which only a run could tell."""
        begin, self.at = self.at, end_of_substitution(self._text, self.at)
        return unknown(self._text[begin : self.at])

    def _quoted(self) -> list[str]:
        """Text in double quotes; the elements of ``"${NAME[@]}"``, of which there may be none."""
        self.at += 1
        parts, has_text = [""], False
        while self.at < len(self._text) and self._text[self.at] != '"':
            char = self._text[self.at]
            if char == "\\" and self._text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                follows = self._text[self.at + 1]
                parts[-1] += "" if follows == "\n" else follows
                self.at, has_text = self.at + 2, True
            elif char in "$`":
                values = self._expansion(in_quotes=True)
                has_text = has_text or bool(values)
                parts = [*parts[:-1], parts[-1] + values[0], *values[1:]] if values else parts
            else:
                parts[-1] += char
                self.at, has_text = self.at + 1, True
        is_empty_list = not has_text and self._text[self.at - 1 : self.at] != '"'
        self.at += 1
        return [] if is_empty_list else parts

    def _expansion(self, *, in_quotes: bool = False) -> list[str]:
        """The value of what begins with $; of an array all its elements."""
        begin = self.at
        if match := _PARAMETER.match(self._text, begin):
            self.at = match.end()
            values = self._values(match[1])
            if values is not None:
                return values if match[1] in "@*" else values[:1]
        elif self._text.startswith("${", begin):
            self.at = end_of_braces(self._text, begin)
            inside = self._text[begin + 2 : self.at - 1]
            if _ARGUMENTS_FROM.fullmatch(inside) and not self._values("@"):
                return []
            if (braced := _BRACED.fullmatch(inside)) and (values := self._braced(braced, in_quotes)) is not None:
                return values
        elif self._text.startswith(("$(", "`"), begin):
            self.at = end_of_substitution(self._text, begin)
            written = self._text[begin : self.at]
            if written.startswith("$((") and (value := whole_number(written[3:-2], self.variables)) is not None:
                return [str(value)]
        else:
            self.at += 1
            return ["$"]
        return [unknown(self._text[begin : self.at])]

    def _values(self, name: str) -> list[str] | None:
        """The elements of a variable, or the arguments; None: unknown, or not set."""
        if name in "@*":
            return self.variables.get(ARGUMENTS, [])
        if name.isdecimal():
            arguments = self.variables.get(ARGUMENTS)
            is_known = arguments is not None and UNKNOWN not in "".join(arguments) and name != "0"
            return (arguments[int(name) - 1 : int(name)] or [""]) if arguments and is_known else None
        return self.variables.get(name)

    def _braced(self, braced: re.Match[str], in_quotes: bool) -> list[str] | None:
        """The value of ``${NAME}`` and of its forms with a word for where it is not set; None: unknown."""
        name, sign = braced["name"], braced["sign"]
        if name.isdecimal() and UNKNOWN in "".join(self.variables.get(ARGUMENTS, [])):
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
            self.assign(name, [word])
        return [word]

    def _filled(self, word: str, in_quotes: bool) -> str:
        """The word of ``${NAME:-word}``, its variables filled in."""
        inner = WordReader(word, self.variables, self._is_conditional)
        filled = ""
        while inner.at < len(word):
            char = word[inner.at]
            if char in "$`":
                filled += " ".join(inner._expansion(in_quotes=in_quotes))
            elif char == '"':
                filled += " ".join(inner._quoted())
            elif char == "'" and not in_quotes:
                end = word.find("'", inner.at + 1)
                filled += word[inner.at + 1 : end if end >= 0 else None]
                inner.at = end + 1 if end >= 0 else len(word)
            else:
                inner.at += char == "\\" and (
                    not in_quotes or word[inner.at + 1 : inner.at + 2] in ("$", '"', "\\", "}")
                )
                filled += word[inner.at : inner.at + 1]
                inner.at += 1
        return filled
