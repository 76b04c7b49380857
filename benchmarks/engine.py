"""Every way of training on the cards of one machine, beside the others: throughput, memory and losses.

    python benchmarks/engine.py --workload resnet50 --rounds 3 --out benchmarks/results/engine-resnet50.json
    python benchmarks/engine.py --workload mlp --ways ddp,ddp_graph,dp,dp_graph

Every way runs in a process of its own (one a card for those with ranks), in turn, round after round; figures are
medians over rounds. All see the same global batches with the same weights, bf16 autocast, and the same optimizer. The
losses of the first steps are compared, and after each timed run the replicas are compared bit by bit. The batch is
already on the card: on the primary for ways with one process, which copy each card's shard to it in every step.

    single            one card, a plain loop
    single_compiled   the same with torch.compile
    torch_dp          nn.DataParallel as people write it
    drop_in           mc.DataParallel in the same loop
    dp                manycard's train step, graphs="off"
    dp_graph          the same with CUDA graphs
    manual            strategy "manual" with equal weights, graphs="off"
    manual_graph      the same with CUDA graphs
    dp_compile        graphs="off", compile=True
    dp_best           CUDA graphs and compile=True
    ddp               DistributedDataParallel, PyTorch's defaults
    ddp_compiled      torch.compile around it
    ddp_graph         DDP's whole step in one CUDA graph
    accelerate        Hugging Face Accelerate's prepare() and loop
    fabric            Lightning Fabric's setup() and loop
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import manycard as mc
from manycard.benchmark.workloads import Feeding, find_workload

WAYS = (
    "single",
    "single_compiled",
    "torch_dp",
    "drop_in",
    "ddp",
    "dp",
    "manual",
    "ddp_graph",
    "dp_graph",
    "manual_graph",
    "ddp_compiled",
    "dp_compile",
    "dp_best",
    "accelerate",
    "fabric",
)
RANKS = ("ddp", "ddp_compiled", "ddp_graph", "accelerate", "fabric")
"""Ways with one process a card."""
STEPS = {"resnet50": 20, "gpt2": 20, "resnet18-cifar": 60, "mlp": 100}
WARM_UP = {"resnet50": 15, "gpt2": 15, "resnet18-cifar": 70, "mlp": 70}
"""Steps before the timed ones, such that no comparison of graphs with eager steps (replays 8, 64, 512) is timed."""
COMPARED = 5


def run_way(way: str, workload_name: str, cards: int, per_card: int) -> dict[str, Any]:
    """Time one way in this process (in one rank of it, where it has ranks)."""
    ranks = way in RANKS
    rank = int(os.environ["RANK"]) if ranks else 0
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if ranks:
        dist.init_process_group("nccl", device_id=device)
    workload = find_workload(workload_name)(small=False, channels_last=True)
    torch.manual_seed(0)
    model = workload.make_model().to(device)
    optimizer = workload.make_optimizer(model)
    used = 1 if way.startswith("single") else cards
    feeding = Feeding(batch=per_card * used, length=1, seed=0)
    source = mc.Parallel(strategy="single", cards=f"{rank},")
    batch, _ = next(iter(workload.batches(source, feeding)))
    if ranks:
        batch = tuple(part[rank * per_card : (rank + 1) * per_card].clone() for part in batch)
        torch.cuda.empty_cache()
    step, check = make_step(way, workload, model, optimizer, device, used)
    start = time.perf_counter()
    losses = [step(batch) for _ in range(COMPARED)]
    for card in range(cards):
        torch.cuda.synchronize(card)
    to_first = time.perf_counter() - start
    for _ in range(WARM_UP[workload_name]):
        step(batch)
    for card in range(cards):
        torch.cuda.synchronize(card)
        torch.cuda.reset_peak_memory_stats(card)
    begin, steps = time.perf_counter(), STEPS[workload_name]
    for _ in range(steps):
        step(batch)
    host = (time.perf_counter() - begin) / steps
    for card in range(cards):
        torch.cuda.synchronize(card)
    elapsed = (time.perf_counter() - begin) / steps
    check()
    peaks = [torch.cuda.max_memory_allocated(card) / 2**20 for card in range(cards)]
    reserved = [torch.cuda.max_memory_reserved(card) / 2**20 for card in range(cards)]
    found = [float(loss) for loss in losses]
    if ranks:
        mean = torch.tensor([*found, elapsed, peaks[rank], reserved[rank]], device=device, dtype=torch.float64)
        everyone = [torch.empty_like(mean) for _ in range(cards)]
        dist.all_gather(everyone, mean)
        found = torch.stack(everyone)[:, :COMPARED].mean(0).tolist()
        elapsed = max(float(numbers[COMPARED]) for numbers in everyone)
        peaks = [float(numbers[COMPARED + 1]) for numbers in everyone]
        reserved = [float(numbers[COMPARED + 2]) for numbers in everyone]
        dist.destroy_process_group()
    return {
        "step_ms": elapsed * 1e3,
        "host_ms": host * 1e3,
        "first_steps_s": to_first,
        "samples_per_s": per_card * used / elapsed,
        "losses": found,
        "peak_mib": peaks,
        "reserved_mib": reserved,  # graphs keep their memory outside what counts as allocated
    }


Step = Callable[[Any], Any]


def make_step(
    way: str, workload: Any, model: nn.Module, optimizer: Any, device: torch.device, cards: int
) -> tuple[Step, Callable[[], Any]]:
    """The step of one way, and a check that its replicas are equal."""
    ids = list(range(cards))
    if way in ("dp", "dp_graph", "dp_compile", "dp_best", "manual", "manual_graph"):
        compiled = way in ("dp_compile", "dp_best")
        by_hand = {"strategy": "manual", "weights": [1] * cards} if way.startswith("manual") else {}
        parallel = mc.Parallel(**{"strategy": "dp", **by_hand}, cards=ids, precision="bf16", compile=compiled)
        model, optimizer = parallel.setup(model, optimizer)
        graphs = "on" if way in ("dp_graph", "dp_best", "manual_graph") else "off"
        step = parallel.train_step(workload.loss, model, optimizer, graphs=graphs)
        return step, lambda: parallel.check_lockstep(model)
    if way == "accelerate":
        return accelerate_step(workload, model, optimizer), bool
    if way == "fabric":
        return fabric_step(workload, model, optimizer, cards), bool
    if way == "ddp_graph":
        return graphed_ddp_step(workload, model, optimizer, device), bool
    check: Callable[[], Any] = bool
    if way == "torch_dp":
        model = nn.DataParallel(model, device_ids=ids)
    elif way == "drop_in":
        model = mc.DataParallel(model, device_ids=ids)
        if len(ids) > 1:
            check = lambda: (model.engine.replicas.send_parameters(), model.engine.replicas.check_lockstep())  # noqa: E731
    elif way in ("ddp", "ddp_compiled"):
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
    if way.endswith("_compiled"):
        model = torch.compile(model)
    return plain_step(workload, model, optimizer), check


def plain_step(workload: Any, model: nn.Module, optimizer: Any) -> Step:
    """The loop that PyTorch's tutorials show."""

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = workload.loss(model, batch)
        loss.mean().backward()
        optimizer.step()
        return loss.detach().mean()

    return step


def accelerate_step(workload: Any, model: nn.Module, optimizer: Any) -> Step:
    """Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = workload.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def fabric_step(workload: Any, model: nn.Module, optimizer: Any, cards: int) -> Step:
    """Fabric's loop."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=cards, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

    def step(batch: Any) -> Any:
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def graphed_ddp_step(workload: Any, model: nn.Module, optimizer: Any, device: torch.device) -> Step:
    """DDP's forward, backward with its reductions, and the update in one graph, as PyTorch's notes on graphs say."""
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device])
    for group in optimizer.param_groups:
        group["capturable"] = True
    graph, held, calls = torch.cuda.CUDAGraph(), {}, [0]

    def whole(batch: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(batch: Any) -> Any:
        calls[0] += 1
        if calls[0] <= 11:  # DDP settles its buckets in the first steps
            with torch.cuda.stream(side):
                loss = whole(batch)
            torch.cuda.synchronize(device)
            return loss
        if not held:
            held["batch"] = tuple(part.clone() for part in batch)
            with torch.cuda.graph(graph):
                held["loss"] = whole(held["batch"])
        for own, given in zip(held["batch"], batch, strict=True):
            own.copy_(given)
        graph.replay()
        return held["loss"].clone()

    return step


def in_own_process(way: str, options: argparse.Namespace, cards: int) -> dict[str, Any]:
    """Run one way in a fresh process, or in one a card."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        start = [sys.executable]
        if way in RANKS:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cards)]
        command = [*start, __file__, "--workload", options.workload, "--way", way, "--result", str(result)]
        command += ["--cards", str(cards), "--per-card-batch", str(options.per_card_batch)]
        environment = {**os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} if way == "ddp_graph" else None
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            try:
                process.wait(options.patience)
            except subprocess.TimeoutExpired:
                return {"error": f"no result within {options.patience} s"}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks that hang too
        if not result.exists():
            return {"error": log.read_text(errors="replace")[-1500:]}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds, and losses beside `ddp`'s."""
    rows: dict[str, dict[str, Any]] = {}
    base = next((row["losses"] for row in rounds.get("ddp", []) if "losses" in row), None)
    for way, found in rounds.items():
        good = [row for row in found if "error" not in row]
        if not good:
            rows[way] = {"error": found[-1]["error"]}
            continue
        beside = base is not None and not way.startswith("single")
        differences = [abs(a - b) / abs(b) for a, b in zip(good[0]["losses"], base, strict=True)] if beside else []
        rows[way] = {
            "samples_per_s": statistics.median(row["samples_per_s"] for row in good),
            "step_ms": statistics.median(row["step_ms"] for row in good),
            "step_ms_all": [row["step_ms"] for row in good],
            "host_ms": statistics.median(row["host_ms"] for row in good),
            "first_steps_s": statistics.median(row["first_steps_s"] for row in good),
            "peak_mib": good[-1]["peak_mib"],
            "reserved_mib": good[-1]["reserved_mib"],
            "losses": good[0]["losses"],
            "largest_loss_difference_to_ddp": max(differences) if differences else None,
        }
    return rows


def main() -> None:
    """Run all ways in rounds, print a table after each, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="resnet50", choices=sorted(STEPS))
    parser.add_argument("--cards", type=int, default=torch.cuda.device_count())
    parser.add_argument("--per-card-batch", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=int, default=240, help="seconds that one run of one way may take")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    options.per_card_batch = options.per_card_batch or find_workload(options.workload).per_card_batch
    if options.way:
        found = run_way(options.way, options.workload, options.cards, options.per_card_batch)
        if os.environ.get("RANK", "0") == "0":
            options.result.write_text(json.dumps(found))
        return
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways.split(",")}
    for number in range(options.rounds):
        for way, found in rounds.items():
            found.append(in_own_process(way, options, options.cards))
            print(number + 1, way, found[-1].get("step_ms") or found[-1]["error"][-600:], flush=True)
        rows = summary(rounds)
        print(f"{options.workload}, {options.cards} cards, {options.per_card_batch} a card, round {number + 1}")
        for way, row in rows.items():
            shown = row.get("error") or (
                f"{row['samples_per_s']:10.1f} samples/s {row['step_ms']:8.3f} ms  host {row['host_ms']:7.3f} ms"
                f"  peak {[round(peak) for peak in row['peak_mib']]}"
                f"  loss difference {row['largest_loss_difference_to_ddp']}  first {row['first_steps_s']:.1f} s"
            )
            print(f"  {way:15s} {shown}", flush=True)
        if options.out:
            machine = {
                "command": re.sub(r" --out \S+", "", " ".join(["python", *sys.argv])),
                "gpu": torch.cuda.get_device_name(0),
                "cards": options.cards,
                "per_card_batch": options.per_card_batch,
                "precision": "bf16 autocast, channels-last images",
                "torch": torch.__version__,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                "python": platform.python_version(),
                "manycard": mc.__version__,
            }
            options.out.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
