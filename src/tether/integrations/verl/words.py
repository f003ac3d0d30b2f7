"""A word of bash: quotes, variables and arrays filled in."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

from tether.integrations.verl.arithmetic import NAME, assigned_names, whole_number
from tether.integrations.verl.brackets import end_of_brace_list, end_of_braces, end_of_quotes, end_of_substitution
from tether.integrations.verl.cutting import CUT, LENGTH, cut

UNKNOWN = "\0"
"""Stands before and after what is not known, as it is written in the script."""
ARGUMENTS = "@"
"""Among the variables: the arguments, where `set -- ...` has set them; without, the script is run without any."""
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=")
_PARAMETER = re.compile(rf"\$({NAME}|[@*#?$!0-9-])")
_BRACED = re.compile(
    rf"(?P<name>{NAME}|\d+|[@*])(?:\[(?:(?P<all>[@*])|(?P<place>\d+))\])?"
    r"((?P<colon>:?)(?P<sign>[-=?+])(?P<word>.*))?",
    re.DOTALL,
)
_SLICE = re.compile(rf"(?:({NAME})\[@\]|@):(\d+)(?::(\d+))?")
_HOME = re.compile(r"(~[^\s/:'\"\\$`;&|()<>]*)(?=[\s/:;&|()<>]|\\\n|$)")
_COMMENT = re.compile(r"`\s*#[^\n]*`")
_USUAL = " \t\n"
_PATH_COMMAND = re.compile(r"(?:\$\(|`)\s*(pwd|basename|dirname)\b(.*)[)`]", re.DOTALL)


_MOST = 1_000_000  # characters of an expansion, which no setting has


class TooLong(Exception):
    """An expansion, or the way to it, has no end that is worth waiting for."""


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
        self.changing: set[str] = set()  # variables that hold something else than what is assigned to them
        self.arrays: set[str] = set()  # those that the present command assigns
        self._is_conditional = is_conditional
        self._is_pattern = False  # whether the last word may be one of files that are there
        self._is_in_quotes = False  # whether the last expansion was that of a default in quotes: of whole words

    def assign(self, name: str, values: list[str] | None) -> None:
        """Set a variable; None: to what only a run could tell."""
        is_known = values is not None and name not in self.changing and not self._is_conditional()
        self.variables[name] = values if values is not None and is_known else [unknown(f"${name}")]

    def assigned(self, word: str) -> list[str]:
        """The elements of a variable after ``NAME=value`` or ``NAME+=value``, which are of an array's first one."""
        match = ASSIGNMENT.match(word)
        assert match
        old = self.variables.get(match[1], [])
        return ["".join(old[:1] if match[2] else []) + word[match.end() :], *old[1:]]

    def take_back(self, before: dict[str, list[str]]) -> None:
        """Give variables their former elements, of which there are none where they were not set."""
        for name, values in before.items():
            self.variables[name] = values
            if not values:
                del self.variables[name]
        before.clear()

    def end_of_line(self) -> int:
        """Place of the next end of a line."""
        end = self._text.find("\n", self.at)
        return len(self._text) if end < 0 else end

    def word(self, *, may_assign: bool = False, declares: bool = False, is_element: bool = False) -> list[str]:
        """One word; several, or none, where an unquoted variable is split, which an assignment's is not.

        Args:
            may_assign: whether it is an assignment if it looks like one.
            declares: whether it is an argument of `declare` and the like.
            is_element: whether it is one of an array.
        """
        words: list[str] = []
        current, is_quoted, self._is_pattern = "", False, False
        has_name = not is_element and ASSIGNMENT.match(self._text, self.at) is not None  # as written, an assignment
        plain = self.at  # behind the last character that is neither quoted nor filled in
        while self.at < len(self._text):
            char = self._text[self.at]
            if char in " \t\n;&|()<>":
                if char == "(" and (match := ASSIGNMENT.fullmatch(current)):
                    self._array(match[1], is_appended=bool(match[2]))
                    return []
                if char in "<>" and current.isdecimal() and not words:
                    return []  # the file descriptor of a redirection
                break
            assigns = (may_assign or declares) and has_name and "=" in current
            if char == "\\":
                follows = self._text[self.at + 1 : self.at + 2]
                current += "" if follows == "\n" else follows
                self.at += 2
            elif char == "{" and not (assigns and may_assign) and (listed := end_of_brace_list(self._text, self.at)):
                current += unknown(self._text[self.at : listed])  # several words
                self.at = listed
            elif char == "'":
                end = self._text.find("'", self.at + 1)
                end = len(self._text) if end < 0 else end
                current, is_quoted = current + self._text[self.at + 1 : end], True
                self.at = end + 1
            elif char == '"':
                parts = self._quoted()
                parts = [" ".join(parts)] if assigns and parts else parts
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
                and plain == self.at
                and (not current or (has_name and (current[-1] == ":" or ASSIGNMENT.fullmatch(current))))
                and (home := _HOME.match(self._text, self.at))
            ):
                current += self.home(home[1])
                self.at = home.end(1)
            elif char in "$`":
                begin, values = self.at, self._expansion()
                if self._is_in_quotes and not assigns:
                    is_quoted = is_quoted or bool(values)
                    parts = values or [""]
                else:
                    value = " ".join(values)
                    is_whole = assigns or not value or UNKNOWN in value
                    if not is_whole and not self._splits_as_usual():
                        value, is_whole = unknown(self._text[begin : self.at]), True
                    parts = [value] if is_whole else re.split(r"[ \t\n]+", value)
                    self._is_pattern |= "*" in value or "?" in value
                current += parts[0]
                if len(parts) > 1:
                    words += [current, *parts[1:-1]] if current or is_quoted else parts[1:-1]
                    current, is_quoted = parts[-1], False  # quotes before the split are those of the first word
            else:
                current += char
                self._is_pattern |= char in "*?"
                self.at += 1
                plain = self.at
        return [*words, current] if current or is_quoted else words

    def home(self, written: str = "~") -> str:
        """The folder of ``~``; that of another user, ``~+`` and the like are unknown."""
        if "." in written:  # no user's: Hydra's ~key.of.a.section stays as it is
            return written
        return "".join(self.variables.get("HOME", [unknown("~")])) if written == "~" else unknown(written)

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
                begin = self.at
                found = self.word(is_element=True)
                written = self._text[begin : self.at]
                items += [unknown(written)] if self._is_pattern and "=" not in "".join(found) else found
        self.at += 1
        is_text = bool(self.word())  # with what follows, it is no array
        has_places = any(re.match(r"\[[^]]*\]=", item) for item in items)
        before = self.variables.get(name, []) if is_appended else []
        if is_appended and self._is_conditional():
            self.variables[name] = [*before, *map(_if_reached, items)]
        else:
            self.assign(name, None if has_places or is_text else [*before, *items])
        self.arrays.add(name)

    def substitution(self) -> str:
        """``$(...)``, ``<(...)`` and the like, which only a run could tell."""
        begin, self.at = self.at, end_of_substitution(self._text, self.at)
        return unknown(self._text[begin : self.at])

    def _quoted(self) -> list[str]:
        """Text in double quotes; the elements of ``"${NAME[@]}"``, of which there may be none."""
        self.at += 1
        parts, has_empty_list = [""], False
        while self.at < len(self._text) and self._text[self.at] != '"':
            char = self._text[self.at]
            if char == "\\" and self._text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                follows = self._text[self.at + 1]
                parts[-1] += "" if follows == "\n" else follows
                self.at += 2
            elif char in "$`":
                values = self._expansion(in_quotes=True)
                has_empty_list = has_empty_list or not values
                parts = [*parts[:-1], parts[-1] + values[0], *values[1:]] if values else parts
            else:
                parts[-1] += char
                self.at += 1
        self.at += 1
        return [] if has_empty_list and parts == [""] else parts

    def _splits_as_usual(self) -> bool:
        """Whether unquoted values are split where they have blanks."""
        return self.variables.get("IFS", [_USUAL]) == [_USUAL]

    def _expansion(self, *, in_quotes: bool = False) -> list[str]:
        """The value of what begins with $; of an array all its elements."""
        begin, self._is_in_quotes = self.at, False
        values: list[str] | None = None
        if match := _PARAMETER.match(self._text, begin):
            self.at = match.end()
            values = self._values(match[1])
            if match[1].isidentifier() and (rest := re.compile(r"\\\n\w+").match(self._text, self.at)):
                self.at, values = rest.end(), None  # its name goes on in the next line
            if values is not None and in_quotes and match[1] == "*":
                values = self._joined(values)
            elif values is not None and match[1] not in "@*":
                values = values[:1] or [""]
        elif self._text.startswith("${", begin):
            self.at = end_of_braces(self._text, begin)
            inside = self._text[begin + 2 : self.at - 1]
            if sliced := _SLICE.fullmatch(inside):
                values = self._slice(sliced)
            elif braced := _BRACED.fullmatch(inside):
                values = self._braced(braced, in_quotes)
            elif (match := CUT.fullmatch(inside)) and (value := self._known(match["name"])) is not None:
                found = cut(value, match["sign"], match["rest"], self._filled_text)
                values = None if found is None else [found]
            elif (match := LENGTH.fullmatch(inside)) and (value := self._known(match[1])) is not None:
                values = [str(len(value))] if value.isascii() else None
        elif self._text.startswith(("$(", "`"), begin):
            self.at = end_of_substitution(self._text, begin)
            written = self._text[begin : self.at]
            if _COMMENT.fullmatch(written):
                values = [""]
            elif written.startswith("$(("):
                number = whole_number(written[3:-2], self.variables)
                values = None if number is None else [str(number)]
                self._forget(written)
            elif (command := _PATH_COMMAND.fullmatch(written)) and (path := self._path(command)) is not None:
                values = [path]
        elif self._text.startswith("$[", begin):  # of old scripts
            end = self._text.find("]", begin)
            self.at = len(self._text) if end < 0 else end + 1
            self._forget(self._text[begin : self.at])
        else:
            self.at += 1
            return ["$"]
        if values is not None and sum(map(len, values)) + len(values) > _MOST:
            raise TooLong(f"{self._text[begin : self.at]:.80} is more than {_MOST:,} characters")
        return [unknown(self._text[begin : self.at])] if values is None else values

    def _forget(self, arithmetic: str) -> None:
        """The variables that it sets are unknown from here on."""
        for name in assigned_names(arithmetic):
            self.assign(name, None)

    def _path(self, command: re.Match[str]) -> str | None:
        """The output of ``pwd``, ``basename`` or ``dirname``; None: unknown, or with options."""
        inner, words = WordReader(command[2].strip(), self.variables, self._is_conditional), list[str]()
        while inner.at < len(inner._text):
            if inner._text[inner.at] in "\n;&|()<>#":  # another command, a redirection or a comment
                return None
            if inner._text[inner.at] in " \t":
                inner.at += 1
            else:
                words += inner.word()
        if any(_is_unread(word) or word.startswith("-") or not word for word in words):
            return None
        match command[1], words:
            case "pwd", []:
                return self._known("PWD")
            case "basename", [path, *suffix] if len(suffix) <= 1:
                name = posixpath.basename(path.rstrip("/")) or "/"
                return name.removesuffix(suffix[0]) or name if suffix else name
            case "dirname", [path]:
                parent = posixpath.dirname(path.rstrip("/")).rstrip("/")
                return parent or ("/" if path.startswith("/") else ".")
        return None

    def _joined(self, values: list[str]) -> list[str] | None:
        """The elements as one word; None: by a separator that is not known."""
        return [" ".join(values)] if self._splits_as_usual() else None

    def _slice(self, sliced: re.Match[str]) -> list[str] | None:
        """The elements of ``${NAME[@]:1}`` and ``${@:2:3}``; None: unknown."""
        name, first, count = sliced[1] or "@", int(sliced[2]), sliced[3]
        values = self._values(name)
        if values is None or UNKNOWN in "".join(values) or (name == "@" and first == 0):
            return [] if name == "@" and values == [] and first else None
        first -= name == "@"
        return values[first:] if count is None else values[first : first + int(count)]

    def _values(self, name: str) -> list[str] | None:
        """The elements of a variable, or the arguments; None: unknown, or not set."""
        arguments = self.variables.get(ARGUMENTS)
        if name in "@*":
            return arguments or []
        if name != "#" and not name.isdecimal():
            return self.variables.get(name)
        before = arguments if arguments is None or name == "#" else arguments[: int(name)]
        if arguments is None or UNKNOWN in "".join(before or ()) or name == "0":
            return None
        return [str(len(arguments))] if name == "#" else arguments[int(name) - 1 : int(name)]

    def _known(self, name: str) -> str | None:
        """The value of a variable, of an array its first element; None: unknown, a secret, or not set."""
        values = self._values(name)
        return None if values is None or _is_unread("".join(values[:1])) else "".join(values[:1])

    def _filled_text(self, text: str) -> str | None:
        """Text without quotes, its variables filled in; None: unknown."""
        filled = "".join(self._filled(text, in_quotes=True) or [UNKNOWN])
        return None if UNKNOWN in filled else filled

    def _braced(self, braced: re.Match[str], in_quotes: bool) -> list[str] | None:
        """The value of ``${NAME}`` and of its forms with a word for where it is not set; None: unknown."""
        name, sign, every = braced["name"], braced["sign"], braced["all"] or braced["name"]
        if name.isdecimal() and UNKNOWN in "".join(self.variables.get(ARGUMENTS, [])[: int(name)]):
            return None
        values = self._values(name)
        if braced["place"] is not None and values is not None:
            place = int(braced["place"])
            if UNKNOWN in "".join(values[: place + 1]):
                return None
            values = values[place : place + 1] or None
        is_set = values is not None and not (values in ([], [""]) and (braced["colon"] or not values))
        if is_set and values is not None and sign != "+":
            if every == "*" and in_quotes:
                return self._joined(values)
            return values if every in "@*" else values[:1] or [""]
        if values is not None and any(UNKNOWN in value for value in values):
            return None
        if sign is None or sign == "?":
            is_list = every == "@" or (every == "*" and not in_quotes)
            return values if values is None or is_list else values or [""]
        if sign == "+" and not is_set:
            return [] if every in "@*" else [""]
        written = braced["word"]
        is_whole = written.startswith('"') and end_of_quotes(written, 0) == len(written)
        is_mixed = in_quotes and not is_whole and re.search(r'(?<!\\)"', written)  # bash has rules of its own for it
        word = None if is_mixed else self._filled(written, in_quotes)
        self._is_in_quotes = sign != "=" and re.search("[\"']", written) is not None
        if sign == "=":
            self.assign(name, word)
        return word

    def _filled(self, word: str, in_quotes: bool) -> list[str] | None:
        """The word of ``${NAME:-word}``, its variables filled in: the elements of an array, or one; None: unknown."""
        inner = WordReader(word, self.variables, self._is_conditional)
        if word.startswith('"') and end_of_quotes(word, 0) == len(word):
            return inner._quoted()
        is_split = not in_quotes and re.search("[\"']", word)  # whole words beside others that are split
        if re.search("[$][\"']", word) or (is_split and re.search(r"[ \t\n]", _without_quotes(word))):
            return None
        filled = ""
        while inner.at < len(word):
            char = word[inner.at]
            if char in "$`":
                value = " ".join(inner._expansion(in_quotes=in_quotes))
                if is_split and not inner._is_in_quotes and re.search(r"[ \t\n]", value):
                    return None
                filled += value
            elif char == '"':
                parts = inner._quoted()
                if len(parts) > 1:
                    return None
                filled += "".join(parts)
            elif char == "'" and not in_quotes:
                end = word.find("'", inner.at + 1)
                filled += word[inner.at + 1 : end if end >= 0 else None]
                inner.at = end + 1 if end >= 0 else len(word)
            elif char == "~" and inner.at == 0 and not in_quotes and (home := _HOME.match(word)):
                filled += self.home(home[1])
                inner.at = home.end(1)
            else:
                inner.at += char == "\\" and (
                    not in_quotes or word[inner.at + 1 : inner.at + 2] in ("$", '"', "\\", "}")
                )
                filled += word[inner.at : inner.at + 1]
                inner.at += 1
        return [filled]


def _is_unread(value: str) -> bool:
    """Whether a value is known to a run alone: unknown, or an interpolation in place of a secret."""
    return UNKNOWN in value or "${" in value


def _if_reached(item: str) -> str:
    """An element, such as ``key=value``, that is there where the command is reached that appends it."""
    written = item.replace(UNKNOWN, "")
    begin = written.find("=") + 1
    return written[:begin] + unknown(f"{written[begin:]} (if appended)".strip())


def _without_quotes(word: str) -> str:
    """A word without its parts in quotes."""
    rest, at = "", 0
    while at < len(word):
        if word[at] == '"':
            at = end_of_quotes(word, at)
        elif word[at] == "'":
            at = (word.find("'", at + 1) + 1) or len(word)
        else:
            rest, at = rest + word[at], at + 1
    return rest
