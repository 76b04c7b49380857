"""Finding image files: a folder with one folder a class, or a list.

Behaviour:
    * The classes of a folder are its sub-folders, sorted; so are the files in each, at any depth. A link to a folder
      is followed. A folder without sub-folders that hold images is one class.
    * Settings are checked here, before any file is read; files are read when batches are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from manycard.data.image_files.augment import Augment
from manycard.data.image_files.backends.choose import check_name, default_workers
from manycard.data.image_files.dataset import ImageFiles
from manycard.data.image_files.places import own_devices
from manycard.data.image_files.recipe import IMAGENET_MEAN, IMAGENET_STD, make_recipe
from manycard.data.sampler import whole_number
from manycard.errors import SettingError

__all__ = ["IMAGE_SUFFIXES", "find_images", "image_folder", "images"]

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


def images(
    files: Sequence[str | os.PathLike[str]],
    labels: Sequence[Any] | torch.Tensor | None,
    size: int | tuple[int, int],
    *,
    augment: Augment | bool = False,
    backend: str = "auto",
    workers: int | None = None,
    cards: Sequence[Any] | None = None,
    on_error: str = "raise",
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    dtype: torch.dtype = torch.float32,
    classes: Sequence[str] = (),
) -> ImageFiles:
    """A dataset of image files, for `Parallel.loader` or a DataLoader.

    Args:
        files: paths.
        labels: one for each file; None for 0 everywhere.
        size: height and width of every image, or one number for both.
        augment: True for `RandomResizedCrop`, False for `CentreCrop`, or one of them with settings of its own.
        backend: ``auto`` (measured on the first batch), ``threads``, ``torchvision``, ``dali``, ``dali-mixed``,
            ``card``.
        workers: threads or processes that decode; all cores of the process by default.
        cards: torch's indices, or `Parallel.cards`: where the last two decode; ``auto`` tries them only there.
        on_error: ``raise`` at a bad file, or ``skip`` it.
        mean: of each channel, from 0 to 1; so is `std`.
        dtype: of the images; ``torch.uint8`` leaves bytes that are not normalised.
        classes: names of the labels.

    Returns:
        A dataset; a loader of it gives ``[images, labels]``, images ``[n, 3, height, width]``.

    Raises:
        SettingError: a setting has a value that can't work.
        MissingExtraError: the backend needs a package that is not installed.

    Example:
        >>> from sklearn.datasets import load_sample_image, __file__ as sklearn_datasets
        >>> photograph = Path(sklearn_datasets).with_name("images") / "flower.jpg"
        >>> dataset = images([photograph] * 4, [0, 1, 2, 3], 64, augment=True, backend="threads")
        >>> pictures, labels = next(iter(torch.utils.data.DataLoader(dataset, batch_size=4)))
        >>> pictures.shape, labels.tolist()
        (torch.Size([4, 3, 64, 64]), [0, 1, 2, 3])
    """
    if labels is None:
        labels = [0] * len(files)
    if len(labels) != len(files):
        raise SettingError("labels", f"{len(labels)} labels", f"there are {len(files)} files", fix="give one a file")
    if on_error not in ("raise", "skip"):
        raise SettingError("on_error", on_error, "it is neither 'raise' nor 'skip'", fix="leave it out for 'raise'")
    check_name(backend)
    return ImageFiles(
        [os.fspath(file) for file in files],
        labels,  # type: ignore[arg-type]
        make_recipe(size, augment, mean, std, dtype),
        backend=backend,
        workers=default_workers() if workers is None else whole_number("workers", workers, 1, "leave it out"),
        cards=[device.index for device in own_devices(cards) if device.type == "cuda"] or None,
        on_error=on_error,
        classes=classes,
    )


def image_folder(path: str | os.PathLike[str], size: int | tuple[int, int], **settings: Any) -> ImageFiles:
    """A dataset of a folder with one sub-folder of images for each class.

    Args:
        path: the folder.
        size: height and width of every image, or one number for both.
        settings: those of `images`, but for files, labels and classes.

    Raises:
        SettingError: there is no such folder, no image in it, or a setting has a value that can't work.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise SettingError("path", str(path), "there is no such folder", fix="give the folder of the classes")
    found = {child.name: list(find_images(child)) for child in sorted(folder.iterdir()) if child.is_dir()}
    classes = {name: files for name, files in found.items() if files}
    if not classes:
        classes = {folder.name: list(find_images(folder))}
    files = [file for each in classes.values() for file in each]
    if not files:
        raise SettingError(
            "path", str(path), "there is no image in it", fix=f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    labels = [label for label, each in enumerate(classes.values()) for _ in each]
    return images(files, labels, size, classes=list(classes), **settings)


def find_images(folder: Path) -> Iterator[str]:
    """The image files below `folder`, sorted."""
    for where, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield os.path.join(where, name)
