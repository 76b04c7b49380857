"""``num_workers="auto"``: as many workers as end the waiting, and every batch as without."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import manycard as mc
from manycard.data import Feed, GlobalLoader, limits, tuning
from manycard.data.tuning import Tuner
from manycard.errors import SettingError

from .datasets import Augmented, Numbers, Stream, joined, ranks, walk


class Machine:
    """A clock, and a loader of which a number of workers gives a batch in so much time, on so many cores."""

    def __init__(self, load: float, work: float, cores: int, disk: float = 0.0) -> None:
        self.now = 0.0
        self.load, self.work, self.cores, self.disk = load, work, cores, disk

    def epoch(self, tuner: Tuner, batches: int) -> list[int]:
        """Walk an epoch; the workers that loaded each batch."""
        used = []
        tuner.begin(epoch=True)
        for number in range(batches):
            self.now += self._wait(tuner.workers)
            tuner.handed()
            used.append(tuner.workers)
            self.now += self.work
            tuner.asked()
            last = number == batches - 1
            if tuner.decide(ended=last) and not last:
                tuner.begin(epoch=False)
        return used

    def _wait(self, workers: int) -> float:
        if not workers:
            return self.load
        each = max(self.load / min(workers, self.cores), self.disk * workers)
        return max(each - self.work, 0.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a machine whose clock the tuner reads."""

    def make(**settings: Any) -> Machine:
        made = Machine(**settings)
        monkeypatch.setattr(tuning.time, "perf_counter", lambda: made.now)
        return made

    return make


@pytest.mark.parametrize(
    ("load", "work", "cores", "expected"),
    [
        (0.001, 0.1, 16, 0),  # loading is 1 % of the time
        (0.1, 0.1, 16, 1),  # beside the work it costs nothing
        (0.4, 0.1, 16, 4),
        (2.0, 0.1, 16, 16),  # twenty would be needed
        (0.4, 0.1, 2, 2),
        (0.00001, 0.0001, 16, 0),  # no batch comes faster from a process
    ],
)
def test_workers_are_added_until_the_cards_no_longer_wait_or_the_cores_are_full(
    machine: Any, load: float, work: float, cores: int, expected: int
) -> None:
    made = machine(load=load, work=work, cores=cores, disk=0.001 if load < 0.0001 else 0.0)
    tuner = Tuner(None, cores, 2)
    for _ in range(4):
        made.epoch(tuner, 400)
    assert tuner.workers == expected
    assert tuner.settled
    assert f"num_workers={expected}" in tuner.describe(0)


def test_more_workers_that_make_it_slower_are_taken_back(machine: Any) -> None:
    """As on a disk that many readers slow down, or where workers share one core."""
    made = machine(load=0.4, work=0.1, cores=16, disk=0.2)
    tuner = Tuner(None, 16, 2)
    for _ in range(3):
        made.epoch(tuner, 100)
    assert tuner.settled
    assert tuner.workers == 0, "4 workers take 0.8 s a batch, none takes 0.5 s"


def test_the_first_steps_which_may_compile_are_left_out(machine: Any) -> None:
    made = machine(load=0.4, work=0.1, cores=16)
    tuner = Tuner(None, 16, 2)
    tuner.begin(epoch=True)
    for number in range(40):
        made.now += made._wait(tuner.workers)
        tuner.handed()
        made.now += 60.0 if number < 3 else made.work
        tuner.asked()
        if tuner.decide(ended=False):
            break
    assert tuner.workers == 4, "with the first steps, waiting would be 2 % of the time"


def test_waiting_that_comes_later_opens_the_search_again(machine: Any) -> None:
    """Samples that grow, or a disk that others use by then."""
    made = machine(load=0.001, work=0.1, cores=16)
    tuner = Tuner(None, 16, 2)
    assert made.epoch(tuner, 50)[-1] == 0
    assert tuner.settled
    made.load = 0.4
    made.epoch(tuner, 50)
    assert made.epoch(tuner, 50)[-1] == 4


def test_epochs_of_a_few_batches_are_measured_as_a_whole(machine: Any) -> None:
    made = machine(load=0.4, work=0.1, cores=16)
    tuner = Tuner(None, 16, 2)
    assert [made.epoch(tuner, 4)[0] for _ in range(4)] == [0, 4, 4, 4]


def test_a_number_that_was_given_stays(machine: Any) -> None:
    made = machine(load=0.4, work=0.1, cores=16)
    tuner = Tuner(3, 16, 2)
    assert made.epoch(tuner, 100) == [3] * 100
    assert tuner.describe(0) == ""


class Slow(Augmented):
    """Augmented samples that take 4 ms each, mostly waiting (two cores would do for many)."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(index)


@pytest.mark.parametrize(("world_size", "persistent"), [(1, True), (2, False)])
def test_auto_changes_workers_in_the_middle_of_an_epoch_and_no_sample(
    world_size: int, persistent: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "_WINDOW_SECONDS", 0.1)
    expected = [joined([walk(loader)]) for loader in ranks(Augmented(160), 4, 1, shuffle=True) for _ in range(2)]
    tuned = ranks(Slow(160), 4, world_size, shuffle=True, num_workers="auto", persistent_workers=persistent)
    first = joined([walk(loader) for loader in tuned])
    second = joined([walk(loader) for loader in tuned])
    assert [first, second] == expected
    assert all(len(loader._tuner.tried) > 1 for loader in tuned), "none was a different number of workers"
    assert f"num_workers={tuned[0].num_workers}: waiting for data took" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("reason", ["shared memory", "pickling"])
def test_auto_goes_on_without_workers_that_cannot_be(
    reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "_WINDOW_SECONDS", 0.05)
    more: dict[str, Any] = {}
    if reason == "pickling":
        more = {"multiprocessing_context": "spawn", "collate_fn": lambda samples: torch.stack(samples)}
    else:
        real = limits.shutil.disk_usage
        monkeypatch.setattr(limits.shutil, "disk_usage", lambda path: real(path)._replace(free=100))
    loader = GlobalLoader(Slow(80), 4, num_workers="auto", feed=Feed(), **more)
    assert joined([walk(loader)]) == joined([walk(GlobalLoader(Augmented(80), 4, feed=Feed()))])
    assert loader.num_workers == 0
    said = capsys.readouterr().err
    assert ("goes on without workers" in said and "pickle" in said) == (reason == "pickling")


def test_auto_for_an_existing_dataloader_and_its_other_word() -> None:
    parallel = mc.Parallel("single", cards="cpu:1", seed=1)
    made = parallel.loader(DataLoader(Numbers(6), 2, num_workers=1, prefetch_factor=3), workers="auto")
    assert made.num_workers == 0
    assert [batch.tolist() for batch in made] == [[0, 1], [2, 3], [4, 5]]
    assert parallel.loader(Numbers(6), 2, workers=1).num_workers == 1
    with pytest.raises(SettingError, match="workers=1"):
        parallel.loader(Numbers(6), 2, workers=1, num_workers=2)
    with pytest.raises(SettingError, match="num_workers='many'"):
        parallel.loader(Numbers(6), 2, workers="many")
    parallel.close()


def test_auto_gives_a_stream_one_worker_and_so_an_order_that_no_clock_decides() -> None:
    loader = GlobalLoader(Stream(7), 3, num_workers="auto", feed=Feed())
    assert loader.num_workers == 1
    assert joined([walk(loader)]) == [[0, 1, 2], [3, 4, 5], [6]]


def test_an_epoch_that_waits_long_for_data_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "_LONG_WAIT", 0.05)
    loader = GlobalLoader(Slow(40), 2, feed=Feed())
    for _ in range(2):
        walk(loader)
    assert len(walk(GlobalLoader(Slow(8), 4, feed=Feed()))) == 2, "too few batches to say anything"
    said = capsys.readouterr().err
    assert said.count("epoch 0 went into loading in the script's own process") == 1
    assert 'num_workers="auto"' in said
    assert loader.waiting > 0.5


def test_waiting_is_the_part_of_the_time_inside_the_loader(machine: Any) -> None:
    tuner = Tuner(0, 4, 2)
    machine(load=0.3, work=0.1, cores=4).epoch(tuner, 20)
    assert tuner.waiting.share == pytest.approx(0.75)
    assert torch.tensor(tuner.waiting.seconds_a_batch) == pytest.approx(0.4)
