"""Download the files of a published dataset, check them, and write its rows in the layout that a run reads."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.utils import WeakFileLock

from tether.data.pairs import pair_problems
from tether.data.published.catalogue import Dataset, Part, as_it_is
from tether.data.published.hub import Hub, Listing, damage, hub_of, sha256_of
from tether.data.published.row import Unusable
from tether.data.rows import raise_problems, record_problems
from tether.runtime.digits import many_digits
from tether.runtime.disk import writing
from tether.types import JsonObject

NOTE = "pulled.json"
OTHER_FILES = "name an earlier --revision, or another file with --from"
LONGEST_LINE = 128 << 20
"""Bytes; a small compressed file may hold a line of any length."""
ROWS_AT_ONCE = 200  # a row of LiveCodeBench may have 20 MB of tests

Say = Callable[[str], None]


def pull_dataset(dataset: Dataset, repository: str, out: Path, cache: Path, revision: str | None, say: Say) -> None:
    """Write the files of a dataset and, at the end, a note of what they were made of; done once.

    Args:
        dataset: which files to write.
        repository: where the hub has it; see `tether.data.published.hub.hub_of`.
        out: folder of the files. They change together, when all rows are there and right.
        cache: folder of downloads, which a later call goes on with.
        revision: of the hub; None: the newest, or the one that `out` was made of.
        say: shows a line to the user.

    Raises:
        ValueError: the hub cannot be reached or does not have it, a download is damaged, or rows are not what they
            should be; up to ten, by file and row. Or `out` has files that are not of an earlier call, or the disk is
            full.
    """
    hub, repository = hub_of(repository)
    note = _note(out)
    if note and revision in (None, note.revision) and note.repository == repository and _is_whole(out, dataset, note):
        say(f"{out} has {repository} at {note.revision[:12]} already")
        return
    _refuse_files_of_others(out, dataset, repository, note)
    _check_folder(out)
    listing = hub.listing_of(repository, revision)
    sources = {name: _sources(part, listing, repository) for name, part in dataset.parts.items()}
    folder = cache / "datasets" / quote(repository, safe="") / quote(listing.revision, safe="@")
    hashes = {}
    with writing(folder, "make room, or name another folder by TETHER_CACHE"):
        for path in sorted({path for paths in sources.values() for path in paths}):
            hashes[path] = _download(hub, repository, listing, path, folder / path, say)
    lock = cache / "datasets" / f"{hashlib.sha256(str(out.resolve()).encode()).hexdigest()}.lock"
    with writing(out, "make room, or give another folder with --out"), ExitStack() as stack:
        stack.enter_context(_alone(lock, f"another process writes to {out}; waiting for it", say))
        _refuse_files_of_others(out, dataset, repository, _note(out))  # as that one left it
        made: dict[str, Path] = {}
        written: dict[str, JsonObject] = {}
        left_out: dict[str, list[str]] = {}
        for name, part in dataset.parts.items():
            made[name] = file = _beside(out / name)
            stack.callback(file.unlink, missing_ok=True)
            rows, left_out[name] = _write(part, [(path, folder / path) for path in sources[name]], file)
            written[name] = {"rows": rows, "left_out": len(left_out[name]), "sha256": sha256_of(file)}
        content = {"repository": repository, "revision": listing.revision, "read": hashes, "written": written}
        # If this process ends within the next lines, the next one knows the files of before as its own, too.
        before = {name: sha256_of(out / name) for name in made if (out / name).exists()}
        _write_note(out, content | {"before": before})
        for name, file in made.items():
            file.replace(out / name)
        _write_note(out, content)
    for name, about in written.items():  # only now: nobody may be there to read it, which is an error
        say(f"{out / name}: {about['rows']} rows{_said_of(left_out[name])}")


@dataclass(frozen=True)
class _Note:
    """The note of an earlier call: the files it wrote, by hash."""

    repository: str
    revision: str
    written: Mapping[str, str]
    """File -> sha256."""
    before: Mapping[str, str]
    """The same of files that it was about to replace when it ended."""


def _refuse_files_of_others(out: Path, dataset: Dataset, repository: str, note: _Note | None) -> None:
    """Raise ValueError where a file to be written is there, and not of an earlier call, or the folder is of others."""
    if note and (note.repository != repository or set(note.written) - set(dataset.parts)):
        raise ValueError(
            f"{out}: has {', '.join(sorted(note.written))} of {note.repository}, and a folder is of one dataset. give "
            "another folder with --out, or move these away"
        )
    for name in dataset.parts:
        file = out / name
        known = (note.written.get(name), note.before.get(name)) if note else ()
        if file.exists() and not (file.is_file() and sha256_of(file) in known):
            what = "was changed since it was pulled" if any(known) else "is not of tether data pull"
            raise ValueError(f"{file}: is there, and {what}. move it away, or give another folder with --out")


def _sources(part: Part, listing: Listing, repository: str) -> list[str]:
    for pattern in part.patterns:
        if found := sorted(path for path in listing.files if fnmatchcase(path, pattern)):
            for path in found:
                if "\0" in path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                    raise ValueError(f"{repository}: the hub lists the file {path!r}, which is outside of the dataset")
            return found
    shown = ", ".join(sorted(listing.files)[:10]) or "none"
    raise ValueError(
        f"{repository}: no file for {part.split} at {listing.revision[:12]}: looked for {', '.join(part.patterns)}; "
        f"there are {shown}. Name an earlier commit with --revision, or the file itself with --from"
    )


def _download(hub: Hub, repository: str, listing: Listing, path: str, to: Path, say: Say) -> str:
    """Fetch a file unless it is there; returns its sha256."""
    remote = listing.files[path]
    if to.exists():
        if wrong := damage(to, remote):
            to.unlink()
            raise ValueError(f"{to}: {wrong}, so it was changed; it is deleted, pull again")
        return sha256_of(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    with _alone(to.with_name(f"{to.name}.lock"), f"another process downloads {to}; waiting for it", say):
        if not to.exists():  # another process may have brought it
            partial = to.with_name(f"{to.name}.partial")
            hub.fetch(repository, listing, path, partial)
            if wrong := damage(partial, remote):
                partial.unlink()
                raise ValueError(f"{repository}/{path}: the download {wrong}; it is deleted, pull again")
            partial.rename(to)
    return sha256_of(to)


@contextmanager
def _alone(lock: Path, waiting: str, say: Say) -> Iterator[None]:
    """Inside, no other process is within the same lock: they go on with one download, or write to one folder."""
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=0.5))
        except TimeoutError:
            say(waiting)
            stack.enter_context(WeakFileLock(lock))
        yield


def _said_of(left_out: list[str]) -> str:
    if not left_out:
        return ""
    many = f"{len(left_out)} problems are" if len(left_out) > 1 else "1 problem is"
    return f"; {many} left out, the first: {left_out[0]}"


def _write(part: Part, sources: list[tuple[str, Path]], to: Path) -> tuple[int, list[str]]:
    """Convert and check all rows; returns how many there are, and why others are left out."""
    problems: list[str] = []
    left_out: list[str] = []
    count = 0

    def rows() -> Iterator[tuple[str, JsonObject]]:
        nonlocal count
        for name, file in sources:
            for number, record in enumerate(_records(name, file)):
                try:
                    with many_digits():  # tests have such numbers
                        row = part.convert(record, part.split, count)
                    wrong = list(pair_problems(row) if part.pairs else record_problems(row))
                except Unusable as error:
                    left_out.append(f"{name} row {number}: {error}")
                    continue
                except ValueError as error:
                    _refuse_what_needs_no_pull(name, record)
                    wrong = [str(error)]
                problems.extend(f"{name} row {number}: {problem}" for problem in wrong)
                if not wrong:
                    count += 1
                    yield f"{name} row {number}", row

    schema, left = _schema(sources) if part.convert is as_it_is else None, rows()
    with ExitStack() as stack:
        writer = None
        while some := list(islice(left, ROWS_AT_ONCE)):
            table = _table(some, schema)
            schema = table.schema
            writer = writer or stack.enter_context(pq.ParquetWriter(to, schema))
            writer.write_table(table)
    raise_problems(problems)
    if not count:
        raise ValueError(f"{', '.join(name for name, _ in sources)}: no rows{_said_of(left_out)}")
    return count, left_out


def _refuse_what_needs_no_pull(name: str, record: JsonObject) -> None:
    """Raise ValueError where a row is what would be made of one: the file is of verl's preparation, or was pulled."""
    if not any(record_problems(record)):
        layout, reader = "rows in the layout of verl", "a run reads it as data.train_files or data.val_files"
    elif not any(pair_problems(record)):
        layout, reader = "pairs", "`tether rm train` reads it"
    else:
        return
    raise ValueError(f"{name}: holds {layout} already, so there is nothing to pull: {reader} as it is")


def _table(rows: list[tuple[str, JsonObject]], schema: pa.Schema | None) -> pa.Table:
    """The table of rows, each after its place; None: with the columns that they have.

    Raises:
        ValueError: half a character, too large a number, or a value of another type than in the rows before.
    """
    try:
        return pa.Table.from_pylist([row for _, row in rows], schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError, OverflowError) as error:
        if len(rows) > 1:
            for row in rows:  # to name the one
                schema = _table([row], schema).schema
        raise ValueError(f"{rows[0][0]}: does not fit into columns ({error}). {OTHER_FILES}") from error


def _schema(sources: list[tuple[str, Path]]) -> pa.Schema:
    """The columns of all files together; what a file does not have is null in its rows."""
    schemas = []
    for name, file in sources:
        with _reading(name):
            schemas.append(pq.read_schema(file).remove_metadata())  # which describes one file
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        names = ", ".join(name for name, _ in sources)
        raise ValueError(f"{names}: differ in the type of a column ({error}). {OTHER_FILES}") from error


def _check_folder(out: Path) -> None:
    """Raise ValueError, before anything is downloaded, where `out` cannot be written to."""
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    with writing(out, "give another folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
        for folder in new:
            folder.rmdir()
    if not new and not os.access(out, os.W_OK):
        raise ValueError(f"{out}: may not be written to. give another folder with --out")


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"{name}: is no {name.rpartition('.')[2]} file that can be read ({why}). {OTHER_FILES}"
        ) from error


def _records(name: str, file: Path) -> Iterator[JsonObject]:
    if file.suffix == ".arrow":
        with _reading(name), pa.ipc.open_stream(file) as batches:
            for batch in batches:
                yield from batch.to_pylist()
        return
    if name.endswith((".jsonl", ".jsonl.gz")):
        with _reading(name), (gzip.open if name.endswith(".gz") else open)(file, "rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"{name} line {number}: is longer than {LONGEST_LINE >> 20} MiB. {OTHER_FILES}")
                if line.strip():
                    yield _row(f"{name} line {number}", _json(f"{name} line {number}", line))
        return
    if name.endswith(".json"):
        rows = _json(name, file.read_bytes())
        if not isinstance(rows, list):
            raise ValueError(f"{name}: is {rows!r:.60}, not a list of rows. {OTHER_FILES}")
        for number, row in enumerate(rows):
            yield _row(f"{name} row {number}", row)
        return
    with _reading(name), pq.ParquetFile(file) as table:
        for batch in table.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _json(place: str, text: bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise ValueError(f"{place}: is no JSON ({error}). {OTHER_FILES}") from error


def _row(place: str, record: object) -> JsonObject:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: is {record!r:.60}, not a row of named columns")
    return record


def _beside(file: Path) -> Path:
    """Where a file is written until it is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f".{file.name}.{os.getpid()}")


def _write_note(out: Path, content: Mapping[str, object]) -> None:
    partial = _beside(out / NOTE)
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(out / NOTE)
    finally:
        partial.unlink(missing_ok=True)


def _note(out: Path) -> _Note | None:
    """The note in a folder; None: there is none.

    Raises:
        ValueError: it is something else, or `out` is no folder that can be read.
    """
    file = out / NOTE
    try:
        tree = json.loads(file.read_bytes())
        hashes = {str(name): str(made["sha256"]) for name, made in tree["written"].items()}
        return _Note(str(tree["repository"]), str(tree["revision"]), hashes, dict(tree.get("before", {})))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror}). give a folder with --out") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is no note of tether data pull. move it away, or give another --out") from error


def _is_whole(out: Path, dataset: Dataset, note: _Note) -> bool:
    return all((out / name).is_file() and sha256_of(out / name) == note.written.get(name) for name in dataset.parts)
