"""Decoding of image files to upright RGB images with 8 bits per channel."""

import contextlib
import io
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm")


class Unreadable(Exception):
    """An image that cannot be decoded."""


def decode(raw: str | bytes | IO[bytes]) -> Image.Image:
    """Decode an open file, a path or bytes to an RGB image, rotated by its EXIF orientation.

    Grey levels of 16 bits, and floats in [0, 1], are scaled to 8 bits. Raises Unreadable for a damaged file, and for
    32-bit integers and floats outside of [0, 1], whose range is unknown.
    """
    try:
        if isinstance(raw, str):  # given a path, Pillow 13 maps the file and rotates uncompressed TIFF wrongly
            raw = Path(raw).read_bytes()
        image = Image.open(io.BytesIO(raw) if isinstance(raw, bytes) else raw)
        image.load()
        # as in browsers, an image with a damaged EXIF block is not rotated
        with contextlib.suppress(SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
            ImageOps.exif_transpose(image, in_place=True)
        return _eight_bits(image).convert("RGB")
    except UnidentifiedImageError as error:  # Pillow's message names only an object in memory
        raise Unreadable("it is no image of a known format") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # for damaged files
        raise Unreadable(str(error)) from error


def content(cell: Mapping[str, bytes | str] | None) -> bytes | str:
    """Return the bytes or the path in an undecoded image cell of the `datasets` library. Raises Unreadable if it is
    empty."""
    found = (cell or {}).get("bytes") or (cell or {}).get("path")
    if not found:
        raise Unreadable("the row holds no image")
    return found


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit and float levels to 0 to 255 (Pillow would clip them); return other images unchanged."""
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if not deep and image.mode not in ("I", "F"):
        return image
    pixels = np.asarray(image)
    top = 65535 if deep else 1
    if not deep and (image.mode == "I" or not (pixels.min() >= 0 and pixels.max() <= top)):
        kind = "32-bit integers" if image.mode == "I" else "floats outside of 0 to 1"
        raise Unreadable(f"its pixels are {kind}; allowed: 8 or 16 bits, or floats from 0 to 1")
    return Image.fromarray((pixels * (255 / top)).round().astype(np.uint8))
