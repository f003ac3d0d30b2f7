"""Writes a translated configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from tether.config import ConfigError, Problem


def write_translation(translate: Callable[[], tuple[str, str]], out: Path | None, source: Path) -> None:
    """Write the translated YAML to a file, or print it; the listing of keys is printed to stderr.

    Raises:
        ConfigError: the translation failed; with `out`, an additional problem says that the file was not written.
        ValueError: the file cannot be written, is the source of the translation, or exists with different content.
    """
    if out is not None and out.exists() and out.samefile(source):
        raise ValueError(f"--out {out}: is the file that is translated. Give another one")
    try:
        yaml, listing = translate()
    except ConfigError as error:
        unwritten = [Problem(f"--out {out}", "is not written", "fix the problems above first")] if out else []
        raise ConfigError([*error.problems, *unwritten]) from None
    if out is None:
        typer.echo(yaml)
    else:
        if out.is_file() and out.read_bytes() != yaml.encode():
            raise ValueError(f"--out {out}: exists already with other content. Name a new file, or delete this one")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(yaml, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--out {out}: cannot be written ({error.strerror}). Give another file") from None
        typer.echo(f"written to {out}", err=True)
    if listing:
        typer.echo(listing, err=True)
