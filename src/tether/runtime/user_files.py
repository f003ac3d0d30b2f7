"""Files named in the configuration: error messages for missing ones, and the import of Python files."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tether.spelling import ask, closest, did_you_mean

_TETHER = Path(__file__).parents[1]
_LIBRARIES = tuple(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib"))


def raised_by_tether(error: BaseException) -> bool:
    """Whether tether's own code raised an error, not a library or user code; its message is then meant for users."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(_TETHER)


def describe_error(error: BaseException) -> str:
    """Return the type and text of an error, or of the first one in a group, even if `str(error)` raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    summary = traceback.TracebackException(type(error), error, None)
    summary.__notes__ = None  # otherwise a note would be the last line
    return [*summary.format_exception_only()][-1].strip()


def error_location(error: BaseException) -> str:
    """Return the location in user code that raised an error, as " (FILE line N)"; empty if tether raised it.

    For a group, return the location of its first error, if that one was raised.
    """
    while isinstance(error, BaseExceptionGroup) and error.exceptions[0].__traceback__:
        error = error.exceptions[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    user_frames = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TETHER)]
    if not user_frames or frames[-1] is not user_frames[-1]:
        return ""
    users = [
        frame for frame in user_frames if not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES)
    ]
    return f" ({(users or user_frames)[-1].filename} line {(users or user_frames)[-1].lineno})"


def missing_file(path: Path) -> str:
    """Return a message that `path` does not exist, with the most similar existing path."""
    if path.is_symlink():
        return f"{path}: a link to {path.readlink()}, where nothing is."
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    wanted = path.absolute().relative_to(folder).parts[0]
    alike = closest(wanted, [entry.name for entry in folder.iterdir()])
    near = [
        name for name in alike if closest(Path(wanted).stem, [Path(name).stem])
    ]  # having the same suffix is not enough
    hint = ask(str(folder / name) for name in near) or f" The nearest folder that exists is {folder}."
    return f"{path}: no such file.{hint}"


def definition(name: str, key: str) -> object:
    """Return the object NAME of a user's file, from the value ``FILE.py:NAME`` of the configuration's `key`.

    Raises:
        ValueError: the file cannot be imported (`import_python_file`), or does not define the name.
    """
    path, _, attribute = name.rpartition(":")
    names = vars(import_python_file(path, key))
    if attribute not in names:
        raise ValueError(f"{key}={name}: {path} defines no {attribute}.{did_you_mean(attribute, names)}")
    return names[attribute]


def append_import_path(folder: Path) -> None:
    """Append a folder to the import path of this process and of processes that it starts."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


_imported: dict[Path, tuple[bytes, ModuleType]] = {}
"""For each file: its text when it was imported, and the module."""


def forget_imports() -> None:
    """Forget imported user modules, so that a new run does not see data of an earlier run in this process."""
    _imported.clear()


def import_python_file(path: str | Path, key: str) -> ModuleType:
    """Import a user's Python file, once unless it changes, even if several keys name it.

    Importing it twice would define its classes twice, with separate data, and only one could be pickled.

    Args:
        path: the file; ``~`` is the home directory.
        key: configuration key that names it; every message begins with it.

    Raises:
        ValueError: the file does not exist, is not Python, has a syntax error, or raises during the import.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"{key}={path}: is a folder. Name a Python file in it.")
    if not file.exists():
        raise ValueError(f"{key}={missing_file(file)}")
    if file.suffix != ".py":
        raise ValueError(f"{key}={path}: is not a Python file; its name must end in .py")
    name, resolved, text = f"{key.replace('.', '_')}_{file.stem}", file.resolve(), file.read_bytes()
    before = _imported.get(resolved)
    if before and before[0] == text:
        sys.modules[name] = before[1]  # a checkpoint may refer to it by this name
        return before[1]
    spec = importlib.util.spec_from_file_location(name, file, loader=_Source(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    append_import_path(resolved.parent)  # as for a script, so that it can import modules next to it
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{key}={path}: {error.filename}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        tail = traceback.format_exc(limit=-1).strip()
        raise ValueError(f"{key}={path}: importing the file failed:\n{tail}") from error
    _imported[resolved] = text, module
    return module


class _Source(SourceFileLoader):
    """Loads from source and ignores bytecode, because Python treats bytecode as current if the file changed within the
    same second without changing its size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)
