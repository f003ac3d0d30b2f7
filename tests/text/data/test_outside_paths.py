"""A hub's listing is not trusted: no name in it leads out of the folder of downloads."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.text.data.hub_server import serving
from tests.text.data.test_published import pull


def test_a_file_outside_of_the_dataset_is_refused_and_left_alone(ask: Callable[[str], None], tmp_path: Path) -> None:
    mine = tmp_path / "mine.parquet"
    mine.write_text("my data")
    for name in (f"main/train-{'../' * 12}{mine}", "main/train-0/../../mine.parquet"):
        with serving("openai/gsm8k", {name: b"PAR1", "main/test-0.parquet": b"PAR1"}) as server:
            ask(server.url)
            with pytest.raises(ValueError, match=r"^openai/gsm8k: the hub lists .* outside of the dataset"):
                pull("gsm8k", tmp_path / "rows")
    assert mine.read_text() == "my data"
