"""The worker's end of the line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class Line:
    """Requests from the parent and answers to it. Whatever else the process prints goes to its error output."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def answer(self, **values: Any) -> None:
        """Send one answer."""
        self._out.write(json.dumps(values) + "\n")

    def requests(self) -> Iterator[dict[str, Any]]:
        """Wait for the next request, until there are no more."""
        for line in sys.stdin:
            yield json.loads(line)

    def wait(self) -> dict[str, Any]:
        """The next request; ends the process where the parent has gone."""
        for request in self.requests():
            return request
        sys.exit()
