"""One kernel that cuts, resizes, turns and normalises a batch of images of different sizes, without padding.

Each pixel of a window is the weighted sum of the pixels of its image that the triangle filter reaches (see
`manycard.data.image_files.batched`), read where the decoder left them: the kernel is given the addresses of the
images. Nothing is copied in between, and a large photograph costs no more memory than a small one.

Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from manycard.data.image_files.recipe import Recipe
from manycard.data.image_files.view import View

__all__ = ["show_by_kernel"]

_PIXELS = 256
"""Pixels of a window that one program makes."""
_NUMBERS = 14
"""Numbers that the kernel is told of each image."""


@triton.jit
def _axis(place, first, length, resized, shown, reversed_):  # type: ignore[no-untyped-def]
    """Where the filter's centre lies along one axis, half its width, and the first pixel that it may reach."""
    place = tl.where(reversed_ != 0, shown - 1 - place, place)
    scale = length.to(tl.float32) / resized.to(tl.float32)
    centre = ((first + place).to(tl.float32) + 0.5) * scale
    support = tl.maximum(scale, 1.0)
    return centre, support, tl.floor(centre - support - 0.5).to(tl.int32)


@triton.jit
def _weight(source, centre, support, length):  # type: ignore[no-untyped-def]
    weight = 1.0 - tl.abs(source.to(tl.float32) + 0.5 - centre) / support
    return tl.where((source >= 0) & (source < length), tl.maximum(weight, 0.0), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    table, out, scale_by, shift_by, high, wide, numbers: tl.constexpr, pixels: tl.constexpr, bytes_out: tl.constexpr
):
    image = tl.program_id(0)
    about = table + image * numbers
    address = tl.load(about).to(tl.pointer_type(tl.uint8))
    plane = tl.load(about + 1)
    width = tl.load(about + 2)
    left = tl.load(about + 3).to(tl.int32)
    top = tl.load(about + 4).to(tl.int32)
    box_width = tl.load(about + 5).to(tl.int32)
    box_height = tl.load(about + 6).to(tl.int32)
    resized_high = tl.load(about + 7).to(tl.int32)
    resized_wide = tl.load(about + 8).to(tl.int32)
    first_row = tl.load(about + 9).to(tl.int32)
    first_column = tl.load(about + 10).to(tl.int32)
    transposed = tl.load(about + 11)
    mirrored = tl.load(about + 12)
    flipped = tl.load(about + 13)

    place = tl.program_id(1) * pixels + tl.arange(0, pixels)
    inside = place < high * wide
    down, across = place // wide, place % wide
    # A stored image that lies on its side: rows of the window are columns of the result.
    row = tl.where(transposed != 0, across, down)
    column = tl.where(transposed != 0, down, across)
    rows = tl.where(transposed != 0, wide, high)
    columns = tl.where(transposed != 0, high, wide)
    back_rows = tl.where(transposed != 0, mirrored, flipped)
    back_columns = tl.where(transposed != 0, flipped, mirrored)
    y, support_y, start_y = _axis(row, first_row, box_height, resized_high, rows, back_rows)
    x, support_x, start_x = _axis(column, first_column, box_width, resized_wide, columns, back_columns)

    red = tl.zeros([pixels], tl.float32)
    green = tl.zeros([pixels], tl.float32)
    blue = tl.zeros([pixels], tl.float32)
    total_y = tl.zeros([pixels], tl.float32)
    total_x = tl.zeros([pixels], tl.float32)
    taps_y = (2 * support_y).to(tl.int32) + 3
    taps_x = (2 * support_x).to(tl.int32) + 3
    for step in range(taps_x):
        total_x += _weight(start_x + step, x, support_x, box_width)
    for step_y in range(taps_y):
        source_y = start_y + step_y
        weight_y = _weight(source_y, y, support_y, box_height)
        total_y += weight_y
        line = address + (top + source_y).to(tl.int64) * width + left
        for step_x in range(taps_x):
            source_x = start_x + step_x
            weight = weight_y * _weight(source_x, x, support_x, box_width)
            reached = inside & (weight > 0)
            pixel = line + source_x
            red += weight * tl.load(pixel, reached, 0).to(tl.float32)
            green += weight * tl.load(pixel + plane, reached, 0).to(tl.float32)
            blue += weight * tl.load(pixel + 2 * plane, reached, 0).to(tl.float32)

    total = total_y * total_x
    made = out + image.to(tl.int64) * 3 * high * wide + place
    for channel in tl.static_range(3):
        value = (red if channel == 0 else green if channel == 1 else blue) / total
        if bytes_out:
            value = tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)
        else:
            value = value * tl.load(scale_by + channel) + tl.load(shift_by + channel)
        tl.store(made + channel * high * wide, value.to(out.dtype.element_ty), inside)


def show_by_kernel(images: Sequence[Tensor], views: Sequence[View], recipe: Recipe) -> Tensor:
    """What `manycard.data.image_files.batched.show` does, in one kernel on a card."""
    device = images[0].device
    held = [image.contiguous() for image in images]  # until the kernel is queued
    told = [
        (
            image.data_ptr(), image.shape[1] * image.shape[2], image.shape[2], *view.box, *view.resized, *view.inside,
            view.transposed, view.mirrored, view.flipped,
        )
        for image, view in zip(held, views, strict=True)
    ]  # fmt: skip
    table = torch.tensor(told, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    out = torch.empty(len(held), 3, *recipe.size, dtype=recipe.dtype, device=device)
    scale, shift = recipe.scale_and_shift(device)
    high, wide = recipe.size
    grid = (len(held), triton.cdiv(high * wide, _PIXELS))
    _kernel[grid](
        table, out, scale, shift, high, wide,
        numbers=_NUMBERS, pixels=_PIXELS, bytes_out=recipe.dtype == torch.uint8,
    )  # fmt: skip
    return out
