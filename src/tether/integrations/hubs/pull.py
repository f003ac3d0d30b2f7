"""Downloads the files of a published dataset, checks them, and writes their rows in the layout of a run."""

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

from tether.integrations.hubs.catalogue import Dataset, OutputFile, as_it_is
from tether.integrations.hubs.hub import Hub, Listing, damage, hub_of, sha256_of
from tether.integrations.hubs.row import Unusable
from tether.runtime.digits import many_digits
from tether.runtime.disk import writing
from tether.runtime.file_lock import locked
from tether.text.data.pairs import pair_problems
from tether.text.data.rows import raise_problems, record_problems
from tether.types import JsonObject

NOTE = "pulled.json"
OTHER_FILES = "name an earlier --revision, or another file with --from"
LONGEST_LINE = 128 << 20
"""Maximum bytes of a line; a small compressed file can contain a line of any length."""
ROWS_AT_ONCE = 200  # a row of LiveCodeBench can have 20 MB of tests

Say = Callable[[str], None]


def pull_dataset(dataset: Dataset, repository: str, out: Path, cache: Path, revision: str | None, say: Say) -> None:
    """Write the files of a dataset, and a note with their origin; do nothing if they are already written.

    Args:
        dataset: the dataset, with the files to write.
        repository: name of the dataset for `tether.integrations.hubs.hub.hub_of`.
        out: folder of the files. They are replaced together, once all rows are complete and valid.
        cache: folder of downloads, which a later call resumes.
        revision: revision on the hub; None: the newest, or the one in `out`.
        say: prints a line for the user.

    Raises:
        ValueError: the hub cannot be reached or lacks the dataset, a download is damaged, rows are invalid (the message
            lists up to ten), `out` has files of different origin, or the disk is full.
    """
    hub, repository = hub_of(repository)
    note = _note(out)
    if (
        note
        and revision in (None, note.revision)
        and note.repository == repository
        and _is_complete(out, dataset, note)
    ):
        say(f"{out} has {repository} at {note.revision[:12]} already")
        return
    _refuse_foreign_files(out, dataset, repository, note)
    _check_folder(out)
    listing = hub.listing_of(repository, revision)
    sources = {name: _sources(output, listing, repository) for name, output in dataset.files.items()}
    folder = cache / "datasets" / quote(repository, safe="") / quote(listing.revision, safe="@")
    hashes = {}
    with writing(folder, "make room, or name another folder by TETHER_CACHE"):
        for path in sorted({path for paths in sources.values() for path in paths}):
            hashes[path] = _download(hub, repository, listing, path, folder / path, say)
    lock = cache / "datasets" / f"{hashlib.sha256(str(out.resolve()).encode()).hexdigest()}.lock"
    with writing(out, "make room, or give another folder with --out"), ExitStack() as stack:
        stack.enter_context(locked(lock, f"another process writes to {out}; waiting for it", say))
        _refuse_foreign_files(out, dataset, repository, _note(out))  # again: another process may have written
        partial_files: dict[str, Path] = {}
        written: dict[str, JsonObject] = {}
        left_out: dict[str, list[str]] = {}
        for name, output in dataset.files.items():
            partial_files[name] = file = _partial_path(out / name)
            stack.callback(file.unlink, missing_ok=True)
            rows, left_out[name] = _write(output, [(path, folder / path) for path in sources[name]], file)
            written[name] = {"rows": rows, "left_out": len(left_out[name]), "sha256": sha256_of(file)}
        content = {"repository": repository, "revision": listing.revision, "read": hashes, "written": written}
        # The note lists old and new hashes, so that after a kill during replacement the next call accepts both.
        replaced = {name: sha256_of(out / name) for name in partial_files if (out / name).exists()}
        _write_note(out, content | {"before": replaced})
        for name, file in partial_files.items():
            file.replace(out / name)
        _write_note(out, content)
    for name, summary in written.items():  # last, because writing to a closed pipe raises an error
        say(f"{out / name}: {summary['rows']} rows{_describe_left_out(left_out[name])}")


@dataclass(frozen=True)
class _Note:
    """The note of an earlier call, with the hashes of the files that it wrote."""

    repository: str
    revision: str
    written: Mapping[str, str]
    """File -> sha256."""
    before: Mapping[str, str]
    """File -> sha256 of the previous version, if the call was interrupted while replacing files."""


def _refuse_foreign_files(out: Path, dataset: Dataset, repository: str, note: _Note | None) -> None:
    """Raise a ValueError if a file to write exists but no earlier call wrote it, or if the folder has a different
    dataset."""
    if note and (note.repository != repository or set(note.written) - set(dataset.files)):
        raise ValueError(
            f"{out}: has {', '.join(sorted(note.written))} of {note.repository}, and a folder is of one dataset. give "
            "another folder with --out, or move these away"
        )
    for name in dataset.files:
        file = out / name
        hashes = (note.written.get(name), note.before.get(name)) if note else ()
        if file.exists() and not (file.is_file() and sha256_of(file) in hashes):
            what = "was changed since it was pulled" if any(hashes) else "is not of tether data pull"
            raise ValueError(f"{file}: is there, and {what}. move it away, or give another folder with --out")


def _sources(output: OutputFile, listing: Listing, repository: str) -> list[str]:
    for pattern in output.patterns:
        if paths := sorted(path for path in listing.files if fnmatchcase(path, pattern)):
            for path in paths:
                if "\0" in path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                    raise ValueError(f"{repository}: the hub lists the file {path!r}, which is outside of the dataset")
            return paths
    shown = ", ".join(sorted(listing.files)[:10]) or "none"
    raise ValueError(
        f"{repository}: no file for {output.split} at {listing.revision[:12]}: looked for "
        f"{', '.join(output.patterns)}; there are {shown}. Name an earlier commit with --revision, or "
        "the file itself with --from"
    )


def _download(hub: Hub, repository: str, listing: Listing, path: str, to: Path, say: Say) -> str:
    """Download a file unless it exists, and return its sha256."""
    remote = listing.files[path]
    if to.exists():
        if wrong := damage(to, remote):
            to.unlink()
            raise ValueError(f"{to}: {wrong}, so it was changed; it is deleted, pull again")
        return sha256_of(to)
    to.parent.mkdir(parents=True, exist_ok=True)
    with locked(to.with_name(f"{to.name}.lock"), f"another process downloads {to}; waiting for it", say):
        if not to.exists():  # another process may have downloaded it
            partial = to.with_name(f"{to.name}.partial")
            hub.fetch(repository, listing, path, partial)
            if wrong := damage(partial, remote):
                partial.unlink()
                raise ValueError(f"{repository}/{path}: the download {wrong}; it is deleted, pull again")
            partial.rename(to)
    return sha256_of(to)


def _describe_left_out(left_out: list[str]) -> str:
    if not left_out:
        return ""
    many = f"{len(left_out)} problems are" if len(left_out) > 1 else "1 problem is"
    return f"; {many} left out, the first: {left_out[0]}"


def _write(output: OutputFile, sources: list[tuple[str, Path]], to: Path) -> tuple[int, list[str]]:
    """Convert and check all rows; return their number, and the reasons for which other rows were dropped."""
    problems: list[str] = []
    left_out: list[str] = []
    count = 0

    def rows() -> Iterator[tuple[str, JsonObject]]:
        nonlocal count
        for name, file in sources:
            for number, record in enumerate(_records(name, file)):
                try:
                    with many_digits():  # some tests contain long integers
                        row = output.convert(record, output.split, count)
                    wrong = list(pair_problems(row) if output.pairs else record_problems(row))
                except Unusable as error:
                    left_out.append(f"{name} row {number}: {error}")
                    continue
                except ValueError as error:
                    _refuse_converted_row(name, record)
                    wrong = [str(error)]
                problems.extend(f"{name} row {number}: {problem}" for problem in wrong)
                if not wrong:
                    count += 1
                    yield f"{name} row {number}", row

    schema, remaining = _schema(sources) if output.convert is as_it_is else None, rows()
    with ExitStack() as stack:
        writer = None
        while chunk := list(islice(remaining, ROWS_AT_ONCE)):
            table = _table(chunk, schema)
            schema = table.schema
            writer = writer or stack.enter_context(pq.ParquetWriter(to, schema))
            writer.write_table(table)
    raise_problems(problems)
    if not count:
        raise ValueError(f"{', '.join(name for name, _ in sources)}: no rows{_describe_left_out(left_out)}")
    return count, left_out


def _refuse_converted_row(name: str, record: JsonObject) -> None:
    """Raise a ValueError if a row is already converted, by verl's scripts or by `tether data pull`."""
    if not any(record_problems(record)):
        layout, reader = "rows in the layout of verl", "a run reads it as data.train_files or data.val_files"
    elif not any(pair_problems(record)):
        layout, reader = "pairs", "`tether rm train` reads it"
    else:
        return
    raise ValueError(f"{name}: holds {layout} already, so there is nothing to pull: {reader} as it is")


def _table(rows: list[tuple[str, JsonObject]], schema: pa.Schema | None) -> pa.Table:
    """Return a table of rows, which come with their locations; without a schema, infer the columns.

    Raises:
        ValueError: a lone surrogate, a number out of range, or a type that differs from earlier rows.
    """
    try:
        return pa.Table.from_pylist([row for _, row in rows], schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeEncodeError, OverflowError) as error:
        if len(rows) > 1:
            for row in rows:  # find the row, for the message
                schema = _table([row], schema).schema
        raise ValueError(f"{rows[0][0]}: does not fit into columns ({error}). {OTHER_FILES}") from error


def _schema(sources: list[tuple[str, Path]]) -> pa.Schema:
    """Return the columns of all files; columns that a file lacks are null in its rows."""
    schemas = []
    for name, file in sources:
        with _reading(name):
            schemas.append(pq.read_schema(file).remove_metadata())  # the metadata describes a single file
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        names = ", ".join(name for name, _ in sources)
        raise ValueError(f"{names}: differ in the type of a column ({error}). {OTHER_FILES}") from error


def _check_folder(out: Path) -> None:
    """Raise a ValueError if `out` is not writable, before anything is downloaded."""
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
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise ValueError(f"{place}: is no JSON ({error}). {OTHER_FILES}") from error


def _row(place: str, record: object) -> JsonObject:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: is {record!r:.60}, not a row of named columns")
    return record


def _partial_path(file: Path) -> Path:
    """Return the path to which a file is written until it is complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return file.with_name(f".{file.name}.{os.getpid()}")


def _write_note(out: Path, content: Mapping[str, object]) -> None:
    partial = _partial_path(out / NOTE)
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(out / NOTE)
    finally:
        partial.unlink(missing_ok=True)


def _note(out: Path) -> _Note | None:
    """Read the note in a folder; return None if there is none.

    Raises:
        ValueError: the file is not such a note, or `out` is not a readable folder.
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


def _is_complete(out: Path, dataset: Dataset, note: _Note) -> bool:
    return all((out / name).is_file() and sha256_of(out / name) == note.written.get(name) for name in dataset.files)
