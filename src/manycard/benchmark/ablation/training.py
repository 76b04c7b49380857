"""One training of an ablation, run and measured in this process.

Behaviour:
    * ``torch_dp`` is PyTorch alone: `nn.DataParallel`, a loop, an optimizer. Without GPUs, `nn.DataParallel` runs the
      module itself on the CPU, as it does for anybody.
    * ``ddp`` and ``dp`` are those strategies of `Parallel` with a train step.
    * All start from the same weights and get the same global batches (from files: the same files, drawn anew).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from manycard.benchmark.ablation.batches import file_loader, host_batches
from manycard.benchmark.ablation.plan import AblationSpec
from manycard.benchmark.energy import EnergyMeter
from manycard.benchmark.measurement import Measurement, finite, found_by
from manycard.benchmark.meter import StepMeter
from manycard.benchmark.progress_file import ProgressFile
from manycard.benchmark.training import MOST_LOSSES, fused
from manycard.benchmark.workloads import find_workload
from manycard.cards import choose_cards
from manycard.errors import ManycardError
from manycard.parallel import Parallel
from manycard.precision import make_precision
from manycard.strategies.peers import Peers

__all__ = ["measure_recipe"]

Step = Callable[[Any], Tensor]


class _EndsInLoss(nn.Module):
    """A model that ends in its loss, one number a replica."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, batch).unsqueeze(0)


def measure_recipe(spec: AblationSpec, folder: Path, began: float) -> Measurement | None:
    """Train as the spec's recipe says and measure it; None in ranks above 0."""
    if spec.recipe.way == "torch_dp":
        return _measure_plain(spec, folder, began)
    parallel = Parallel(
        spec.recipe.way,
        cards=spec.cards,
        precision=spec.recipe.precision,
        seed=spec.seed,
        compile=spec.recipe.compile,
        ddp_options=spec.recipe.ddp_options if spec.recipe.way == "ddp" else None,
    )
    try:
        found = _measure_parallel(spec, parallel, folder, began)
        return found if parallel.is_primary else None
    finally:
        parallel.close()


def _workload(spec: AblationSpec) -> Any:
    return find_workload(spec.workload)(small=spec.small, channels_last=spec.recipe.channels_last)


def _make(spec: AblationSpec, workload: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(spec.seed)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    return model, fused(optimizer) if spec.recipe.fused else optimizer


def _endless(loader: Any, spec: AblationSpec) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        for images, labels in loader:
            if spec.recipe.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            yield images, labels


def _measure_parallel(spec: AblationSpec, parallel: Parallel, folder: Path, began: float) -> Measurement:
    workload = _workload(spec)
    model, optimizer = parallel.setup(*_make(spec, workload))
    graphs = "on" if spec.recipe.graphs else "off"
    step = parallel.train_step(workload.loss, model, optimizer, check_loss=False, graphs=graphs)
    if spec.files is None:
        batches = host_batches(spec, workload, parallel.rank, parallel.world_size)
    else:
        batches = _endless(file_loader(spec, workload, parallel), spec)
    devices = [parallel.device] if parallel.strategy.ranks else [card.device for card in parallel.cards]
    found = _timed(spec, step, batches, devices, parallel.strategy.peers, folder, began)
    parallel.check_lockstep(model)
    return found


def _measure_plain(spec: AblationSpec, folder: Path, began: float) -> Measurement:
    recipe, workload = spec.recipe, _workload(spec)
    devices = [card.device for card in choose_cards(spec.cards).cards]
    precision = make_precision(recipe.precision)
    precision.apply_flags()
    model, optimizer = _make(spec, workload)
    model.to(devices[0])
    inner = _EndsInLoss(model, workload.loss) if recipe.loss_inside else model
    if spec.simulated:
        spread = nn.DataParallel(inner)
    else:
        indices = [device.index for device in devices]
        spread = nn.DataParallel(inner, indices, output_device=indices[-1 if recipe.output_last else 0])
    target = devices[-1] if recipe.output_last else devices[0]

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch[0].to(devices[0], non_blocking=recipe.pinned), batch[1]
        optimizer.zero_grad()
        with precision.autocast(devices[0]):
            if recipe.loss_inside:
                loss = spread(inputs, labels.to(devices[0], non_blocking=recipe.pinned)).mean()
            else:
                loss = workload.loss(spread, (inputs, labels.to(target, non_blocking=recipe.pinned)))
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    batches = host_batches(spec, workload) if spec.files is None else _endless(file_loader(spec, workload), spec)
    return _timed(spec, step, batches, devices, Peers(), folder, began)


def _timed(
    spec: AblationSpec,
    step: Step,
    batches: Iterator[tuple[Tensor, Tensor]],
    devices: list[torch.device],
    peers: Peers,
    folder: Path,
    began: float,
) -> Measurement:
    """Train until the speed is known."""
    losses: list[Tensor] = []
    first = peers.rank == 0
    cards = choose_cards(spec.cards).cards if first and not spec.simulated else ()
    with ProgressFile(folder / "progress" if first else None) as progress, EnergyMeter(cards) as energy:
        meter = StepMeter(devices, peers, spec.goal, began, joules=energy.joules, on_progress=progress.note)
        for batch in batches:
            loss = step(batch).detach()
            if len(losses) < MOST_LOSSES:
                losses.append(loss)
            if meter.step(len(batch[1])):
                break
        figures = meter.figures()
    if figures is None:
        raise ManycardError("there were no steps to time", fix="give more files")
    values = [finite(value) for value in torch.stack(losses).double().tolist()]
    return spec.measurement(**found_by(figures, simulated=spec.simulated), losses=tuple(values), final_loss=values[-1])
