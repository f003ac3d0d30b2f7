"""Pictures as PNG files in memory, by Pillow."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """The file of a picture [H, W, C] with 1, 3 or 4 channels."""
    file = BytesIO()
    Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(file, "PNG")
    return file.getvalue()


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """The picture [H, W, C] in a file; any format that Pillow reads."""
    picture = np.asarray(Image.open(BytesIO(data)))
    return picture[:, :, None] if picture.ndim == 2 else picture
