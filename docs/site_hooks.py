"""Hook of MkDocs: a link to a file that the site does not have, such as a recipe, becomes the name of the file."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the text of a page without links to files that the site does not have."""

    def link(match: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent / match[2]
        if target.resolve().is_relative_to(DOCS):
            return match[0]
        return f"{match[1]} (`{target.resolve().relative_to(DOCS.parent)}`)"

    return re.sub(r"\[([^\]]*)\]\((\.\./[^)#\s]*)(?:#[^)]*)?\)", link, markdown)
