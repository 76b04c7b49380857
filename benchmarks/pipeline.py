"""A GPT in stages over the cards of one machine, beside PyTorch's own pipelines and FSDP2, on the same batches.

    python benchmarks/pipeline.py --model 1.5b --cards 2 --ways pipeline_1f1b,fsdp2 --out pipeline-1.5b.json
    python benchmarks/pipeline.py --model 1.5b --cards 2 --ways torch_1f1b --out pipeline-1.5b.json    adds to the file
    python benchmarks/pipeline.py --model tiny --cards cpu:2                                           here and now

Every way runs in a process of its own (one a card for those with ranks), so that a call may run one way only and a
later call adds the next to the same file. All start from the same weights and see the same global batches; AdamW, bf16
autocast (FSDP2: its bf16 policy) on real cards and fp32 on simulated ones. Losses of the first steps are compared.

    single            one card, micro-batches one after another
    pipeline_1f1b     manycard, one process; stages found by measuring
    pipeline_gpipe    the same, all forward passes first
    pipeline_names    1f1b with the blocks shared out by number
    pipeline_replicas two replicas of half as many stages (4 cards or more)
    torch_1f1b        torch.distributed.pipelining, Schedule1F1B, the blocks shared out by number; one rank a card
    torch_gpipe       the same, ScheduleGPipe
    fsdp2             fully_shard on every block; one rank a card, each with its part of the batch at once, or in
                      --fsdp-accumulate parts where that needs too much memory
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
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
from torch import Tensor, nn
from torch.nn import functional as F

import manycard as mc
from manycard.benchmark.workloads.gpt2 import GPT, GPTShape

SHAPES = {
    "tiny": GPTShape(vocabulary=256, context=32, layers=4, heads=4, width=64),
    "124m": GPTShape(),
    "1.5b": GPTShape(layers=48, heads=25, width=1600),
    "3b": GPTShape(layers=48, heads=36, width=2304),
}
WAYS = ("pipeline_1f1b", "pipeline_gpipe", "pipeline_names", "torch_1f1b", "torch_gpipe", "fsdp2")
RANKS = ("torch_1f1b", "torch_gpipe", "fsdp2")
COMPARED = 3
Step = Callable[[Tensor], "Tensor | None"]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def loss_fn(model: Any, batch: Any) -> Tensor:
    """The same for ``(tokens, targets)``."""
    return loss_of(model(batch[0]), batch[1])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of every way."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)


def cards_of(text: str) -> tuple[int, bool]:
    """How many cards ``--cards`` means, and whether they are simulated."""
    return (int(text.removeprefix("cpu:")), True) if text.startswith("cpu:") else (int(text), False)


def precision(simulated: bool) -> contextlib.AbstractContextManager[object]:
    """bf16 autocast on real cards."""
    return contextlib.nullcontext() if simulated else torch.autocast("cuda", torch.bfloat16)


# ---- the ways ----------------------------------------------------------------------------------------------------


def single(model: nn.Module, options: argparse.Namespace, number: int, simulated: bool) -> Step:
    """Plain accumulation on one card."""
    device = torch.device("cpu" if simulated else "cuda:0")
    model.to(device)
    optimizer = adamw(model.parameters())

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for part in batch.to(device).chunk(options.micro_batches):
            with precision(simulated):
                loss = loss_fn(model, (part[:, :-1], part[:, 1:])) * (len(part) / len(batch))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return step


def manycard_pipeline(way: str, model: nn.Module, options: argparse.Namespace, number: int) -> tuple[Step, Any]:
    """`mc.Pipeline`."""
    optimizer = adamw(model.parameters())
    replicas = 2 if way == "pipeline_replicas" else 1
    stages = number // replicas
    layers = len(model.blocks)
    pipeline = mc.Pipeline(
        model,
        options.cards if options.cards.startswith("cpu") else number,
        stages=[f"blocks.{layers * stage // stages}" for stage in range(1, stages)]
        if way.endswith("names")
        else "auto",
        micro_batches=options.micro_batches // replicas,
        schedule="gpipe" if way.endswith("gpipe") else "1f1b",
        replicas=replicas,
        checkpoint_activations=options.checkpoint,
        precision="default" if options.cards.startswith("cpu") else "bf16",
    )
    train = pipeline.train_step(loss_fn, optimizer, check_loss=False)

    def step(batch: Tensor) -> Tensor:
        return train((batch[:, :-1], batch[:, 1:]))

    def record(batch: Tensor) -> dict[str, Any]:
        timelines = [pipeline.record(train, (batch[:, :-1], batch[:, 1:])) for _ in range(3)]
        best = sorted(timelines, key=lambda each: each.bubble)[1]
        return {"timeline": best.as_dict(), "stages": pipeline.describe().splitlines()}

    return step, record


class StageOfGPT(nn.Module):
    """Some blocks of a GPT, with what comes before the first and after the last; for PyTorch's pipelines."""

    def __init__(self, model: Any, stage: int, stages: int, checkpoint: bool) -> None:
        super().__init__()
        layers = len(model.blocks)
        self.blocks = model.blocks[layers * stage // stages : layers * (stage + 1) // stages]
        self.first, self.last, self.checkpoint = stage == 0, stage == stages - 1, checkpoint
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x)) if self.last else x


def torch_pipeline(way: str, model: nn.Module, options: argparse.Namespace, device: torch.device) -> Step:
    """``torch.distributed.pipelining``; the tied weight's gradients are added up by hand, as it leaves to its users."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, stages = dist.get_rank(), dist.get_world_size()
    part = StageOfGPT(model, rank, stages, options.checkpoint).to(device)
    optimizer = adamw(part.parameters())
    stage = PipelineStage(part, rank, stages, device)
    kind = ScheduleGPipe if way == "torch_gpipe" else Schedule1F1B
    schedule = kind(stage, n_microbatches=options.micro_batches, loss_fn=loss_of)
    ends = dist.new_group([0, stages - 1]) if stages > 1 else None
    simulated = device.type == "cpu"

    def step(batch: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        batch = batch.to(device)
        with precision(simulated):
            if rank == 0 and stages > 1:
                schedule.step(batch[:, :-1])
            elif rank == stages - 1:
                inputs = (batch[:, :-1],) if stages == 1 else ()
                schedule.step(*inputs, target=batch[:, 1:], losses=losses)
            else:
                schedule.step()
        if ends is not None and rank in (0, stages - 1):
            dist.all_reduce((part.tokens if rank == 0 else part.head).weight.grad, group=ends)
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step


def fsdp2(model: nn.Module, options: argparse.Namespace, device: torch.device) -> Step:
    """``fully_shard``, as PyTorch's tutorial has it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    simulated = device.type == "cpu"
    policy = {} if simulated else {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    if options.checkpoint:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = _Checkpointed(block)
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    model.to(device)
    optimizer = adamw(model.parameters())

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
        parts = mine.chunk(options.fsdp_accumulate)
        whole = torch.zeros((), device=device)
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = loss_fn(model, (part[:, :-1], part[:, 1:])) * (len(part) / len(mine))
            loss.backward()
            whole += loss.detach()
        optimizer.step()
        dist.all_reduce(whole)
        return whole / dist.get_world_size()

    return step


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


# ---- timing ------------------------------------------------------------------------------------------------------


def run_way(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time one way in this process (in one rank of it, where it has ranks)."""
    number, simulated = cards_of(options.cards)
    ranks = way in RANKS
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu") if simulated else torch.device("cuda", rank)
    if ranks:
        if not simulated:
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if simulated else "nccl")
    torch.manual_seed(0)
    shape = SHAPES[options.model]
    model = GPT(shape)
    size = sum(parameter.numel() for parameter in model.parameters())
    draws = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(shape.vocabulary, (options.batch, options.context + 1), generator=draws)
        for _ in range(options.warm_up + options.steps)
    ]
    record = None
    if way == "single":
        step = single(model, options, number, simulated)
    elif way == "fsdp2":
        step = fsdp2(model, options, device)
    elif ranks:
        step = torch_pipeline(way, model, options, device)
    else:
        step, record = manycard_pipeline(way, model, options, number)
    found = _timed(step, batches, options, number, simulated, ranks)
    if record is not None:
        found |= record(batches[-1])
    found |= {"parameters": size, "ranks": ranks}
    if ranks:
        everyone: list[Any] = [None] * number
        dist.all_gather_object(everyone, found)
        found["peak_mib"] = [each["peak_mib"][0] for each in everyone]
        found["losses"] = next((each["losses"] for each in everyone if each["losses"][0] is not None), None)
        dist.destroy_process_group()
    return found


def _timed(
    step: Step, batches: list[Tensor], options: argparse.Namespace, number: int, simulated: bool, ranks: bool
) -> dict[str, Any]:
    devices = [] if simulated else [torch.cuda.current_device()] if ranks else list(range(number))

    def wait() -> None:
        for each in devices:
            torch.cuda.synchronize(each)
        if ranks:
            dist.barrier()

    began = time.perf_counter()
    losses = [step(batch) for batch in batches[: options.warm_up]]
    wait()
    first = time.perf_counter() - began
    for each in devices:
        torch.cuda.reset_peak_memory_stats(each)
    times = []
    for batch in batches[options.warm_up :]:
        began = time.perf_counter()
        step(batch)
        wait()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times)
    return {
        "tokens_per_s": options.batch * options.context / seconds,
        "step_ms": 1000 * seconds,
        "spread_ms": [1000 * min(times), 1000 * max(times)],
        "first_steps_s": first,
        "peak_mib": [torch.cuda.max_memory_allocated(each) // 2**20 for each in devices] or [None],
        "losses": [None if loss is None else loss.item() for loss in losses[:COMPARED]],
    }


def in_own_process(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one way in fresh processes, and return what it found or its error."""
    number, _ = cards_of(options.cards)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--result", str(result)]
        processes = []
        for rank in range(number if way in RANKS else 1):
            environment = dict(os.environ)
            if way in RANKS:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log = stack.enter_context(Path(folder, f"{rank}.log").open("w+"))
            processes.append((subprocess.Popen(command, stdout=log, stderr=log, env=environment), log))
        end = time.monotonic() + options.patience
        try:
            for process, _ in processes:
                process.wait(max(1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {options.patience} s"}
        finally:
            for process, _ in processes:
                process.kill()
                process.wait()
            texts = []
            for _, log in processes:
                log.seek(0)
                texts.append(log.read())
        if result.exists():
            return dict(json.loads(result.read_text()))
        return {"error": next((text for text in texts if "Error" in text), texts[0])[-3000:]}


def show(way: str, row: dict[str, Any]) -> None:
    """One line, and for our pipelines where the time went."""
    if "error" in row:
        print(f"{way:18s} {row['error']}", flush=True)
        return
    losses = " ".join(f"{loss:.4f}" for loss in row["losses"] or [])
    print(
        f"{way:18s} {row['tokens_per_s']:12,.0f} tokens/s {row['step_ms']:9.1f} ms  peak {row['peak_mib']} MiB"
        f"  losses {losses}  first steps {row['first_steps_s']:.1f} s",
        flush=True,
    )
    if "timeline" in row:
        from rich.console import Console

        from manycard.report.timeline import print_timeline

        print_timeline(row["timeline"], Console(width=110))


def main() -> None:
    """Run the ways one after another, print a line each, and add them to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=sorted(SHAPES))
    parser.add_argument("--cards", default=str(torch.cuda.device_count() or "cpu:2"), help="a count, or cpu:N")
    parser.add_argument("--batch", type=int, help="sequences in a global batch; default 4 for each micro-batch")
    parser.add_argument("--context", type=int, help="tokens in a sequence; default the model's")
    parser.add_argument("--micro-batches", type=int, help="default 8 for each card")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint every block's activations")
    parser.add_argument("--fsdp-accumulate", type=int, default=1, help="parts of a rank's batch in way fsdp2")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--patience", type=int, default=280, help="seconds that one way may take")
    parser.add_argument("--out", type=Path, help="JSON; ways of an earlier call with the same settings stay in it")
    parser.add_argument("--plots", type=Path, help="a folder for a plot of each of our timelines")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    number, simulated = cards_of(options.cards)
    options.context = options.context or SHAPES[options.model].context
    options.micro_batches = options.micro_batches or 8 * number
    options.batch = options.batch or 4 * options.micro_batches
    if options.way:
        found = run_way(options.way, options)
        if os.environ.get("RANK", "0") == "0":
            options.result.write_text(json.dumps(found))
        return
    settings = {
        "model": options.model,
        "cards": number,
        "simulated": simulated,
        "batch": options.batch,
        "context": options.context,
        "micro_batches": options.micro_batches,
        "checkpoint": options.checkpoint,
        "precision": "fp32" if simulated else "bf16",
        "gpu": None if simulated else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "manycard": mc.__version__,
    }
    rows: dict[str, Any] = {}
    if options.out and options.out.exists():
        earlier = json.loads(options.out.read_text())
        rows = earlier.pop("rows") if all(earlier.get(key) == value for key, value in settings.items()) else {}
    for way in options.ways.split(","):
        rows[way] = in_own_process(way, options)
        show(way, rows[way])
        if options.out:
            options.out.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")
        if options.plots and "timeline" in rows[way]:
            from manycard.report.timeline import timeline_plot

            options.plots.mkdir(parents=True, exist_ok=True)
            (options.plots / f"{options.model}-{way}.svg").write_text(timeline_plot(rows[way]["timeline"]))


if __name__ == "__main__":
    main()
