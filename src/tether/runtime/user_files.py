"""Files that the user names in the configuration: what to say of a missing one, and how Python files are imported."""

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
    """Whether tether's own code raised an error, not a library or the user's: what it says is then for the user."""
    return Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(_TETHER)


def words_of(error: BaseException) -> str:
    """The type and text of an error, of the first one of a group; also where `str(error)` raises itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    told = traceback.TracebackException(type(error), error, None)
    told.__notes__ = None  # which would come last
    return [*told.format_exception_only()][-1].strip()


def place_of(error: BaseException) -> str:
    """Where the user's code was when a call of it failed: " (FILE line N)"; empty where tether raised the error.

    Of a group it is that of the first error in it, if that was raised.
    """
    while isinstance(error, BaseExceptionGroup) and error.exceptions[0].__traceback__:
        error = error.exceptions[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_TETHER)]
    if not own or frames[-1] is not own[-1]:
        return ""
    users = [frame for frame in own if not any(Path(frame.filename).is_relative_to(folder) for folder in _LIBRARIES)]
    return f" ({(users or own)[-1].filename} line {(users or own)[-1].lineno})"


def missing_file(path: Path) -> str:
    """Say that `path` does not exist, and which existing path is nearest to it."""
    if path.is_symlink():
        return f"{path}: a link to {path.readlink()}, where nothing is."
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    wanted = path.absolute().relative_to(folder).parts[0]
    alike = closest(wanted, [entry.name for entry in folder.iterdir()])
    near = [name for name in alike if closest(Path(wanted).stem, [Path(name).stem])]  # an ending alone is not alike
    hint = ask(str(folder / name) for name in near) or f" The nearest folder that exists is {folder}."
    return f"{path}: no such file.{hint}"


def definition(name: str, key: str) -> object:
    """The object ``FILE.py:NAME`` of a file of the user's, which `key` names.

    Raises:
        ValueError: see `import_python_file`; or it defines no such name.
    """
    path, _, attribute = name.rpartition(":")
    found = vars(import_python_file(path, key))
    if attribute not in found:
        raise ValueError(f"{key}={name}: {path} defines no {attribute}.{did_you_mean(attribute, found)}")
    return found[attribute]


def search_also(folder: Path) -> None:
    """Let imports find modules in a folder, after all that is installed, in this process and those that it starts."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


_imported: dict[Path, tuple[bytes, ModuleType]] = {}
"""File -> its text when it was imported, and what that gave."""


def forget_imports() -> None:
    """Begin a run: it finds data of the user's modules as a new process would, not as an earlier run left them."""
    _imported.clear()


def import_python_file(path: str | Path, key: str) -> ModuleType:
    """Import a Python file of the user's: once, as long as it does not change, however many keys name it.

    Else what it defines would be several classes of one name, with data of their own, of which one can be pickled.

    Args:
        path: the file; ``~`` is the home directory.
        key: of the configuration, which names it; every message begins with it.

    Raises:
        ValueError: it does not exist, is no Python file, has a syntax error, or raises while it is imported.
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
        sys.modules[name] = before[1]  # a checkpoint may know it by this name
        return before[1]
    spec = importlib.util.spec_from_file_location(name, file, loader=_Source(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    search_also(resolved.parent)  # as of a script, for the modules beside it
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{key}={path}: {error.filename}, line {error.lineno}: {error.msg}") from error
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever a user's module raises while it is imported is one and the same problem
        tail = traceback.format_exc(limit=-1).strip()
        raise ValueError(f"{key}={path}: importing the file failed:\n{tail}") from error
    _imported[resolved] = text, module
    return module


class _Source(SourceFileLoader):
    """Reads the file itself: Python takes bytecode for current after a change within a second that keeps the size."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)
