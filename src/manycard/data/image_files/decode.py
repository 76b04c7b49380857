"""From a file's bytes to the view of it, on the CPU.

Behaviour:
    * A plain JPEG is decoded whole by torchvision, or by Pillow where that is not installed. One whose view is reduced
      to a third or less is decoded at 1/2, 1/4 or 1/8 of its size, by Pillow: the decoder then computes a smaller DCT.
    * Everything else goes through Pillow: EXIF orientation applied, CMYK, palettes and transparency turned into RGB,
      16 bits a channel cut to the higher 8.
    * Both decoders run outside the interpreter lock.
    * A file that can't be decoded raises `BadImage` with the decoder's reason.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from manycard.data.image_files.header import BadImage, JpegHeader, read_header
from manycard.data.image_files.recipe import Recipe
from manycard.data.image_files.view import View

__all__ = ["decode", "jpeg_decoder", "open_upright", "read_file", "stored_view", "turn"]

_TO_FILTER = 1.5
"""How many more pixels than are shown, each way, a reduced image keeps. With 1 views differ from those of the whole
image by up to 2.6 of 255 levels in the mean over an image, with 1.5 by up to 1.4, half a level on average."""


def read_file(path: str) -> bytes:
    """The bytes of a file.

    Raises:
        BadImage: it can't be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadImage(f"it can't be read ({error.strerror})") from error


def decode(data: bytes, seed: int, recipe: Recipe) -> Tensor:
    """The view of one image: uint8 ``[3, height, width]``.

    Raises:
        BadImage: `data` is no whole image.
    """
    header = read_header(data)
    if header is None:
        image = open_upright(data)
        view = recipe.augment.view(seed, image.width, image.height, recipe.size)
        return turn(_view_of_pillow(image, view, 1), view)
    view = stored_view(header, seed, recipe)
    reduced = _reduction(view)
    if reduced == 1 and jpeg_decoder() is not None:
        return turn(_resize(_decode_whole(data), view), view)
    return turn(_view_of_pillow(_decode_reduced(data, reduced), view, reduced), view)


def stored_view(header: JpegHeader, seed: int, recipe: Recipe) -> View:
    """The view of a sample, in the stored image."""
    width, height = header.upright
    return recipe.augment.view(seed, width, height, recipe.size).in_stored(header.orientation, width, height)


def turn(image: Tensor, view: View) -> Tensor:
    """Turn and mirror a window ``[..., height, width]`` that was cut out of the stored image."""
    if view.transposed:
        image = image.transpose(-1, -2)
    dims = [dim for dim, wanted in ((-1, view.mirrored), (-2, view.flipped)) if wanted]
    return image.flip(dims) if dims else image


def _reduction(view: View) -> int:
    """By how much a decoder may reduce the image and leave enough pixels to filter: 1, 2, 4 or 8."""
    most = min(view.box.width / view.resized[1], view.box.height / view.resized[0]) / _TO_FILTER
    return next((factor for factor in (8, 4, 2) if most >= factor), 1)


@functools.cache
def jpeg_decoder() -> Callable[..., Any] | None:
    """torchvision's decoder, giving RGB; None where it is not installed. Its release 0.29 announces its removal."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    return functools.partial(decode_jpeg, mode=ImageReadMode.RGB)


def _decode_whole(data: bytes) -> Tensor:
    decoder = jpeg_decoder()
    assert decoder is not None, "without a decoder Pillow decodes"
    # A bytearray, since PyTorch warns of tensors over memory that can't be written.
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        return decoder(encoded)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise BadImage(str(error).splitlines()[0]) from error


def _decode_reduced(data: bytes, factor: int) -> Any:
    """A plain JPEG as a Pillow image of 1 / `factor` of its size, not turned."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        if factor > 1:
            image.draft("RGB", (image.width // factor, image.height // factor))
        return image.convert("RGB")
    except Exception as error:
        raise BadImage(_reason(error)) from error


def open_upright(data: bytes) -> Any:
    """Any image as an upright Pillow image in RGB.

    Raises:
        BadImage: Pillow can't read it.
    """
    from PIL import Image, ImageOps

    try:
        image: Any = Image.open(io.BytesIO(data))
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode == "I" or image.mode.startswith("I;16"):
            # Pillow's own conversion would clip 16 bits at 255.
            image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:  # a decoder may raise anything on damaged data
        raise BadImage(_reason(error)) from error


def _reason(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":
        return "it is no image that Pillow knows"
    return str(error) or type(error).__name__


def _resize(image: Tensor, view: View) -> Tensor:
    """Cut and resize uint8 ``[3, height, width]``."""
    left, top, width, height = view.box
    part = image[:, top : top + height, left : left + width]
    if view.resized != (height, width):
        part = F.interpolate(part[None], size=view.resized, mode="bilinear", antialias=True)[0]
    return _window(part, view)


def _view_of_pillow(image: Any, view: View, factor: int) -> Tensor:
    """Cut and resize a Pillow image that was decoded at 1 / `factor` of its size."""
    from PIL import Image

    left, top, width, height = view.box
    size = (view.resized[1], view.resized[0])
    if factor == 1:
        image = image.crop((left, top, left + width, top + height))
        image = image.resize(size, Image.Resampling.BILINEAR)
    else:
        right, bottom = min((left + width) / factor, image.width), min((top + height) / factor, image.height)
        image = image.resize(size, Image.Resampling.BILINEAR, box=(left / factor, top / factor, right, bottom))
    return _window(torch.from_numpy(np.array(image)).permute(2, 0, 1), view)


def _window(image: Tensor, view: View) -> Tensor:
    (top, left), (height, width) = view.inside, view.size
    return image[:, top : top + height, left : left + width]
