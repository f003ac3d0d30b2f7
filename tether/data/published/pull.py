"""Download the files of a published dataset, check them, and write its rows in the layout that a run reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from tether.data.pairs import pair_problems
from tether.data.published.catalogue import Dataset, Part, as_it_is
from tether.data.published.hub import Hub, Listing, damage, hub_of
from tether.data.rows import raise_problems, record_problems
from tether.types import JsonObject

NOTE = "pulled.json"
ROWS_AT_ONCE = 2000

Say = Callable[[str], None]


def pull_dataset(dataset: Dataset, repository: str, out: Path, cache: Path, revision: str | None, say: Say) -> None:
    """Write the files of a dataset and, at the end, a note of what they were made of; done once.

    Args:
        dataset: which files to write.
        repository: where the hub has it; see `tether.data.published.hub.hub_of`.
        out: folder of the files.
        cache: folder of downloads, which a later call goes on with.
        revision: of the hub; None: the newest, or the one that `out` was made of.
        say: shows a line to the user.

    Raises:
        ValueError: the hub cannot be reached or does not have it, a download is damaged, or rows are not what they
            should be; up to ten, by file and row.
    """
    hub, repository = hub_of(repository)
    note = _note(out)
    if note and revision in (None, note["revision"]) and note["repository"] == repository and _is_whole(out, note):
        say(f"{out} has {repository} at {note['revision'][:12]} already")
        return
    listing = hub.listing_of(repository, revision)
    sources = {name: _sources(part, listing, repository) for name, part in dataset.parts.items()}
    folder = cache / "datasets" / quote(repository, safe="") / quote(listing.revision, safe="@")
    hashes = {}
    for path in sorted({path for paths in sources.values() for path in paths}):
        hashes[path] = _download(hub, repository, listing, path, folder / path)
    written = {}
    for name, part in dataset.parts.items():
        rows = _write(part, [(path, folder / path) for path in sources[name]], out / name)
        written[name] = {"rows": rows, "sha256": _sha256(out / name)}
        say(f"{out / name}: {rows} rows")
    content = {"repository": repository, "revision": listing.revision, "read": hashes, "written": written}

    def write_note(file: Path) -> None:
        file.write_text(json.dumps(content, indent=2) + "\n")

    _replace(out / NOTE, write_note)


def _sources(part: Part, listing: Listing, repository: str) -> list[str]:
    for pattern in part.patterns:
        if found := sorted(path for path in listing.files if fnmatchcase(path, pattern)):
            return found
    shown = ", ".join(sorted(listing.files)[:10]) or "none"
    raise ValueError(
        f"{repository}: no file for {part.split} at {listing.revision[:12]}: looked for {', '.join(part.patterns)}; "
        f"there are {shown}. The dataset was rearranged: name an earlier commit with --revision"
    )


def _download(hub: Hub, repository: str, listing: Listing, path: str, to: Path) -> str:
    """Fetch a file unless it is there; returns its sha256."""
    remote, partial = listing.files[path], to.with_name(f"{to.name}.partial")
    if not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        hub.fetch(repository, listing, path, partial)
        if wrong := damage(partial, remote):
            partial.unlink()
            raise ValueError(f"{repository}/{path}: the download {wrong}; it is deleted, pull again")
        partial.rename(to)
    elif wrong := damage(to, remote):
        to.unlink()
        raise ValueError(f"{to}: {wrong}, so it was changed; it is deleted, pull again")
    return _sha256(to)


def _write(part: Part, sources: list[tuple[str, Path]], to: Path) -> int:
    """Convert and check all rows; the file appears whole or not at all."""
    problems: list[str] = []
    count = 0

    def rows() -> Iterator[JsonObject]:
        nonlocal count
        for name, file in sources:
            for number, record in enumerate(_records(file)):
                try:
                    row = part.convert(record, part.split, count)
                    wrong = list(pair_problems(row) if part.pairs else record_problems(row))
                except ValueError as error:
                    wrong = [str(error)]
                problems.extend(f"{name} row {number}: {problem}" for problem in wrong)
                if not wrong:
                    count += 1
                    yield row

    def write(file: Path) -> None:
        schema, left = pq.read_schema(sources[0][1]) if part.convert is as_it_is else None, rows()
        with ExitStack() as stack:
            writer = None
            while some := list(islice(left, ROWS_AT_ONCE)):
                table = pa.Table.from_pylist(some, schema=schema)
                schema = table.schema
                writer = writer or stack.enter_context(pq.ParquetWriter(file, schema))
                writer.write_table(table)
        raise_problems(problems)
        if not count:
            raise ValueError(f"{', '.join(name for name, _ in sources)}: no rows")

    _replace(to, write)
    return count


def _records(file: Path) -> Iterator[JsonObject]:
    if file.suffix == ".jsonl":
        with file.open() as lines:
            yield from (json.loads(line) for line in lines if line.strip())
        return
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _replace(to: Path, write: Callable[[Path], None]) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        write(partial)
        partial.replace(to)
    finally:
        partial.unlink(missing_ok=True)


def _note(out: Path) -> JsonObject | None:
    try:
        note: JsonObject = json.loads((out / NOTE).read_text())
    except (OSError, ValueError):
        return None
    return note


def _is_whole(out: Path, note: Mapping[str, JsonObject]) -> bool:
    files = note["written"].items()
    return all((out / name).is_file() and _sha256(out / name) == made["sha256"] for name, made in files)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
