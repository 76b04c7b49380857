"""Images from files: PyTorch's usual loading beside manycard's backends, and ResNet-50 trained from files.

    python benchmarks/data.py --out benchmarks/results/data.json

Needs no data set: photographs of 500 x 375 are written first (`manycard bench data --make`), or give --folder. Every
way gives the same: a random resized crop of 224, mirrored half the time, normalised, fp32, batches of 256 a card, 64 on
the CPU (or --batch).

Ways to load, interleaved over rounds, each in a process of its own; a figure is the median of its rounds.
`cpu_ms_an_image` is the time of cores that it took, which other work on the machine changes less:
    dataloader        torchvision's ImageFolder with Pillow and torchvision.transforms, as in PyTorch's own ImageNet
                      example, in a DataLoader with as many workers as cores
    dataloader_v2     the same with decode_jpeg and transforms.v2 on bytes
    torchvision, threads, dali, dali-mixed, card, auto    manycard's backends, in `Parallel.loader`
Those that need what is not here (DALI, a card) are left out, and the result says so.

With a card, ResNet-50 (bf16, channels-last) is trained on batches that stay on the cards, and from files, by each way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

import manycard as mc
from manycard.benchmark.data import make_photographs
from manycard.data.image_files.backends import BACKENDS, default_workers
from manycard.data.image_files.recipe import IMAGENET_MEAN, IMAGENET_STD

BASELINES = ("dataloader", "dataloader_v2")
WAYS = (*BASELINES, *BACKENDS, "auto")
SIZE = 224


def _read(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_image

    return decode_image(path, mode=ImageReadMode.RGB)


def usual_loader(way: str, options: argparse.Namespace) -> DataLoader[Any]:
    """What people write with torchvision."""
    from torchvision import datasets, transforms
    from torchvision.transforms import v2

    if way == "dataloader":
        steps = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIZE),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )
        dataset = datasets.ImageFolder(options.folder, steps)
    else:
        steps = v2.Compose(
            [
                v2.RandomResizedCrop(SIZE, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )
        dataset = datasets.ImageFolder(options.folder, steps, loader=_read)
    return DataLoader(
        dataset,
        options.batch,
        # Epochs without end: where workers run dry at the end of a short one is not what is measured.
        sampler=RandomSampler(dataset, replacement=True, num_samples=500_000),
        num_workers=options.workers,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
    )


def batches_of(way: str, options: argparse.Namespace, parallel: mc.Parallel) -> tuple[Any, Callable[[], str]]:
    """Something to walk an epoch of, again and again, and the name of the backend that it uses."""
    if way in BASELINES:
        return parallel.loader(usual_loader(way, options)) if options.train else usual_loader(way, options), lambda: way
    cards = [card for card in parallel.cards if not card.simulated]
    dataset = mc.data.image_folder(
        options.folder, SIZE, augment=True, backend=way, workers=options.workers, cards=cards or None
    )
    loader = parallel.loader(dataset, batch_size=options.batch, shuffle=True, to_card=bool(cards))
    return loader, lambda: dataset.backend_for([]).name


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def synchronize() -> None:
    for card in range(torch.cuda.device_count()):
        torch.cuda.synchronize(card)


def processor_seconds() -> float:
    """What this process and those it started have used of the cores."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in [own, *own.children(recursive=True)])


def run_loading(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Images/s of loading alone, batches taken as fast as they come."""
    cards = options.cards if torch.cuda.is_available() else "cpu:1"
    parallel = mc.Parallel("dp", cards=cards, seed=0)
    loader, name = batches_of(way, options, parallel)
    walk = endless(loader)
    warm = time.perf_counter()
    for _ in range(4):
        next(walk)
    synchronize()
    warm = time.perf_counter() - warm
    begin, used, images = time.perf_counter(), processor_seconds(), 0
    while time.perf_counter() - begin < options.seconds:
        batch = next(walk)
        images += len(batch[1])
        batch[0].to(parallel.device)
        if torch.cuda.is_available():
            # Not the whole card: what is decoded ahead goes on.
            torch.cuda.current_stream().synchronize()
    speed, used = images / (time.perf_counter() - begin), processor_seconds() - used
    return {"images_per_s": speed, "cpu_ms": 1e3 * used / images, "backend": name(), "warm_up_s": warm}


def run_training(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Images/s of training ResNet-50; way ``synthetic`` keeps its batches on the card."""
    from torchvision.models import resnet50

    parallel = mc.Parallel("dp", cards=options.cards, precision="bf16", seed=0)
    model = resnet50(weights=None).to(memory_format=torch.channels_last)
    model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def loss_fn(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0].contiguous(memory_format=torch.channels_last)), batch[1])

    step = parallel.train_step(loss_fn, model, optimizer)
    if way == "synthetic":
        device = parallel.device
        batch = [
            torch.randn(options.batch, 3, SIZE, SIZE, device=device),
            torch.zeros(options.batch, device=device).long(),
        ]
        walk: Iterator[Any] = endless([batch])
    else:
        walk = endless(batches_of(way, options, parallel)[0])
    warm = time.perf_counter()
    done = 0
    # CUDA graphs are recorded and compared with steps without them in the first ones.
    while done < 30 or time.perf_counter() - warm < 2:
        step(next(walk))
        done += 1
    synchronize()
    begin, images = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds:
        batch = next(walk)
        step(batch)
        images += len(batch[1])
    synchronize()
    return {"images_per_s": images / (time.perf_counter() - begin)}


def in_own_process(way: str, options: argparse.Namespace, *, train: bool) -> dict[str, Any]:
    """One round of one way."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--way", way, "--result", str(result), "--folder", str(options.folder)]
        command += ["--batch", str(options.batch), "--workers", str(options.workers), "--cards", options.cards]
        command += ["--seconds", str(options.seconds), *(["--train"] if train else [])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            return {"error": "it took longer than 240 s"}
        if not result.exists():
            return {"error": done.stderr[-1500:]}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def in_rounds(
    ways: list[str], options: argparse.Namespace, save: Callable[[dict[str, Any]], None], *, train: bool
) -> None:
    """Every way once, then every way again; `save` is given the rows after each round."""
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way, found in rounds.items():
            found.append(in_own_process(way, options, train=train))
            shown = found[-1].get("error") or f"{found[-1]['images_per_s']:10.1f} images/s"
            print(f"round {number + 1} {'training' if train else 'loading'} {way:14s} {shown}", flush=True)
        save(summary(rounds, "synthetic" if train else "dataloader"))


def summary(rounds: dict[str, list[dict[str, Any]]], base: str) -> dict[str, dict[str, Any]]:
    """Medians over rounds; and ratios to the way `base` in the same round, which a slow minute leaves alone."""
    rows: dict[str, dict[str, Any]] = {}
    for way, found in rounds.items():
        speeds = [row["images_per_s"] for row in found if "error" not in row]
        if not speeds:
            rows[way] = {"error": found[-1]["error"]}
            continue
        rows[way] = {"images_per_s": round(statistics.median(speeds), 1), "all_rounds": [round(s, 1) for s in speeds]}
        costs = [row["cpu_ms"] for row in found if "cpu_ms" in row]
        rows[way] |= {"cpu_ms_an_image": round(statistics.median(costs), 3)} if costs else {}
        chosen = [row["backend"] for row in found if row.get("backend", way) != way]
        rows[way] |= {"chosen": chosen} if chosen else {}
    beside = rows.get(base, {}).get("all_rounds", [])
    for row in rows.values():
        if beside and len(row.get("all_rounds", [])) == len(beside):
            ratios = [speed / other for speed, other in zip(row["all_rounds"], beside, strict=True)]
            row[f"over_{base}"] = round(statistics.median(ratios), 3)
            row[f"over_{base}_all_rounds"] = [round(ratio, 3) for ratio in ratios]
    return rows


def possible(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """The ways that can work here, and what the others lack."""
    lacking = {name: lack for name in names if name in BACKENDS and (lack := BACKENDS[name].missing()) is not None}
    return [name for name in names if name not in lacking], lacking


def versions() -> dict[str, str | None]:
    """The versions of what decodes; None for what is not installed."""
    return {name: version_of(name) for name in ("torchvision", "pillow", "nvidia-dali-cuda130", "numpy")}


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="one sub-folder a class; without it photographs are written")
    parser.add_argument("--images", type=int, help="how many to write")
    parser.add_argument("--kilobytes", type=float, default=110)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--batch", type=int, help="the global batch")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--cards", default="all")
    parser.add_argument("--seconds", type=float, default=5.0, help="timed seconds of each way in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-loading", action="store_true")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cards = torch.cuda.device_count()
    options.batch = options.batch or (256 * cards if cards else 64)
    options.images = options.images or max(1024, 2 * options.batch)
    return options


def main() -> None:
    """Run all ways in rounds and write JSON."""
    options = parse()
    if options.way:
        found = (run_training if options.train else run_loading)(options.way, options)
        options.result.write_text(json.dumps(found))
        # Loaders' workers are not waited for.
        sys.stdout.flush()
        os._exit(0)
    ways, lacking = possible(options.ways.split(","))
    document = {
        "command": " ".join(["python benchmarks/data.py", *sys.argv[1:]]),
        "cpu": processor(),
        "cores": default_workers(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "cards": torch.cuda.device_count(),
        "batch": options.batch,
        "workers": options.workers,
        "seconds": options.seconds,
        "torch": torch.__version__,
        **versions(),
        "python": platform.python_version(),
        "manycard": mc.__version__,
        "left_out": lacking,
    }

    def save(part: str, rows: dict[str, Any]) -> None:
        document[part] = rows
        if options.out:
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        document["images"] = str(options.folder)
        if options.folder is None:
            options.folder = Path(folder)
            made = make_photographs(options.folder, options.images, options.kilobytes)
            document["images"] = {**made, "folder": "written by manycard bench data --make"}
            print(f"{made['images']} photographs of {made['mean_kilobytes']} KB", flush=True)
        if not options.no_loading:
            in_rounds(ways, options, partial(save, "loading"), train=False)
        if torch.cuda.is_available() and not options.no_training:
            in_rounds(["synthetic", *ways], options, partial(save, "training"), train=True)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
