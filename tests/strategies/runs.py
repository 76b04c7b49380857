"""What is run under every strategy, in this process or once on ranks, and what each run gives back.

A run is a function of `Make`, which makes a `Parallel` of the strategy and cards under test, and of a folder that
all ranks share. It returns plain data. The tests compare that with `reference`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import manycard as mc
from manycard.errors import LossError

from . import models
from .cases import CASES, STEPS, Case, mse, regression
from .reference import Outcome, outcome, prepare, with_grad

__all__ = ["RUNS", "Make", "Run", "run_all"]

Make = Callable[..., "mc.Parallel"]
"""``make(**options)`` -> a `Parallel` of the strategy and cards under test."""
Run = Callable[[Make, Path], Any]


@contextmanager
def closing(parallel: mc.Parallel) -> Iterator[mc.Parallel]:
    """Close `parallel` at the end."""
    try:
        yield parallel
    finally:
        parallel.close()


# ---- training -----------------------------------------------------------------------------------------------


def train_by_step(case: Case, dtype: torch.dtype, make: Make, folder: Path) -> Outcome:
    """A case through `train_step`."""
    setting = prepare(case, dtype)
    with closing(make(accumulate=case.accumulate, **case.options)) as parallel:
        model, *optimizers = parallel.setup(setting.model, *setting.optimizers)
        loader = parallel.loader(setting.samples, batch_size=case.batch_size)
        step = parallel.train_step(
            case.loss_fn, model, optimizers, clip_norm=case.clip_norm, scheduler=setting.scheduler
        )
        losses: list[float] = []
        had: set[str] = set()
        while len(losses) < STEPS:
            for batch in loader:
                losses.append(float(step(batch)))
                had |= with_grad(setting.model) if step.updated else set()
        parallel.check_lockstep(model)
        return outcome(setting, losses, had)


def train_by_loop(case: Case, dtype: torch.dtype, make: Make, folder: Path) -> Outcome:
    """A case through the loop that users of other libraries write."""
    setting = prepare(case, dtype)
    with closing(make(**case.options)) as parallel:
        model, *optimizers = parallel.setup(setting.model, *setting.optimizers)
        loader = parallel.loader(setting.samples, batch_size=case.batch_size)
        losses: list[float] = []
        had: set[str] = set()
        while len(losses) < STEPS:
            for index, batch in enumerate(loader):
                ends = (index + 1) % case.accumulate == 0 or index + 1 == len(loader)
                with nullcontext() if ends else parallel.no_sync(model):
                    loss = case.loss_fn(model, batch)
                    parallel.backward(loss / case.accumulate)
                losses.append(float(parallel.gather(loss.detach())))
                if not ends:
                    continue
                if case.clip_norm is not None:
                    parallel.clip_grad_norm_(model.parameters(), case.clip_norm)
                for optimizer in optimizers:
                    optimizer.step()
                if setting.scheduler is not None:
                    setting.scheduler.step()
                had |= with_grad(setting.model)
                for optimizer in optimizers:
                    optimizer.zero_grad()
        parallel.check_lockstep(model)
        return outcome(setting, losses, had)


# ---- resuming -----------------------------------------------------------------------------------------------

HALF = 10
"""Steps before the checkpoint: in the middle of the second epoch."""


def _resumable(make: Make) -> tuple[Any, ...]:
    """A training with dropout, shuffling and a schedule, just set up; starts differ by the global seed."""
    parallel = make(seed=5)
    module = models.Dropped()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer = parallel.setup(module, optimizer)
    loader = parallel.loader(regression(50), batch_size=8, shuffle=True)
    step = parallel.train_step(mse, model, optimizer, clip_norm=1.0, scheduler=scheduler)
    return parallel, module, model, optimizer, scheduler, loader, step


def _some_steps(loader: Any, step: Any, count: int) -> list[float]:
    losses: list[float] = []
    while len(losses) < count:
        for batch in loader:
            losses.append(float(step(batch)))
            if len(losses) == count:
                break
    return losses


def resume(make: Make, folder: Path) -> dict[str, Any]:
    """20 steps straight, and 10 steps, a checkpoint, and 10 more in a `Parallel` of its own."""
    torch.manual_seed(1)
    parallel, module, *_, loader, step = _resumable(make)
    with closing(parallel):
        straight = _some_steps(loader, step, 2 * HALF)
        final = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(1)
    parallel, module, model, optimizer, scheduler, loader, step = _resumable(make)
    path = folder / "half.ckpt"
    with closing(parallel):
        parted = _some_steps(loader, step, HALF)
        parallel.save(path, model=model, optimizer=optimizer, loader=loader, epoch=1, schedule=scheduler.state_dict())
    torch.manual_seed(2)  # whatever the new run draws before it loads must not matter
    parallel, module, model, optimizer, scheduler, loader, step = _resumable(make)
    with closing(parallel):
        _some_steps(loader, step, 3)
        extra = parallel.load(path, model=model, optimizer=optimizer, loader=loader)
        scheduler.load_state_dict(extra["schedule"])
        parted += _some_steps(loader, step, HALF)
        parallel.check_lockstep(model)
        again = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {"straight": straight, "parted": parted, "final": final, "again": again, "epoch": extra["epoch"]}


# ---- evaluation ---------------------------------------------------------------------------------------------


class Marks(nn.Module):
    """Returns what it is given and notes in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.5)
        self.still = nn.Dropout(0.5).eval()

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "evaluation computes no gradients"
        return self.still(self.drop(x)) * self.factor


def _marks_metric(model: Any, batch: Any) -> dict[str, tuple[Any, Any]]:
    (x,) = batch
    seen = model(x)
    return {
        "mean": (seen.sum(), len(x)),
        "square": (seen.square().sum(), torch.tensor(len(x))),
        "samples": (len(x), int((seen == 1).sum())),
    }


def evaluate(samples: int, batch_size: int, shuffle: bool, make: Make, folder: Path) -> dict[str, Any]:
    """Metrics that come out only if every sample 1 .. `samples` is used exactly once."""
    data = TensorDataset(torch.arange(1, samples + 1, dtype=torch.float64))
    with closing(make(seed=3)) as parallel:
        model = parallel.setup(Marks().double())
        model.train()
        model.still.eval()
        loader = parallel.loader(data, batch_size=batch_size, shuffle=shuffle)
        metrics = [parallel.evaluate(_marks_metric, model, loader) for _ in range(2)]
        return {"metrics": metrics, "modes": (model.training, model.drop.training, model.still.training)}


def loaded_samples(samples: int, batch_size: int, drop_last: bool, make: Make, folder: Path) -> list[Any]:
    """The samples this process was handed in two shuffled epochs, with which count for weights."""
    data = TensorDataset(torch.arange(samples))
    with closing(make(seed=3)) as parallel:
        loader = parallel.loader(data, batch_size=batch_size, shuffle=True, drop_last=drop_last)
        return [
            [parallel.gather(batch[0]).tolist() for batch in loader],
            [parallel.gather(batch[0]).tolist() for batch in loader],
            len(loader),
        ]


# ---- the loss that can't be made exact ----------------------------------------------------------------------

_WEIGHTS = torch.tensor([1.0, 20.0, 0.1], dtype=torch.float64)


def _classes(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, models.FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.arange(count) % 3)


def _loss_sum(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _loss_weighted(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=_WEIGHTS)


def _loss_weighted_pair(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(model(batch[0]), batch[1], weight=_WEIGHTS, reduction="sum")
    return total, _WEIGHTS[batch[1]].sum()


def _loss_contrastive(model: Any, batch: Any) -> Tensor:
    scores = model(batch[0])
    return F.cross_entropy(scores @ scores.t(), torch.arange(len(scores)))


def _loss_mean(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _loss_vector(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


LOSSES = {
    "sum": _loss_sum,
    "class_weighted": _loss_weighted,
    "contrastive": _loss_contrastive,
    "mean": _loss_mean,
    "class_weighted_pair": _loss_weighted_pair,
    "vector": _loss_vector,
}


def loss_check(loss: str, make: Make, folder: Path) -> dict[str, Any]:
    """The first step of a loss: which error, whether it trained, and whether a right loss trains afterwards."""
    torch.manual_seed(0)
    module = models.Net().double()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with closing(make()) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        (batch,) = parallel.loader(_classes(10), batch_size=10)
        error = ""
        try:
            parallel.train_step(LOSSES[loss], model, optimizer)(batch)
        except LossError as raised:
            error = str(raised)
        trained = any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        after = float(parallel.train_step(LOSSES["mean"], model, optimizer)(batch))
        parallel.check_lockstep(model)
        return {"error": error, "trained": trained, "after": after}


def check_disturbs_nothing(make: Make, folder: Path) -> list[Any]:
    """Losses, statistics and a counter of a run with dropout and BatchNorm, with the check and without it."""
    results = []
    for check_loss in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        with closing(make(seed=11)) as parallel:
            model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
            step = parallel.train_step(_loss_mean, model, optimizer, check_loss=check_loss)
            loader = parallel.loader(_classes(36), batch_size=12)
            losses = [float(step(batch)) for batch in loader]
            results.append((losses, {name: value.clone() for name, value in module.state_dict().items()}))
    return results


# ---- precision ----------------------------------------------------------------------------------------------


def _line(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, models.FEATURES, generator=generator)
    return list(zip(x, x[:, :3] * 0.5 - 0.2, strict=True))


def converge(precision: str, mode: str, make: Make, folder: Path) -> dict[str, Any]:
    """30 steps of a task that is easily learned."""
    torch.manual_seed(0)
    module = models.Net()
    with closing(make(precision=precision)) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.AdamW(module.parameters(), lr=3e-2))
        loader = parallel.loader(_line(48), batch_size=16)
        step = parallel.train_step(mse, model, optimizer, clip_norm=1.0)
        losses = []
        for _ in range(10):
            for batch in loader:
                if mode == "step":
                    losses.append(float(step(batch)))
                    continue
                loss = mse(model, batch)
                parallel.backward(loss)
                parallel.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(parallel.gather(loss.detach())))
        parallel.check_lockstep(model)
        dtypes = {str(parameter.dtype) for parameter in module.parameters()}
        return {"losses": losses, "dtypes": dtypes}


def clipped_update(precision: str, clip_norm: float, mode: str, make: Make, folder: Path) -> float:
    """The length of one update of plain SGD with rate 1: the norm of the clipped gradient."""
    torch.manual_seed(0)
    module = models.Net()
    before = torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])
    with closing(make(precision=precision)) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
        (batch,) = parallel.loader(_line(12), batch_size=12)
        if mode == "step":
            parallel.train_step(mse, model, optimizer, clip_norm=clip_norm)(batch)
        else:
            parallel.backward(mse(model, batch))
            parallel.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
        after = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        return float((after - before).norm())


def overflow(accumulate: int, make: Make, folder: Path) -> dict[str, Any]:
    """fp16 steps of which the third update meets an inf in the last sample only, so on one card's shard."""
    torch.manual_seed(0)
    module = models.Net()
    samples = _line(12 * 5 * accumulate)
    bad = 12 * 3 * accumulate - 1
    samples[bad] = (samples[bad][0], torch.full((3,), float("inf")))
    with closing(make(precision="fp16", accumulate=accumulate)) as parallel:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer = parallel.setup(module, optimizer)
        step = parallel.train_step(mse, model, optimizer, clip_norm=1.0, scheduler=scheduler)
        updated, changed, rates, scales = [], [], [], []
        for batch in parallel.loader(samples, batch_size=12):
            before = [parameter.detach().clone() for parameter in module.parameters()]
            step(batch)
            updated.append(bool(step.updated))
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)))
            rates.append(optimizer.param_groups[0]["lr"])
            scales.append(parallel.strategy.precision.scale.value)
        parallel.check_lockstep(model)
        finite = all(bool(parameter.isfinite().all()) for parameter in module.parameters())
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        return {
            "updated": updated,
            "changed": changed,
            "rates": rates,
            "scales": scales,
            "finite": finite,
            "optimizer steps": steps,
        }


# ---- draws --------------------------------------------------------------------------------------------------


def draws(make: Make, folder: Path) -> dict[str, Any]:
    """Dropout masks of every card, twice from one seed and once from another."""
    masks = []
    for seed in (1, 1, 2):
        with closing(make(seed=seed)) as parallel:
            model = parallel.setup(nn.Dropout(0.5).train())
            (batch,) = parallel.loader(TensorDataset(torch.ones(12, 64)), batch_size=12)
            masks.append([parallel.gather(model(batch[0])) != 0 for _ in range(2)])
    return {"masks": masks}


def _columns(pairs: list[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(part) for part in zip(*pairs, strict=True))


def own_loader(make: Make, folder: Path) -> list[float]:
    """A DataLoader of the user's, with its own collate function, as the global batch."""
    data = DataLoader(regression(20), batch_size=7, collate_fn=_columns)
    torch.manual_seed(0)
    module = models.Net()
    with closing(make()) as parallel:
        model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        step = parallel.train_step(mse, model, optimizer)
        return [float(step(batch)) for batch in parallel.loader(data)]


def _table() -> dict[str, Run]:
    runs: dict[str, Run] = {}
    for case in CASES:
        for dtype in (torch.float64, torch.float32):
            runs[f"step/{case.name}/{dtype}"] = partial(train_by_step, case, dtype)
            if case.in_explicit_loop:
                runs[f"loop/{case.name}/{dtype}"] = partial(train_by_loop, case, dtype)
    for samples, batch_size in ((24, 8), (25, 8), (7, 3), (3, 8), (2, 1), (1, 4)):
        for shuffle in (False, True):
            runs[f"evaluate/{samples}/{batch_size}/{shuffle}"] = partial(evaluate, samples, batch_size, shuffle)
        for drop_last in (False, True):
            runs[f"loaded/{samples}/{batch_size}/{drop_last}"] = partial(loaded_samples, samples, batch_size, drop_last)
    runs |= {f"loss/{name}": partial(loss_check, name) for name in LOSSES}
    for precision in ("fp32", "bf16", "fp16"):
        for mode in ("step", "loop"):
            runs[f"converge/{precision}/{mode}"] = partial(converge, precision, mode)
            for clip in (0.05, 1e3):
                runs[f"clipped/{precision}/{clip}/{mode}"] = partial(clipped_update, precision, clip, mode)
    runs |= {f"overflow/{accumulate}": partial(overflow, accumulate) for accumulate in (1, 2)}
    runs |= {"resume": resume, "check_disturbs_nothing": check_disturbs_nothing, "draws": draws}
    return runs | {"own_loader": own_loader}


RUNS: dict[str, Run] = _table()


def run_all(names: list[str], make: Make, folder: Path) -> dict[str, Any]:
    """Run each; a failure becomes its traceback, so that the others run."""
    return {name: _attempt(RUNS[name], make, folder) for name in names}


def _attempt(run: Run, make: Make, folder: Path) -> Any:
    try:
        return run(make, folder)
    except Exception:
        return traceback.format_exc()
