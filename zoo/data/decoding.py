"""From the bytes of an image file to an RGB picture of 8 bits a channel, upright."""

import contextlib
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm")


class Unreadable(Exception):
    """An image that cannot be decoded."""


def decode(raw: Any) -> Image.Image:
    """An RGB image from an open file, a path or bytes, turned as its EXIF orientation says.

    Grey levels of 16 bits are scaled to 8, floats from [0, 1]. Raises Unreadable, also for 32-bit integers and other
    floats, whose range nothing tells.
    """
    try:
        if isinstance(raw, str):  # Pillow 13 maps a file that it opens itself, and turns uncompressed TIFF wrongly then
            raw = Path(raw).read_bytes()
        image = Image.open(io.BytesIO(raw) if isinstance(raw, bytes) else raw)
        image.load()
        # a picture whose EXIF block is damaged is shown as it lies, as browsers do
        with contextlib.suppress(SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
            ImageOps.exif_transpose(image, in_place=True)
        return _eight_bits(image).convert("RGB")
    except UnidentifiedImageError as error:  # whose message names an object in memory
        raise Unreadable("it is no image of a known format") from error
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow raises on broken files
        raise Unreadable(str(error)) from error


def content(cell: Any) -> Any:
    """The bytes or the path in an undecoded image cell of the `datasets` library. Raises Unreadable if it is empty."""
    found = (cell or {}).get("bytes") or (cell or {}).get("path")
    if not found:
        raise Unreadable("the row holds no image")
    return found


def _eight_bits(image: Image.Image) -> Image.Image:
    """`image` itself, or with levels 0 to 255 in place of 16-bit or float ones, which Pillow would clip."""
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if not deep and image.mode not in ("I", "F"):
        return image
    pixels = np.asarray(image)
    top = 65535 if deep else 1
    if not deep and (image.mode == "I" or not (pixels.min() >= 0 and pixels.max() <= top)):
        kind = "32-bit integers" if image.mode == "I" else "floats outside of 0 to 1"
        raise Unreadable(f"its pixels are {kind}; allowed: 8 or 16 bits, or floats from 0 to 1")
    return Image.fromarray((pixels * (255 / top)).round().astype(np.uint8))
