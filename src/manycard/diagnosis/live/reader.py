"""Looking at the cards and the jobs, again and again.

Behaviour:
    * Nothing here starts CUDA or takes memory on a card.
    * Rates (NVLink, CPU) are since the last look; the first look has none.
    * A card that stops answering, a process that ends and a driver that isn't there leave gaps, and raise nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import psutil
import pynvml

from manycard.cards.health import read_clock_reasons
from manycard.cards.nvml import Session, session
from manycard.cards.processes import look_up
from manycard.diagnosis.live.jobs import Job, manycard_jobs
from manycard.diagnosis.live.sample import CardSample, JobSample, ProcessOnCard, RankSample, Sample

__all__ = ["LiveReader"]

_ALL_LINKS = 0xFFFFFFFF
"""The scope of a field that means all of a card's NVLinks together."""


class LiveReader:
    """Reads samples; a context manager.

    Args:
        job: show this run and its cards alone; None for all cards and all runs of manycard.
        api: NVML's functions; a test hands in its own.
        find_jobs: where runs are found when `job` is None.
    """

    def __init__(
        self, job: Job | None = None, *, api: Any = pynvml, find_jobs: Callable[[], Sequence[Job]] = manycard_jobs
    ) -> None:
        self._job = job
        self._api = api
        self._find_jobs = find_jobs
        self._open = ExitStack()
        self._nvml = Session(None)
        self._handles: list[Any] = []
        self._counters: dict[tuple[int, int], tuple[float, int]] = {}
        self._cpu: dict[tuple[int, float], tuple[float, float]] = {}

    def __enter__(self) -> LiveReader:
        self._nvml = self._open.enter_context(session(self._api))
        count = self._nvml.ask("nvmlDeviceGetCount") or 0
        self._handles = [self._nvml.ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        # Each question about PCIe traffic takes the driver 20 ms, so cards are asked at once.
        self._pool = self._open.enter_context(ThreadPoolExecutor(max(count, 1)))
        psutil.cpu_percent()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self) -> Sample:
        """Look once."""
        places = [place for place, handle in enumerate(self._handles) if handle is not None]
        cards = list(self._pool.map(self._read_card, places))
        jobs = [self._job] if self._job is not None else list(self._find_jobs())
        samples = [self._read_job(job, cards) for job in jobs if job.alive()]
        if self._job is not None:
            cards = _of_job(cards, samples)
        note = self._nvml.why_not or ("" if places else "the NVIDIA driver runs and finds no card")
        return Sample(time.time(), tuple(cards), tuple(samples), psutil.cpu_percent(), note)

    def _read_card(self, place: int) -> CardSample:
        nvml, handle, api = self._nvml, self._handles[place], self._nvml.api
        memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
        use = nvml.ask("nvmlDeviceGetUtilizationRates", handle)
        return CardSample(
            name=f"card {place}",
            model=nvml.ask("nvmlDeviceGetName", handle) or "unknown card",
            uuid=nvml.ask("nvmlDeviceGetUUID", handle) or "",
            use=None if use is None else int(use.gpu),
            memory_used=None if memory is None else int(memory.total - memory.free),
            memory_total=None if memory is None else int(memory.total),
            power=_thousandths(nvml.ask("nvmlDeviceGetPowerUsage", handle)),
            power_limit=_thousandths(nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
            temperature=nvml.ask("nvmlDeviceGetTemperature", handle, api.NVML_TEMPERATURE_GPU),
            sm_clock=nvml.ask("nvmlDeviceGetClockInfo", handle, api.NVML_CLOCK_SM),
            reasons=read_clock_reasons(nvml, handle) or (),
            pcie_in=_kib(nvml.ask("nvmlDeviceGetPcieThroughput", handle, api.NVML_PCIE_UTIL_RX_BYTES)),
            pcie_out=_kib(nvml.ask("nvmlDeviceGetPcieThroughput", handle, api.NVML_PCIE_UTIL_TX_BYTES)),
            nvlink_in=self._nvlink_rate(place, api.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            nvlink_out=self._nvlink_rate(place, api.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            processes=self._read_processes(handle),
        )

    def _nvlink_rate(self, place: int, field: int) -> float | None:
        """Bytes a second since the last look, by a counter of KiB."""
        answer = self._nvml.ask("nvmlDeviceGetFieldValues", self._handles[place], [(field, _ALL_LINKS)])
        if answer is None or answer[0].nvmlReturn != self._nvml.api.NVML_SUCCESS:
            return None
        now, count = time.monotonic(), int(answer[0].value.ullVal)
        before = self._counters.get((place, field))
        self._counters[place, field] = (now, count)
        if before is None or count < before[1] or now <= before[0]:
            return None
        return (count - before[1]) * 1024 / (now - before[0])

    def _read_processes(self, handle: Any) -> tuple[ProcessOnCard, ...] | None:
        listed = self._nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if listed is None:
            return None
        found = [look_up(each.pid, each.usedGpuMemory) for each in listed]
        return tuple(ProcessOnCard(each.pid, each.memory, each.user, each.command) for each in found)

    def _read_job(self, job: Job, cards: Sequence[CardSample]) -> JobSample:
        ranks = [rank for process in job.family() if (rank := self._read_process(process)) is not None]
        pids = {rank.pid for rank in ranks}
        on = tuple(card.name for card in cards if any(each.pid in pids for each in card.processes or ()))
        known = [rank.cpu for rank in ranks if rank.cpu is not None]
        return JobSample(
            job.pid,
            job.command,
            cards=on,
            simulated=None if on else job.simulated(),
            cpu=sum(known) if known else None,
            memory=sum(rank.memory or 0 for rank in ranks),
            processes=tuple(ranks),
        )

    def _read_process(self, process: psutil.Process) -> RankSample | None:
        try:
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info().rss
                key = (process.pid, process.create_time())
        except psutil.Error:
            return None
        now, spent = time.monotonic(), times.user + times.system
        before = self._cpu.get(key)
        self._cpu[key] = (now, spent)
        cpu = None if before is None or now <= before[0] else 100 * (spent - before[1]) / (now - before[0])
        return RankSample(process.pid, _local_rank(process), cpu, int(memory))


def _local_rank(process: psutil.Process) -> int | None:
    try:
        rank = process.environ().get("LOCAL_RANK", "")
    except (psutil.Error, OSError):
        return None
    return int(rank) if rank.isdecimal() else None


def _of_job(cards: list[CardSample], samples: Sequence[JobSample]) -> list[CardSample]:
    """The job's cards; all of them where the driver doesn't tell whose they are, as in a container."""
    on = {name for sample in samples for name in sample.cards}
    if on:
        return [card for card in cards if card.name in on]
    if any(sample.simulated for sample in samples):
        return []
    hidden = [card for card in cards if card.processes is None or any(_stranger(each) for each in card.processes)]
    return cards if hidden else []


def _stranger(process: ProcessOnCard) -> bool:
    """Whether a process is numbered as outside this container, so that it may be the job's."""
    return process.user is None and process.command is None


def _thousandths(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _kib(value: int | None) -> float | None:
    return None if value is None else value * 1024.0
