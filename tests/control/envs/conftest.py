import pytest

pytest.importorskip("gymnasium")
