import textwrap

import pytest

from tether.config.loading.overrides import parse_overrides
from tether.integrations.rlinf.importer import import_file


@pytest.fixture
def imported(tmp_path):
    """Import a text, with overrides."""

    def run(text, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(textwrap.dedent(text))
        return import_file(file, parse_overrides(overrides)[0])

    return run
