"""Cutting, resizing, mirroring and normalising a batch of images of different sizes in one pass, on any device.

On a card one kernel does it all (`manycard.data.image_files.window_kernel`), where Triton works. Elsewhere it is done
by matrix products: resizing with a triangle filter is linear in rows and in columns, so a view is two matrix products:
``window = R @ box @ C^T``, with R ``[height, box height]`` and C ``[width, box width]``. The window and the mirroring
are a choice of rows of R and C. Boxes are laid into one padded tensor, and a whole batch is then two batched matrix
products, which is what cards do best. Padding meets weights of 0.

The filter is that of ``torch.nn.functional.interpolate(..., antialias=True)`` and of Pillow's BILINEAR: as wide as the
reduction, cut at the box's edges and scaled to sum to 1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from manycard.data.image_files.augment import CentreCrop
from manycard.data.image_files.recipe import Recipe
from manycard.data.image_files.view import Box, View

__all__ = ["show", "show_by_products"]

Show = Callable[[Sequence[Tensor], Sequence[View], Recipe], Tensor]

_PADDED_BYTES = 256 * 2**20
"""Largest padded tensor of boxes, in bytes of uint8. One large photograph must not make the whole batch large."""


def show(images: Sequence[Tensor], views: Sequence[View], recipe: Recipe) -> Tensor:
    """The views of whole stored images.

    Args:
        images: uint8 ``[3, height, width]``, all on one device.
        views: of the stored images.
        recipe: the size, mean, deviation and dtype of the result.

    Returns:
        ``[n, 3, height, width]`` on the images' device.
    """
    kernel = _kernel() if images[0].is_cuda else None
    return (kernel or show_by_products)(images, views, recipe)


@functools.cache
def _kernel() -> Show | None:
    """The kernel, where it works on the current card: Triton needs to be installed, and a C compiler."""
    try:
        from manycard.data.image_files.window_kernel import show_by_kernel

        pixel = torch.zeros(3, 1, 1, dtype=torch.uint8, device="cuda")
        show_by_kernel([pixel], [View(Box(0, 0, 1, 1), (1, 1), (0, 0), (1, 1))], Recipe((1, 1), CentreCrop()))
    except Exception as error:  # whatever a compiler raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(
            f"manycard: images are resized by matrix products, as Triton doesn't work here: {reason}", file=sys.stderr
        )
        return None
    return show_by_kernel


def show_by_products(images: Sequence[Tensor], views: Sequence[View], recipe: Recipe) -> Tensor:
    """What `show` does, by matrix products, in groups of images of similar size."""
    device = images[0].device
    out = torch.empty(len(images), 3, *recipe.size, dtype=recipe.dtype, device=device)
    for rows in _groups(views):
        window = _windows([images[row] for row in rows], [views[row] for row in rows], device)
        if recipe.dtype == torch.uint8:
            window = window.round_().clamp_(0, 255)
        else:
            scale, shift = recipe.scale_and_shift(device)
            window = window.mul_(scale).add_(shift)
        out[torch.tensor(rows, device=device)] = window.to(recipe.dtype)
    return out


def _groups(views: Sequence[View]) -> Iterator[list[int]]:
    """Rows that are padded together: of one shape of window and of similar size, up to a limit of bytes."""
    order = sorted(
        range(len(views)), key=lambda row: (views[row].transposed, views[row].box.height * views[row].box.width)
    )
    group: list[int] = []
    height = width = 0
    for row in order:
        view = views[row]
        tall, wide = max(height, view.box.height), max(width, view.box.width)
        if group and (
            views[group[0]].transposed != view.transposed or 3 * tall * wide * (len(group) + 1) > _PADDED_BYTES
        ):
            yield group
            group, tall, wide = [], view.box.height, view.box.width
        group.append(row)
        height, width = tall, wide
    if group:
        yield group


def _windows(images: Sequence[Tensor], views: Sequence[View], device: torch.device) -> Tensor:
    """float32 ``[n, 3, height, width]`` with values from 0 to 255, turned and mirrored."""
    boxes = torch.zeros(
        len(views), 3, max(view.box.height for view in views), max(view.box.width for view in views),
        dtype=torch.uint8, device=device,
    )  # fmt: skip
    for padded, image, (box, *_) in zip(boxes, images, views, strict=True):
        part = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
        padded[:, : box.height, : box.width].copy_(part)
    down = torch.tensor(
        [(v.box.height, v.resized[0], v.inside[0], v.mirrored if v.transposed else v.flipped) for v in views]
    )
    across = torch.tensor(
        [(v.box.width, v.resized[1], v.inside[1], v.flipped if v.transposed else v.mirrored) for v in views]
    )
    rows, columns = views[0].size
    # Half precision holds bytes exactly and products are summed in fp32; on the CPU it would be slow.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    left = _weights(down.to(device), rows, boxes.shape[2]).to(dtype)
    right = _weights(across.to(device), columns, boxes.shape[3]).to(dtype)
    narrowed = boxes.flatten(1, 2).to(dtype) @ right.transpose(1, 2)
    window: Tensor = left[:, None] @ narrowed.view(*boxes.shape[:3], columns)
    return (window.transpose(2, 3) if views[0].transposed else window).float()


def _weights(axis: Tensor, shown: int, padded: int) -> Tensor:
    """The filter along one axis: ``[n, shown, padded]``.

    Args:
        axis: for each image the length of its box, the length that is resized to, where the window begins, and
            whether it is reversed; ``[n, 4]``.
        shown: length of the window.
        padded: length of the padded boxes.
    """
    length, resized, first, reverse = (column[:, None].float() for column in axis.T)
    place = torch.arange(shown, device=axis.device, dtype=torch.float32)[None]
    place = first + torch.where(reverse > 0, shown - 1 - place, place)
    scale = length / resized
    centre = (place + 0.5) * scale
    support = scale.clamp(min=1.0)
    source = torch.arange(padded, device=axis.device, dtype=torch.float32)[None, None] + 0.5
    distance = (source - centre[:, :, None]).abs() / support[:, :, None]
    weights: Tensor = (1 - distance).clamp_(min=0) * (source < length[:, :, None])
    total: Tensor = weights.sum(2, keepdim=True)
    return weights / total
