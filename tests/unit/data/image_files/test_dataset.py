"""Loaders of image files: equal draws whoever decodes, bad files, folders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

import manycard as mc
from manycard.data import Feed, GlobalLoader
from manycard.data.image_files import ImageFiles, ImageSample
from manycard.data.image_files.backends.dali import Dali
from manycard.errors import BatchError, SettingError

SIZE = 32


def folder(photographs: Path, **settings: Any) -> Any:
    return mc.data.image_folder(photographs, SIZE, augment=True, **{"backend": "threads", "workers": 2, **settings})


def epochs(dataset: Any, count: int = 1, batch_size: int = 10, **settings: Any) -> list[list[Any]]:
    loader = GlobalLoader(dataset, batch_size, shuffle=True, seed=3, feed=Feed(), **settings)
    found = [list(loader) for _ in range(count)]
    dataset.close()
    return found


def test_an_epoch_has_every_file_once(photographs: Path) -> None:
    dataset = folder(photographs)
    assert len(dataset) == 24
    assert dataset.classes == [f"class-{number}" for number in range(10)]
    (batches,) = epochs(dataset)
    assert [images.shape for images, _ in batches] == [(10, 3, SIZE, SIZE)] * 2 + [(4, 3, SIZE, SIZE)]
    labels = torch.cat([labels for _, labels in batches])
    assert sorted(labels.tolist()) == sorted(dataset.labels)


def test_draws_differ_between_epochs_and_repeat(photographs: Path) -> None:
    one = epochs(folder(photographs), 2, batch_size=24)
    two = epochs(folder(photographs), 2, batch_size=24)
    for first, second in zip(one, two, strict=True):
        assert torch.equal(first[0][0], second[0][0])
    assert not torch.equal(one[0][0][0].sum(), one[1][0][0].sum())


@pytest.mark.parametrize(
    "settings",
    [{"num_workers": 2}, {"num_workers": 1}],
    ids=lambda settings: f"{settings['num_workers']} loader workers",
)
def test_loader_workers_change_nothing(settings: dict[str, int], photographs: Path) -> None:
    (here,), (there,) = epochs(folder(photographs)), epochs(folder(photographs), **settings)
    for (images, labels), (others, other_labels) in zip(here, there, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_ranks_have_the_shards_of_one_card(photographs: Path) -> None:
    (whole,) = epochs(folder(photographs))
    parts = [epochs(folder(photographs), rank=rank, world_size=3)[0] for rank in range(3)]
    for number, (images, labels) in enumerate(whole):
        assert torch.equal(images, torch.cat([part[number][0] for part in parts]))
        assert torch.equal(labels, torch.cat([part[number][1] for part in parts]))


def test_the_processs_own_draws_are_left_alone(photographs: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    epochs(folder(photographs))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("backend", ["threads", "torchvision", "dali", "auto"])
def test_it_is_a_dataset_for_pytorchs_own_loader(backend: str, photographs: Path) -> None:
    """Also where a worker is forked from a process whose backend works already."""
    if backend == "dali" and Dali.missing():
        pytest.skip("DALI is not installed")
    dataset = folder(photographs, backend=backend)
    image, label = dataset[-1]
    assert image.shape == (3, SIZE, SIZE)
    assert label == 9
    images, labels = next(iter(DataLoader(dataset, batch_size=5, num_workers=1)))
    assert images.shape == (5, 3, SIZE, SIZE)
    assert labels.tolist() == dataset.labels[:5]
    with pytest.raises(IndexError):
        dataset[24]
    dataset.close()


def test_training_on_two_cards_is_that_on_one(photographs: Path) -> None:
    """From files to weights."""
    weights = []
    for cards in ("cpu:1", "cpu:2"):
        parallel = mc.Parallel("dp", cards=cards, seed=5)
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, 10))
        model, optimizer = parallel.setup(net, torch.optim.SGD(net.parameters(), lr=1e-3))
        step = parallel.train_step(
            lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]), model, optimizer
        )
        dataset = folder(photographs)
        for batch in parallel.loader(dataset, batch_size=9, shuffle=True):
            step(batch)
        weights.append(net[1].weight.detach().clone())
        dataset.close()
        parallel.close()
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=1e-5)


def test_a_dataset_travels_to_other_processes(photographs: Path) -> None:
    dataset = folder(photographs)
    images, labels = dataset.load_batch([0, 1], [5, 6])
    loader = DataLoader(_Fixed(dataset), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    others, other_labels = next(iter(loader))
    assert torch.equal(images, others)
    assert other_labels.tolist() == labels
    dataset.close()


def test_datasets_can_be_joined_and_cut(photographs: Path, paths: list[str]) -> None:
    """Each file is decoded by the dataset that it belongs to."""
    one = mc.data.images(paths[:3], [10, 11, 12], SIZE, backend="threads")
    two = mc.data.images(paths[3:6], [13, 14, 15], SIZE, backend="threads", dtype=torch.float32, mean=(0, 0, 0))
    expected = torch.cat([one.load_batch([0, 1, 2], [0] * 3)[0], two.load_batch([0, 1, 2], [0] * 3)[0]])
    order = [4, 0, 5, 2, 1, 3]
    images, labels = next(iter(DataLoader(ConcatDataset([one, two]), batch_size=6, sampler=order)))
    assert labels.tolist() == [14, 10, 15, 12, 11, 13]
    assert torch.equal(images, expected[order])
    images, labels = next(iter(DataLoader(Subset(one, [2, 0]), batch_size=2)))
    assert labels.tolist() == [12, 10]
    assert torch.equal(images, expected[[2, 0]])
    one.close()
    two.close()


class _Fixed(Dataset[Any]):
    """Samples with seeds that are known."""

    def __init__(self, dataset: ImageFiles) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> ImageSample:
        return ImageSample(self.dataset, number, 5 + number)


# ---- bad files ---------------------------------------------------------------------------------------------


@pytest.fixture
def with_bad(paths: list[str], tmp_path: Path) -> list[str]:
    """Good, cut off, good, no image."""
    (tmp_path / "cut.jpg").write_bytes(Path(paths[0]).read_bytes()[:9000])
    (tmp_path / "text.png").write_bytes(b"hello")
    return [paths[0], str(tmp_path / "cut.jpg"), paths[1], str(tmp_path / "text.png")]


def test_a_bad_file_is_named(with_bad: list[str]) -> None:
    dataset = mc.data.images(with_bad, [0, 1, 2, 3], SIZE, backend="threads")
    with pytest.raises(BatchError, match=r"cut\.jpg: it is cut off.*on_error='skip'"):
        next(iter(DataLoader(dataset, batch_size=4)))
    dataset.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_skipped_and_counted(
    workers: int, with_bad: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = mc.data.images(with_bad, [0, 1, 2, 3], SIZE, backend="threads", on_error="skip")
    for _ in range(2):
        images, labels = next(iter(DataLoader(dataset, batch_size=4, num_workers=workers)))
        # The next good image of the batch takes the place, the first one's at its end.
        assert labels.tolist() == [0, 2, 2, 0]
        assert torch.equal(images[1], images[2])
        assert torch.equal(images[3], images[0])
        assert not torch.equal(images[0], images[2])
    assert dataset.skipped == [with_bad[1], with_bad[3]]
    assert capfd.readouterr().err.count(f"skipped {with_bad[1]}: it is cut off") == 1
    dataset.close()


def test_the_summary_counts_an_epoch(with_bad: list[str]) -> None:
    dataset = mc.data.images(with_bad, None, SIZE, backend="threads", on_error="skip")
    list(DataLoader(dataset, batch_size=2))
    summary = dataset.summary()
    assert (summary["backend"], summary["images"], summary["skipped"]) == ("threads", 4, 2)
    assert summary["skipped_files"] == dataset.skipped
    assert summary["images_per_s"] > 0
    assert dataset.summary()["images"] == 0
    dataset.close()


def test_a_batch_of_bad_files_is_an_error(with_bad: list[str]) -> None:
    dataset = mc.data.images(with_bad[1::2], None, SIZE, backend="threads", on_error="skip")
    with pytest.raises(BatchError, match="none of the 2 files"):
        list(DataLoader(dataset, batch_size=2))
    dataset.close()


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": 0}, "size"),
        ({"size": "large"}, "size"),
        ({"size": (3, 4, 5)}, "size"),
        ({"augment": "yes"}, "augment"),
        ({"backend": "opencv"}, "backend"),
        ({"workers": 0}, "workers"),
        ({"on_error": "ignore"}, "on_error"),
        ({"std": (1, 0, 1)}, "std"),
        ({"mean": (1, 2)}, "mean"),
        ({"dtype": torch.int64}, "dtype"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], named: str, photographs: Path) -> None:
    settings = {"size": SIZE, **settings}
    with pytest.raises(SettingError, match=named):
        mc.data.image_folder(photographs, settings.pop("size"), **settings)


def test_labels_and_files_must_agree(paths: list[str]) -> None:
    with pytest.raises(SettingError, match="24 files"):
        mc.data.images(paths, [0], SIZE)


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no such folder"):
        mc.data.image_folder(tmp_path / "gone", SIZE)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(SettingError, match="no image in it"):
        mc.data.image_folder(tmp_path, SIZE)


def test_backends_on_cards_refuse_loader_workers(photographs: Path) -> None:
    dataset = folder(photographs)
    dataset._choice["name"] = "card"
    # PyTorch hands on what happens in workers as a RuntimeError.
    with pytest.raises(RuntimeError, match="SettingError: num_workers=1"):
        next(iter(DataLoader(dataset, batch_size=5, num_workers=1)))


def test_batches_decoded_ahead_are_those_that_collating_waits_for(photographs: Path) -> None:
    """A collate function of the user's own is given whole batches, so it shows what each should be."""
    (ahead,) = epochs(folder(photographs))
    (waited,) = epochs(folder(photographs), collate_fn=lambda samples: default_collate(samples))
    for (images, labels), (others, other_labels) in zip(ahead, waited, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


def test_samples_in_samples_are_decoded_ahead_too(photographs: Path) -> None:
    class WithNumber(Dataset[Any]):
        def __init__(self, inside: ImageFiles) -> None:
            self.inside = inside

        def __len__(self) -> int:
            return len(self.inside)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"pair": self.inside[index], "number": index}

    inside = folder(photographs)
    for batch in GlobalLoader(WithNumber(inside), 10, shuffle=True, feed=Feed()):
        images, labels = batch["pair"]
        assert images.shape[1:] == (3, SIZE, SIZE)
        assert labels.tolist() == [inside.labels[number] for number in batch["number"].tolist()]
    inside.close()


def test_a_loader_left_early_goes_on_with_the_next_batch(photographs: Path) -> None:
    """What was decoded ahead does not count, and nothing of it is left running."""
    dataset = folder(photographs)
    (whole,) = epochs(folder(photographs), batch_size=4)
    loader = GlobalLoader(dataset, 4, shuffle=True, seed=3, feed=Feed())
    for _batch in loader:
        break
    state = loader.state_dict()
    assert state["batches"] == 1
    again = GlobalLoader(dataset, 4, shuffle=True, seed=3, feed=Feed())
    again.load_state_dict(state)
    for (images, _), (others, _) in zip(again, whole[1:], strict=True):
        assert torch.equal(images, others)
    dataset.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("manycard-batches")]
