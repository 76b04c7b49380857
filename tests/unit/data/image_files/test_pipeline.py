"""A DALI pipeline of the user's own: every sample once an epoch, on one to three pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import manycard as mc
from manycard.errors import MissingExtraError, SettingError

try:
    from nvidia.dali import fn, pipeline_def, types
except ImportError:
    pytest.skip("DALI is not installed", allow_module_level=True)


@pipeline_def
def training(files: list[str], shard_id: int, num_shards: int, pad: bool = True, sharded: bool = True) -> Any:
    encoded, number = fn.readers.file(
        files=files,
        labels=list(range(len(files))),
        random_shuffle=True,
        seed=1,
        shard_id=shard_id if sharded else 0,
        num_shards=num_shards if sharded else 1,
        pad_last_batch=pad,
        name="Reader",
    )
    image = fn.decoders.image(encoded, output_type=types.RGB)
    return fn.resize(image, size=(16, 16)), number


def numbers(batches: list[Any]) -> list[int]:
    return [int(number) for _, each in batches for number in each]


@pytest.mark.parametrize("leave_early", [False, True])
@pytest.mark.parametrize("cards", [1, 2, 3])
def test_every_sample_once_an_epoch(cards: int, leave_early: bool, paths: list[str]) -> None:
    files = paths[:23]
    parallel = mc.Parallel("dp", cards=f"cpu:{cards}")
    loader = parallel.loader(mc.data.dali_pipeline(training, 6, cards=parallel.cards, files=files, workers=1))
    orders = []
    for _ in range(4):
        if leave_early:
            next(iter(loader))
        batches = list(loader)
        assert batches[0][0].shape == (6, 16, 16, 3)
        orders.append(numbers(batches))
        assert sorted(orders[-1]) == list(range(23))
    assert len(loader) == len(batches)
    if not leave_early:
        assert orders[0] != orders[1]
    parallel.close()


def test_the_images_belong_to_the_labels(paths: list[str]) -> None:
    stream = mc.data.dali_pipeline(training, 5, files=paths, workers=1)
    alone = training(files=paths, shard_id=0, num_shards=1, batch_size=24, num_threads=1, device_id=None)
    alone.build()
    images, labels = (torch.utils.dlpack.from_dlpack(each.as_tensor()) for each in alone.run())
    expected = dict(zip(labels.flatten().tolist(), images, strict=True))
    for found, which in stream:
        for image, label in zip(found, which.flatten().tolist(), strict=True):
            assert torch.equal(image, expected[label])


def test_readers_that_can_not_be_exact_are_refused(paths: list[str]) -> None:
    with pytest.raises(SettingError, match="pad_last_batch"):
        mc.data.dali_pipeline(training, 5, files=paths, pad=False)
    with pytest.raises(SettingError, match=r"reader='Files'.*Reader"):
        mc.data.dali_pipeline(training, 5, files=paths, reader="Files")
    with pytest.raises(SettingError, match="num_shards"):
        mc.data.dali_pipeline(training, 6, files=paths, sharded=False, cards=mc.choose_cards("cpu:2").cards)
    with pytest.raises(SettingError, match="batch_size"):
        mc.data.dali_pipeline(training, 1, files=paths, cards=mc.choose_cards("cpu:2").cards)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from manycard.data.image_files.backends.dali import Dali

    monkeypatch.setattr(Dali, "missing", classmethod(lambda kind: "nvidia-dali-cuda130"))
    with pytest.raises(MissingExtraError, match=r"manycard\[dali\]"):
        mc.data.dali_pipeline(training, 1)
