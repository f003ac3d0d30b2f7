"""Writes mp4 videos of episodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import imageio.v2 as imageio
import numpy as np
from numpy.typing import NDArray

from tether.control.envs.protocol import Renders
from tether.runtime.install import pip_install

logger = logging.getLogger(__name__)

BLOCK = 16
"""Height and width of images are padded to a multiple of this, which all H.264 players support."""


class Writer(Protocol):
    """The writer of imageio."""

    def append_data(self, picture: NDArray[np.generic], /) -> None: ...


class Video:
    """Appends an image of the first environment on each call, unless ffmpeg has ended, as it does on a full disk."""

    def __init__(self, env: Renders, writer: Writer) -> None:
        self._env, self._writer, self.failed = env, writer, False

    def __call__(self) -> None:
        if self.failed:
            return
        picture = self._env.render()
        missing = [(0, -side % BLOCK) for side in picture.shape[:2]]
        try:
            self._writer.append_data(np.pad(picture, [*missing, (0, 0)], mode="edge"))
        except OSError:
            self.failed = True


@contextmanager
def open_video(env: Renders, path: Path, fps: int) -> Iterator[Video]:
    """Write an mp4 (H.264) and create its folders; warn if ffmpeg cannot write it.

    Raises:
        ValueError: ffmpeg is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        writer = imageio.get_writer(path, format="FFMPEG", fps=fps, codec="libx264", macro_block_size=BLOCK)
    except ImportError as error:
        raise ValueError(f"{path}: writing mp4 needs ffmpeg ({error}). Run: {pip_install('video')}") from error
    video = Video(env, writer)
    with writer:
        yield video
    if video.failed:
        path.unlink(missing_ok=True)
        logger.warning("%s: not written, as ffmpeg ended, for the reason above; the evaluation continues", path)
