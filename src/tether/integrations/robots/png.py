"""Encodes and decodes PNG images in memory, with Pillow."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def encode_png(picture: NDArray[np.uint8]) -> bytes:
    """Return the PNG file of an image [H, W, C] with 1, 3 or 4 channels."""
    file = BytesIO()
    Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(file, "PNG")
    return file.getvalue()


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """Return the image [H, W, C] in a file of any format that Pillow supports.

    Raises:
        ValueError: the pixels are not bytes, for example in a depth image.
        OSError, SyntaxError: the file is broken.
    """
    image: Image.Image = Image.open(BytesIO(data))
    if image.mode in ("1", "P", "CMYK", "YCbCr"):  # black and white, palette, and other colour spaces
        image = image.convert("RGB")
    if image.mode not in ("L", "RGB", "RGBA"):
        raise ValueError(f"a picture of mode {image.mode} is not read: store 8 bits of grey, RGB or RGBA.")
    picture = np.asarray(image)
    return picture[:, :, None] if picture.ndim == 2 else picture
