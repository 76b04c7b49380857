"""Files that are not plain upright JPEGs, each with the upright RGB image that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image

KINDS = ["grey", "cmyk", "rgb-jpeg", "progressive", "png", "png16-grey", "png16-rgb", "palette", "transparent", "webp"]


def photograph() -> Any:
    """640 x 427, RGB."""
    return Image.fromarray(load_sample_image("flower.jpg"))


def write(kind: str, folder: Path) -> tuple[str, Any]:
    """Write one file; its path, and what a reader should see (before JPEG's losses)."""
    image = photograph()
    path = folder / f"{kind}.{'jpg' if kind in ('grey', 'cmyk', 'rgb-jpeg', 'progressive') else 'png'}"
    if kind == "grey":
        image = image.convert("L")
        image.save(path, quality=95)
    elif kind == "cmyk":
        image.convert("CMYK").save(path, quality=95)
    elif kind == "rgb-jpeg":
        image.save(path, quality=95, keep_rgb=True)
    elif kind == "progressive":
        image.save(path, quality=95, progressive=True)
    elif kind == "png16-grey":
        image = image.convert("L")
        values = np.asarray(image).astype(np.uint16)
        Image.fromarray(values * 256 + 77).save(path)
    elif kind == "png16-rgb":
        _write_png16(path, np.asarray(image))
    elif kind == "palette":
        image = image.quantize(64)
        image.save(path)
    elif kind == "transparent":
        image.putalpha(128)
        image.save(path)
    elif kind == "webp":
        path = folder / "image.webp"
        image.save(path, quality=95)
    else:
        image.save(path)
    return str(path), image.convert("RGB")


def write_turned(orientation: int, folder: Path) -> tuple[str, Any]:
    """A JPEG that is stored so that EXIF `orientation` makes it upright."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = photograph()
    # Of the eight turns all but 6 and 8 are their own opposites.
    backwards = Image.Exif()
    backwards[0x0112] = {6: 8, 8: 6}.get(orientation, orientation)
    turned = upright.copy()
    turned.info["exif"] = backwards.tobytes()
    turned.getexif().update(backwards)
    stored = ImageOps.exif_transpose(turned)
    path = folder / f"turned-{orientation}.jpg"
    stored.save(path, quality=95, exif=exif)
    return str(path), upright


def _write_png16(path: Path, values: Any) -> None:
    """An RGB PNG of 16 bits a channel, which Pillow doesn't write."""
    import struct
    import zlib

    height, width, _ = values.shape
    rows = (values.astype(">u2") * 256 + 77).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 1)) + chunk(b"IEND", b"")
    )
