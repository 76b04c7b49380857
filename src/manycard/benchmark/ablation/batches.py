"""Global batches for an ablation: ready in host memory, or decoded from files as people do and as manycard does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from manycard.benchmark.ablation.plan import AblationSpec
from manycard.benchmark.workloads.images import SyntheticImages
from manycard.benchmark.workloads.synthetic import SyntheticWorkload
from manycard.data import image_folder
from manycard.data.image_files.backends import default_workers
from manycard.data.image_files.recipe import IMAGENET_MEAN, IMAGENET_STD
from manycard.engine.batches.sizes import shard_sizes
from manycard.errors import MissingExtraError
from manycard.parallel import Parallel

__all__ = ["file_loader", "host_batches"]

Batch = tuple[Tensor, Tensor]
_DIFFERENT = 2


def host_batches(
    spec: AblationSpec, workload: SyntheticWorkload, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """This process's part of drawn global batches, in host memory, without end."""
    sizes = shard_sizes(spec.batch, world_size)
    start = sum(sizes[:rank])
    kept = []
    for number in range(_DIFFERENT):
        generator = torch.Generator().manual_seed(spec.seed * _DIFFERENT + number)
        parts = [part[start : start + sizes[rank]].clone() for part in workload.draw(spec.batch, generator)]
        kept.append(tuple(part.pin_memory() if spec.recipe.pinned else part for part in parts))
    yield from cycle(kept)


def file_loader(spec: AblationSpec, workload: SyntheticImages, parallel: Parallel | None = None) -> Any:
    """A loader of the spec's files; walked again and again.

    Raises:
        MissingExtraError: torchvision is not installed.
    """
    assert spec.files is not None, "there is a folder"
    recipe, size = spec.recipe, workload.small_size if spec.small else workload.size
    workers = default_workers() if recipe.workers else 0
    cards = None if spec.simulated or parallel is None else [card.device.index for card in parallel.cards]
    if recipe.backend:
        # It has threads of its own, or decodes on cards: loader workers would only stand in its way.
        dataset: Any = image_folder(spec.files, size, augment=True, cards=cards)
        workers = 0
    else:
        dataset = _as_people_do(spec.files, size)
    if parallel is not None and recipe.backend:
        return parallel.loader(dataset, batch_size=spec.batch, shuffle=True, drop_last=True)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        spec.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=recipe.pinned,
        drop_last=True,
    )
    return loader if parallel is None else parallel.loader(loader)


def _as_people_do(folder: str, size: int) -> Any:
    """torchvision's ImageFolder and transforms, as in PyTorch's own ImageNet example."""
    try:
        from torchvision import datasets, transforms
    except ImportError as error:
        raise MissingExtraError("torchvision", "vision", "training from files") from error

    steps = [
        transforms.RandomResizedCrop(size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    return datasets.ImageFolder(folder, transforms.Compose(steps))
