"""What a loader reads from: a dataset with settings, or an existing `torch.utils.data.DataLoader`, as one thing.

Behaviour:
    * A dataset needs a batch size. A DataLoader brings its own settings, and giving them a second time is refused,
      not guessed about.
    * What decides a DataLoader's batches is kept (`manycard.data.batching`), and so are collate_fn, workers and
      pinned memory.
    * An iterable that can't be indexed is a stream; one that can be walked only once, and an empty dataset, are
      refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from manycard.data.batching import Batching
from manycard.data.sampler import Order, whole_number
from manycard.errors import SettingError

__all__ = ["Source", "length_of", "make_source"]

_BATCH_SIZE_FIX = "give the size of the global batch, such as batch_size=64"
_WORKERS_FIX = '0 loads in the script\'s own process, "auto" measures how many are needed'
_PASSED_ON = frozenset(
    {"timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers"}
)
"""Settings that go to PyTorch's DataLoader as they are, besides those that are named below."""
_OTHER_SETTINGS = frozenset({"sampler", "batch_sampler", "generator", "in_order", "pin_memory_device"})


@dataclass(frozen=True)
class Source:
    """Where the samples of global batches come from."""

    dataset: Any
    """Map-style, or an iterable that can be walked again and again."""
    order: Order | None
    """The global batches of each epoch; None for a stream, which has the order it comes in."""
    seed: int
    """What orders and draws come from, with the number of the epoch."""
    batch_size: int | None
    """Samples in a global batch; None where the dataset or a batch sampler decides."""
    drop_last: bool
    """Whether a last batch that is not full is left out."""
    whole_items: bool
    """Whether each item that the dataset gives is a global batch already."""
    workers: int | None
    """Processes that load; None for as many as measuring finds."""
    options: dict[str, Any]
    """Other settings for PyTorch's DataLoader."""

    @property
    def length(self) -> int | None:
        """Samples in the dataset; None where it doesn't say."""
        return length_of(self.dataset)


def make_source(
    dataset: Any,
    batch_size: int | None,
    *,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    num_workers: int | str,
    collate_fn: Callable[[list[Any]], Any] | None,
    pin_memory: bool | None,
    warn: bool,
    settings: dict[str, Any],
) -> Source:
    """Read the arguments of a `GlobalLoader`.

    Args:
        warn: whether this process speaks for the run.
        settings: further arguments of PyTorch's DataLoader.

    Raises:
        SettingError: a setting has a value that can't work, or is given twice.
    """
    _refuse_unknown(settings)
    tuned = num_workers == "auto"
    if isinstance(dataset, DataLoader):
        given: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle or None, "drop_last": drop_last or None}
        given |= {"num_workers": None if tuned else num_workers or None, "collate_fn": collate_fn, **settings}
        return _from_loader(dataset, given, tuned, seed=seed, pin_memory=pin_memory, warn=warn)
    workers = None if tuned else whole_number("num_workers", num_workers, 0, _WORKERS_FIX)
    options = {name: value for name, value in settings.items() if name in _PASSED_ON}
    options |= {"collate_fn": collate_fn, "pin_memory": pin_memory}
    sampler, batch_sampler = settings.get("sampler"), settings.get("batch_sampler")
    if batch_sampler is None:
        if batch_size is None:
            raise SettingError("batch_size", None, "a dataset has no batch size of its own", fix=_BATCH_SIZE_FIX)
        batch_size = whole_number("batch_size", batch_size, 1, _BATCH_SIZE_FIX)
    elif batch_size is not None or shuffle or drop_last or sampler is not None:
        raise SettingError(
            "batch_sampler",
            type(batch_sampler).__name__,
            "it decides the batches, so batch_size, shuffle, drop_last and sampler can't be given beside it",
            fix="leave those out",
        )
    if sampler is not None and shuffle:
        raise SettingError("shuffle", shuffle, "the sampler decides the order", fix="leave out shuffle or sampler")
    batching = Batching(sampler, batch_sampler, batch_size, bool(shuffle), bool(drop_last), settings.get("generator"))
    return _assemble(dataset, batching, seed, workers, options, warn)


def _refuse_unknown(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if name not in _PASSED_ON | _OTHER_SETTINGS:
            raise SettingError(
                name,
                value,
                "a loader has no such setting",
                fix=f"it passes on {', '.join(sorted(_PASSED_ON | _OTHER_SETTINGS))}",
            )
    if settings.get("in_order", True) is not True:
        raise SettingError(
            "in_order",
            settings["in_order"],
            "batches must come in order for equal batches on all ranks and for an exact resume",
            fix="leave it out",
        )


def _from_loader(
    loader: DataLoader[Any], given: dict[str, Any], tuned: bool, *, seed: int, pin_memory: bool | None, warn: bool
) -> Source:
    """Take over the settings of an existing DataLoader; `tuned`: but for its number of workers."""
    for name, value in given.items():
        if value is not None:
            raise SettingError(
                name,
                value,
                "the DataLoader given has its own settings",
                fix=f"leave out {name}, or give the DataLoader's dataset instead of the DataLoader",
            )
    _refuse_unknown({"in_order": getattr(loader, "in_order", True)})
    if warn and type(loader).__iter__ is not DataLoader.__iter__:
        warnings.warn(
            f"{type(loader).__name__} iterates in a way of its own, which manycard's loader does not use: it takes "
            "the dataset, sampler, collate_fn and worker settings",
            stacklevel=2,
        )
    options = {name: getattr(loader, name) for name in _PASSED_ON}
    options |= {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory or pin_memory}
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    if loader.batch_size is not None:
        batch_sampler = None
    elif batch_sampler is not None:
        sampler = None  # type: ignore[assignment]
    batching = Batching(sampler, batch_sampler, loader.batch_size, False, loader.drop_last, loader.generator)
    return _assemble(loader.dataset, batching, seed, None if tuned else loader.num_workers, options, warn)


def _assemble(
    dataset: Any, batching: Batching, seed: int, workers: int | None, options: dict[str, Any], warn: bool
) -> Source:
    """Check the dataset and settle who decides the batches."""
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise SettingError(
            "dataset",
            type(dataset).__name__,
            "a data pipe splits itself over ranks and workers where no loader can see it",
            fix="write it as a Dataset or an IterableDataset",
        )
    batching = batching.unpacked()
    seed, order, length = batching.seed(seed), None, length_of(dataset)
    if _is_stream(dataset):
        _check_stream(dataset, batching)
        # How many workers a stream has may decide its order, which must not follow from measured times.
        workers = 1 if workers is None else workers
    elif length == 0:
        raise SettingError(
            "dataset",
            type(dataset).__name__,
            "it has 0 samples",
            fix="look at the path or the filter that it was made from",
        )
    else:
        order = batching.order(dataset, length, seed, warn=warn)
        if warn and batching.drop_last and length is not None and length < (batching.batch_size or 1):
            warnings.warn(
                f"drop_last=True leaves nothing of {length} samples with batch_size={batching.batch_size}: epochs are "
                "empty",
                stacklevel=2,
            )
    return Source(dataset, order, seed, batching.batch_size, batching.drop_last, batching.whole_items, workers, options)


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def _check_stream(dataset: Any, batching: Batching) -> None:
    if isinstance(dataset, Iterator):
        raise SettingError(
            "dataset",
            type(dataset).__name__,
            "an iterator can be walked once only, and every epoch walks the dataset",
            fix="give an IterableDataset whose __iter__ starts anew",
        )
    if batching.shuffle:
        raise SettingError("shuffle", True, "a stream has the order it comes in", fix="shuffle inside the dataset")
    for name, sampler in (("sampler", batching.sampler), ("batch_sampler", batching.batch_sampler)):
        # PyTorch gives the DataLoader of a stream a sampler of endless Nones.
        if sampler is not None and type(sampler).__name__ != "_InfiniteConstantSampler":
            raise SettingError(name, type(sampler).__name__, "a stream can't be indexed", fix=f"leave out {name}")


def length_of(dataset: Any) -> int | None:
    """Samples in a dataset; None where it doesn't say."""
    if not isinstance(dataset, Sized):
        return None
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
