"""All backends give the same images for the same seeds, name bad files, and can be closed and used again."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torchvision.io import ImageReadMode, decode_jpeg

from manycard.data.image_files.augment import CentreCrop, RandomResizedCrop
from manycard.data.image_files.backends import BACKENDS, Backend, DecodedBatch, Inline, make_backend, measure
from manycard.data.image_files.backends.card import Card
from manycard.data.image_files.backends.dali import Dali
from manycard.data.image_files.backends.threads import Threads
from manycard.data.image_files.recipe import Recipe, Request
from manycard.errors import MissingExtraError, SettingError
from tests.unit.data.image_files import odd

TRAINING = Recipe((64, 56), RandomResizedCrop())
EVALUATION = Recipe((64, 56), CentreCrop())
NAMES = ["threads", "torchvision", "dali", "card"]
CLOSE = 1.5
"""Levels of 255 that backends differ by at most, in the mean over an image: DCT-scaled decoding, and rounding between
two passes of resizing, made up to 1.1."""


def make(name: str, recipe: Recipe, workers: int = 2) -> Backend:
    """A backend on the host; the card's decoder is then torchvision's for the host, and all else is what cards run."""
    if name == "dali" and Dali.missing():
        pytest.skip("DALI is not installed")
    if name == "card":
        return Card(
            recipe,
            workers,
            [torch.device("cpu")] * 2,
            lambda encoded: [decode_jpeg(each.tensor(), mode=ImageReadMode.RGB) for each in encoded],
        )
    return BACKENDS[name](recipe, workers)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def every_kind(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> list[Request]:
    """Plain photographs, and every odd kind."""
    folder = tmp_path_factory.mktemp("kinds")
    found = paths[:5] + [odd.write(kind, folder)[0] for kind in odd.KINDS]
    found += [odd.write_turned(orientation, folder)[0] for orientation in range(2, 9)]
    return [Request(path, seed) for seed, path in enumerate(found)]


@pytest.fixture(scope="session")
def expected(every_kind: list[Request]) -> dict[Recipe, torch.Tensor]:
    return {recipe: Inline(recipe, 1).load(every_kind).images for recipe in (TRAINING, EVALUATION)}


def levels(recipe: Recipe) -> torch.Tensor:
    """What one of 255 levels is after normalising."""
    return recipe.scale_and_shift()[0]


@pytest.mark.parametrize("recipe", [TRAINING, EVALUATION], ids=["training", "evaluation"])
def test_same_images(
    name: str, recipe: Recipe, every_kind: list[Request], expected: dict[Recipe, torch.Tensor]
) -> None:
    backend = make(name, recipe)
    found = backend.load(every_kind)
    backend.close()
    assert found.bad == {}
    assert found.images.dtype == torch.float32
    apart = ((found.images - expected[recipe]) / levels(recipe)).abs().mean(dim=(1, 2, 3))
    assert apart.max() < CLOSE, {
        request.path: round(float(each), 2) for request, each in zip(every_kind, apart, strict=True)
    }


def test_batches_of_other_sizes(name: str, paths: list[str]) -> None:
    backend = make(name, TRAINING)
    reference = Inline(TRAINING, 1).load([Request(path, 7) for path in paths[:20]]).images
    for first, last in ((0, 3), (3, 20), (0, 1)):
        found = backend.load([Request(path, 7) for path in paths[first:last]]).images
        assert ((found - reference[first:last]) / levels(TRAINING)).abs().mean() < 1.0
    backend.close()
    assert backend.load([Request(paths[0], 7)]).images.shape == (1, 3, 64, 56)
    backend.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16])
def test_other_dtypes(name: str, dtype: torch.dtype, paths: list[str]) -> None:
    requests = [Request(path, seed) for seed, path in enumerate(paths[:6])]
    recipe = Recipe(TRAINING.size, TRAINING.augment, dtype=dtype)
    backend = make(name, recipe)
    images = backend.load(requests).images
    backend.close()
    assert images.dtype == dtype
    scale, shift = recipe.scale_and_shift()
    values = images.float() * scale + shift if dtype == torch.uint8 else images.float()
    assert ((values - Inline(TRAINING, 1).load(requests).images) / scale).abs().mean() < 1.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["threads", "torchvision"])
def test_bytes_can_be_normalised_where_they_are_used(kind: str, dtype: torch.dtype, paths: list[str]) -> None:
    """On a card in earnest; any device shows what is computed."""
    requests = [Request(path, seed) for seed, path in enumerate(paths[:6])]
    recipe = Recipe(TRAINING.size, TRAINING.augment, dtype=dtype)
    there = BACKENDS[kind](recipe, 2, torch.device("cpu"))
    found = there.load(requests).images
    there.close()
    assert found.dtype == dtype
    torch.testing.assert_close(found, Inline(recipe, 1).load(requests).images)


def test_bad_files_leave_the_others_alone(name: str, paths: list[str], tmp_path: Path) -> None:
    cut, text = tmp_path / "cut.jpg", tmp_path / "text.jpg"
    cut.write_bytes(Path(paths[0]).read_bytes()[:9000])
    text.write_bytes(b"hello")
    names = [paths[0], str(cut), paths[1], str(text), str(tmp_path / "gone.jpg"), paths[2]]
    backend = make(name, TRAINING)
    found = backend.load([Request(path, 3) for path in names])
    assert sorted(found.bad) == [1, 3, 4]
    assert "cut off" in found.bad[1]
    assert "no image" in found.bad[3]
    assert "No such file" in found.bad[4]
    good = Inline(TRAINING, 1).load([Request(names[row], 3) for row in (0, 2, 5)]).images
    assert ((found.images[[0, 2, 5]] - good) / levels(TRAINING)).abs().mean() < CLOSE
    assert len(backend.load([Request(str(cut), 0)]).bad) == 1
    backend.close()


def test_a_file_that_only_the_decoder_finds_bad(name: str, paths: list[str], tmp_path: Path) -> None:
    """The header and the end are right; the tables that say how to decode are not there."""
    data = Path(paths[0]).read_bytes()
    start, scan = data.find(b"\xff\xc4"), data.find(b"\xff\xda")
    path = tmp_path / "no-tables.jpg"
    # A restart interval and scan that ask for a component that the frame doesn't have.
    path.write_bytes(data[:start] + data[scan : scan + 5] + b"\x77" + data[scan + 6 :])
    backend = make(name, TRAINING)
    found = backend.load([Request(paths[0], 3), Request(str(path), 3), Request(paths[1], 3)])
    assert list(found.bad) == [1]
    good = Inline(TRAINING, 1).load([Request(paths[0], 3), Request(paths[1], 3)]).images
    assert ((found.images[[0, 2]] - good) / levels(TRAINING)).abs().mean() < CLOSE
    again = backend.load([Request(paths[1], 3)])
    assert not again.bad
    backend.close()


def test_threads_leave_pytorchs_number_of_threads_alone(paths: list[str]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        backend = Threads(TRAINING, 2)
        backend.load([Request(paths[0], 0)])
        assert torch.get_num_threads() == 3
        assert backend._pool is not None
        assert backend._pool.submit(torch.get_num_threads).result() == 1
        backend.close()
    finally:
        torch.set_num_threads(before)


class Slow(Inline):
    """Takes 4 ms an image more."""

    name = "slow"

    def load(self, requests: list[Request]) -> DecodedBatch:  # type: ignore[override]
        import time

        time.sleep(0.004 * len(requests))
        return super().load(requests)


class Broken(Inline):
    name = "broken"

    def load(self, requests: list[Request]) -> DecodedBatch:  # type: ignore[override]
        raise RuntimeError("no engine\nand more")


def test_measuring_tells_fast_slow_and_broken_apart(paths: list[str]) -> None:
    requests = [Request(path, 0) for path in paths]
    backends = {"slow": Slow(TRAINING, 1), "inline": Inline(TRAINING, 1), "broken": Broken(TRAINING, 1)}
    speeds, failed = measure(backends, requests, rounds=1)
    assert failed == {"broken": "no engine"}
    assert speeds["inline"] > 1.5 * speeds["slow"]


def test_auto_says_what_it_took(paths: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    backend = make_backend(TRAINING, [Request(path, 0) for path in paths], "auto", 2, None)
    said = capfd.readouterr().err
    assert f"images are decoded by {backend.name!r}" in said
    assert "torchvision" in said
    assert "threads" in said
    backend.close()


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(SettingError, match=r"backend='ffcv'.*threads"):
        make_backend(TRAINING, [], "ffcv", 1, None)
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="there is none"):
            make_backend(TRAINING, [], "card", 1, None)
    if Dali.missing():
        with pytest.raises(MissingExtraError, match=r"manycard\[dali\]"):
            make_backend(TRAINING, [], "dali", 1, None)


def test_a_backend_can_not_be_shared_by_accident(paths: list[str]) -> None:
    """A copy of what a backend is made of makes its own threads."""
    recipe = copy.deepcopy(TRAINING)
    one, two = make("threads", recipe), make("threads", recipe)
    one.load([Request(paths[0], 0)])
    one.close()
    assert not two.load([Request(paths[0], 0)]).bad
    two.close()


def test_worker_processes_end_when_the_script_is_killed(paths: list[str]) -> None:
    script = (
        "import sys, time, psutil, torch\n"
        "from manycard.data.image_files.augment import CentreCrop\n"
        "from manycard.data.image_files.backends.processes import Processes\n"
        "from manycard.data.image_files.recipe import Recipe, Request\n"
        "if __name__ == '__main__':\n"
        "    Processes(Recipe((8, 8), CentreCrop()), 2).load([Request(sys.argv[1], 0)] * 8)\n"
        "    print(*[child.pid for child in psutil.Process().children()], flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, paths[0]], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
    assert len(workers) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    _, left = psutil.wait_procs(workers, timeout=10)
    for worker in left:
        worker.kill()
    assert not left
