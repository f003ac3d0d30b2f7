"""The output of `tether config import-rlinf`: the native YAML, and the outcome for each key."""

from __future__ import annotations

from typing import get_args

import yaml

from tether.config.keys import keys, show
from tether.config.loading.imported import Imported, Outcome, Status
from tether.config.loading.rlinf_marks import NOT_SUPPORTED
from tether.config.loading.yaml_file import MISSING
from tether.config.render import annotated


def to_native_yaml(imported: Imported) -> str:
    """Return the native keys as YAML, each with a comment that names the key of RLinf from which it follows."""
    native = {**dict.fromkeys(imported.left_open, MISSING), **imported.native}
    ordered = {key: native[key] for key in keys() if key in native}
    given = dict.fromkeys(ordered, "given with the file")
    return annotated(ordered, {**given, **imported.left_open, **imported.origins}) + _not_supported(imported)


def _not_supported(imported: Imported) -> str:
    """Return the section of unsupported keys, because of which the file is refused."""
    refused = {problem.path: problem.what for problem in imported.refusals()}
    if not refused:
        return ""
    head = (
        "# RLinf's file asks for this, which tether does not have. To run without it, take a line out, or give "
        f"~{NOT_SUPPORTED}.KEY, and set what is {MISSING} above.\n"
    )
    return head + yaml.safe_dump({NOT_SUPPORTED: refused}, width=10**6, allow_unicode=True, sort_keys=False)


def report(imported: Imported) -> str:
    """Return a listing of all keys of the file, grouped by outcome."""
    blocks = []
    for status in get_args(Status):
        lines = [line for line in imported.lines if line.status == status]
        if lines:
            blocks.append("\n".join([f"{status} ({len(lines)})", *map(_text, lines)]))
    return "\n\n".join(blocks) + "\n"


def _text(line: Outcome) -> str:
    native = ", ".join(f"{key}={show(value)}" for key, value in line.native.items())
    return "  " + "  ".join(
        column for column in (f"{line.key}={_short(line.value)}", native and f"-> {native}", _why(line)) if column
    )


def _why(line: Outcome) -> str:
    why = line.why or ("what tether does anyway" if line.status == "mapped" and not line.native else "")
    return f"({why})" if why else ""


def _short(value: object) -> str:
    return "{...}" if isinstance(value, dict) else show(value)
