"""Videos of episodes."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("imageio_ffmpeg")

from tether.control.collecting.video import open_video


class Noise:
    """Renders pictures that hardly compress."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(0)

    def render(self) -> np.ndarray:
        return self.draws.integers(0, 255, (256, 256, 3), dtype=np.uint8)


def test_a_video_that_does_not_fit_on_the_disk_is_a_warning(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 8192))
    path = small_disk / "videos" / "step_1.mp4"
    with open_video(Noise(), path, 30) as watch:
        for _ in range(500):
            watch()
    assert f"{path}: not written, as ffmpeg ended" in caplog.text
    assert not path.exists()
