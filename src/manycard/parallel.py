"""`Parallel`: the user's face of manycard. One training loop, any strategy.

It holds a strategy and passes work on; whatever depends on how the work is spread is in
`manycard.strategies`, whatever concerns batches in `manycard.data`, files in `manycard.checkpoint`.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from manycard.cards import Card, choose_cards
from manycard.checkpoint import global_rng_state, load_global_rng_state, read_checkpoint, write_checkpoint
from manycard.data import Feed, GlobalLoader
from manycard.engine.batch import move
from manycard.errors import CheckpointError, ManycardError, SettingError
from manycard.precision import make_precision
from manycard.strategies import Strategy, StrategyOptions, find_strategy, make_strategy
from manycard.strategies.strategy import LossFn, MetricFn, check_parameters
from manycard.strategies.train_step import TrainStep, TrainStepSettings

__all__ = ["Parallel"]


class Parallel:
    """Run training on one card or many; changing `strategy` changes nothing that the training computes.

    Args:
        strategy: ``single``, ``dp`` (all cards from this process), ``torch_dp`` (``nn.DataParallel``, to compare
            with) or ``ddp`` (one process a card; start the script with ``manycard run``).
        cards: ``all``, ``auto`` (free ones), ``auto:N``, a count, a list of torch's indices (``"0,2"`` or
            ``[0, 2]``), or ``cpu:N`` for N simulated cards.
        precision: ``default`` (PyTorch's flags as they are), ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        accumulate: calls of a train step for one update.
        seed: seeds ``random``, NumPy and PyTorch, and orders the data; None leaves the script's seeds.
        sync_batchnorm: BatchNorm statistics over the whole global batch.
        ddp_options: arguments for DistributedDataParallel in strategy ``ddp``.

    Raises:
        SettingError: a setting has a value that can't work.
        NeedsRanks: strategy ``ddp`` in a script that runs alone.

    Example:
        >>> parallel = Parallel(strategy="dp", cards="cpu:2")
        >>> model = nn.Linear(3, 1)
        >>> model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> step = parallel.train_step(lambda model, batch: model(batch).square().mean(), model, optimizer)
        >>> step(torch.ones(4, 3)).shape
        torch.Size([])
        >>> parallel.close()
    """

    def __init__(
        self,
        strategy: str = "dp",
        *,
        cards: str | int | Sequence[int] = "all",
        precision: str = "default",
        accumulate: int = 1,
        seed: int | None = None,
        sync_batchnorm: bool = False,
        ddp_options: Mapping[str, Any] | None = None,
    ) -> None:
        strategy = str(_overridden("MANYCARD_STRATEGY", "strategy", strategy))
        find_strategy(strategy)
        self.precision = make_precision(str(_overridden("MANYCARD_PRECISION", "precision", precision)))
        self.accumulate = _whole("accumulate", accumulate, fix="leave it out for an update in every step")
        options = StrategyOptions(sync_batchnorm=sync_batchnorm, ddp=dict(ddp_options or {}))
        self._feed = Feed()
        chosen = self._choose(_overridden("MANYCARD_CARDS", "cards", cards))
        self.precision.apply_flags()
        self.seed = seed
        if seed is not None:
            _seed_all(seed)
        self.strategy: Strategy = make_strategy(strategy, chosen, self.precision, self._feed, options)
        self._steps: weakref.WeakSet[TrainStep] = weakref.WeakSet()

    def _choose(self, spec: Any) -> tuple[Card, ...]:
        choice = choose_cards(spec)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if choice.cards[0].simulated and len(choice.cards) < local:
            choice = choose_cards(f"cpu:{local}")
        elif os.environ.get("RANK", "0") == "0":
            # A card that a list or a count doesn't name is left out by the user's own word.
            said = choice.describe() if str(spec).startswith(("all", "auto")) else "\n".join(choice.said)
            print(*[said] if said else [], file=sys.stderr, end="\n" if said else "")
        return choice.cards

    # ---- where this process stands -------------------------------------------------------------------------

    @property
    def cards(self) -> tuple[Card, ...]:
        """The cards of the run on this machine, the primary first."""
        return self.strategy.cards

    @property
    def device(self) -> torch.device:
        """Where losses and outputs arrive in this process."""
        return self.strategy.device

    @property
    def rank(self) -> int:
        """Which process this is."""
        return self.strategy.peers.rank

    @property
    def world_size(self) -> int:
        """How many processes the run has; 1 unless the strategy has ranks."""
        return self.strategy.peers.world_size

    @property
    def is_primary(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.strategy.peers.rank == 0

    @property
    def step_skipped(self) -> bool:
        """Whether the newest ``optimizer.step()`` of an explicit loop was skipped because fp16 overflowed."""
        return self.strategy.scaling.skipped

    # ---- set-up --------------------------------------------------------------------------------------------

    def setup(self, model: nn.Module, *optimizers: Optimizer) -> Any:
        """Put a model on the cards and make its optimizers fit.

        Args:
            model: the module; it is moved, not copied, to the primary card.
            optimizers: over its parameters. They stay the objects they are.

        Returns:
            The model to call from now on; with optimizers, a tuple of it and them.

        Raises:
            OptimizerError: an optimizer holds parameters that are not the model's.
        """
        model = self.strategy.setup_module(model)
        for optimizer in optimizers:
            self.strategy.setup_optimizer(model, optimizer)
        return (model, *optimizers) if optimizers else model

    def loader(
        self, dataset: Any, batch_size: int | None = None, *, to_card: bool = True, **settings: Any
    ) -> GlobalLoader:
        """A loader that walks global batches, each sample once an epoch, in the same order for every strategy.

        Args:
            dataset: a dataset, or a ``DataLoader`` whose settings are taken over.
            batch_size: samples in a global batch, over all cards.
            to_card: copy each batch to this process's primary card. False leaves it on the host; a train step of
                ``dp`` then copies each card's shard straight to its card.
            settings: ``shuffle``, ``drop_last``, ``num_workers`` and others of `GlobalLoader`.

        Raises:
            SettingError: a setting has a value that can't work.
        """
        seed = settings.pop("seed", self.seed)
        return GlobalLoader(
            dataset,
            batch_size,
            seed=torch.initial_seed() % 2**31 if seed is None else seed,
            rank=self.rank,
            world_size=self.world_size,
            feed=self._feed,
            move=partial(move, device=self.device) if to_card else None,
            gather_objects=self.strategy.peers.gather_objects,
            **settings,
        )

    def train_step(
        self,
        loss_fn: LossFn,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        clip_norm: float | None = None,
        scheduler: Any = None,
        check_loss: bool = True,
    ) -> TrainStep:
        """Make the function that trains on one global batch.

        Args:
            loss_fn: ``loss_fn(model, batch)`` -> the mean over the batch's samples, or ``(sum, count)``.
            model: what `setup` returned.
            optimizer: one, or several that all step at every update.
            clip_norm: largest 2-norm of all gradients together.
            scheduler: stepped after every update that was not skipped.
            check_loss: check on the first batch that the loss is a mean over samples.

        Returns:
            ``step(batch)`` -> loss; see `TrainStep`.
        """
        if clip_norm is not None and not clip_norm > 0:
            raise SettingError("clip_norm", clip_norm, "it must be above 0", fix="leave it out for no clipping")
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for each in optimizers:
            check_parameters(each, self.strategy.unwrap(model))
        _check_scheduler(scheduler)
        settings = TrainStepSettings(self.accumulate, clip_norm, check_loss)
        step = TrainStep(self.strategy, loss_fn, model, optimizers, scheduler, settings)
        self._steps.add(step)
        return step

    # ---- the explicit loop ---------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()`` for a mean loss over what this process's batch holds, scaled and weighted as needed."""
        self.strategy.backward(loss)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients (unscaled first) to `max_norm` together, and return their norm before."""
        parameters = list(parameters)
        self.strategy.scaling.unscale(parameters)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Backward passes inside need no reduced gradients; for all but the last micro-batch before a step."""
        return self.strategy.no_sync(model)

    def autocast(self) -> AbstractContextManager[object]:
        """The context for forward passes of an explicit loop in this run's precision."""
        return self.strategy.precision.autocast(self.device)

    def gather(self, value: Any) -> Any:
        """Every process's shard of `value`, joined in the global batch's order; 0-dim tensors become means."""
        return self.strategy.peers.gather(value, self._feed)

    def print(self, *values: Any, **settings: Any) -> None:
        """``print`` in one process only."""
        if self.is_primary:
            print(*values, **settings)

    def progress(self, loader: Iterable[Any], epoch: int | None = None) -> Iterator[Any]:
        """Walk `loader` with a progress bar on standard error, in one process and on a terminal only."""
        console = Console(stderr=True)
        total = len(loader) if isinstance(loader, Sized) else None
        label = "training" if epoch is None else f"epoch {epoch}"
        columns = (*Progress.get_default_columns(), TimeElapsedColumn())
        visible = self.is_primary and console.is_terminal
        with Progress(*columns, console=console, disable=not visible, transient=True) as bar:
            yield from bar.track(loader, total=total, description=label)

    # ---- evaluation ----------------------------------------------------------------------------------------

    def evaluate(self, metric_fn: MetricFn, model: nn.Module, loader: Any) -> dict[str, float]:
        """Metrics over a whole set, every sample once, on all cards.

        Args:
            metric_fn: ``metric_fn(model, batch)`` -> ``{name: (sum, count)}``; called with the module in evaluation
                mode and without gradients.
            model: what `setup` returned.
            loader: from `loader`, or a ``DataLoader``.

        Returns:
            ``{name: sum of sums / sum of counts}``, the same on every rank.
        """
        if isinstance(loader, DataLoader):
            loader = self.loader(loader)
        totals: dict[str, list[Any]] = {}
        with self._evaluating(model):
            for batch in loader:
                for found in self.strategy.evaluate(model, metric_fn, batch):
                    _add_metrics(totals, found)
        host = {name: (float(total), float(count)) for name, (total, count) in totals.items()}
        everyone = self.strategy.peers.gather_objects(host)
        names = dict.fromkeys(name for each in everyone for name in each)
        sums = {name: [each.get(name, (0.0, 0.0)) for each in everyone] for name in names}
        return {name: _ratio(sum(t for t, _ in parts), sum(c for _, c in parts)) for name, parts in sums.items()}

    @contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[None]:
        inner = self.strategy.unwrap(model)
        self.strategy.settle(model)
        # A step may still come for the batch that was handed out before.
        newest = self._feed.current
        modes = [(part, part.training) for part in inner.modules()]
        inner.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._feed.current = newest
            for part, training in modes:
                part.training = training

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def save(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        loader: GlobalLoader | None = None,
        **extra: Any,
    ) -> None:
        """Write a checkpoint that training goes on from exactly: state, position in the data, random state.

        Args:
            path: the file; it is whole or not there, and an older one stays until the new one is whole.
            extra: whatever `load` shall give back: numbers, strings, tensors and nestings of them.

        Raises:
            CheckpointError: it can't be written, or a group of micro-batches is unfinished.
        """
        pending = max((step.pending for step in self._steps), default=0)
        if pending:
            raise CheckpointError(
                f"{pending} of {self.accumulate} micro-batches wait for their update, and a checkpoint can't hold them",
                fix="save after a call for which step.updated is True, or call step.flush() first",
            )
        if model is not None:
            self.strategy.settle(model)
        random_states = self.strategy.peers.gather_objects(
            {"host": global_rng_state(), "cards": self.strategy.generators.state_dict()}
        )
        problem = ""
        if self.is_primary:
            scale = self.precision.scale
            state = {
                "model": None if model is None else self.strategy.unwrap(model).state_dict(),
                "optimizers": [each.state_dict() for each in _listed(optimizer)],
                "loader": None if loader is None else loader.state_dict(),
                "random": random_states,
                "scale": None if scale is None else scale.state_dict(),
                "extra": extra,
            }
            try:
                write_checkpoint(Path(path), state)
            except ManycardError as error:
                problem, failure = str(error), error
        # Every rank learns whether the file is there before it goes on.
        problems = self.strategy.peers.gather_objects(problem)
        if problem:
            raise failure
        if problems[0]:
            raise CheckpointError(f"rank 0 could not write it: {problems[0].rstrip('.')}")

    def load(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        loader: GlobalLoader | None = None,
    ) -> dict[str, Any]:
        """Restore what `save` wrote, and return its `extra`.

        Raises:
            CheckpointError: the file isn't there, isn't whole, or doesn't hold what is asked for.
        """
        state = read_checkpoint(Path(path))
        if model is not None:
            _require(state["model"] is not None, path, "model")
            self.strategy.unwrap(model).load_state_dict(state["model"])
        optimizers = _listed(optimizer)
        _require(not optimizers or len(optimizers) == len(state["optimizers"]), path, "optimizer")
        for each, kept in zip(optimizers, state["optimizers"], strict=False):
            each.load_state_dict(kept)
        if loader is not None:
            _require(state["loader"] is not None, path, "loader")
            loader.load_state_dict(state["loader"])
        if self.precision.scale is not None and state["scale"] is not None:
            self.precision.scale.load_state_dict(state["scale"])
        states = state["random"]
        own = states[self.rank % len(states)]
        load_global_rng_state(own["host"])
        self.strategy.generators.load_state_dict(own["cards"])
        extra: dict[str, Any] = state["extra"]
        return extra

    # ---- checks and the end --------------------------------------------------------------------------------

    def check_lockstep(self, model: nn.Module) -> None:
        """Compare all replicas of `model` bit by bit.

        Raises:
            LockstepError: two differ.
        """
        self.strategy.check_lockstep(model)

    def close(self) -> None:
        """Let go of threads and process groups; done at exit too."""
        self.strategy.close()


def _check_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        problem, fix = "it steps on a metric, which a train step doesn't have", "call scheduler.step(metric) yourself"
    elif scheduler is not None and not callable(getattr(scheduler, "step", None)):
        problem, fix = "it has no step()", "give one scheduler; torch's ChainedScheduler joins several"
    else:
        return
    raise SettingError("scheduler", scheduler, problem, fix=fix)


def _overridden(variable: str, setting: str, value: Any) -> Any:
    """The setting's value, or the one that ``manycard run`` was given on the command line."""
    given = os.environ.get(variable)
    if given is None:
        return value
    if str(value) != given and os.environ.get("RANK", "0") == "0" and variable != "MANYCARD_CARDS":
        print(f"manycard: {setting}={given!r} from the command line replaces {value!r} in the script", file=sys.stderr)
    return given


def _whole(setting: str, value: int, fix: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingError(setting, value, "it must be a whole number of at least 1", fix=fix)
    return value


def _seed_all(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise SettingError("seed", seed, "it must be a whole number from 0 to 2**32 - 1", fix="give seed=0, say")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _listed(optimizer: Optimizer | Sequence[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _require(there: bool, path: str | Path, what: str) -> None:
    if not there:
        raise CheckpointError(f"{path} holds no such {what}", fix=f"give save() and load() the same {what}")


def _add_metrics(totals: dict[str, list[Any]], found: dict[str, tuple[Any, Any]]) -> None:
    """Add one shard's sums and counts, on whichever device they are, without waiting for it."""
    for name, (total, count) in found.items():
        numbers = [value.detach().double() if isinstance(value, Tensor) else float(value) for value in (total, count)]
        if name not in totals:
            totals[name] = numbers
            continue
        for index, number in enumerate(numbers):
            held = totals[name][index]
            if isinstance(held, Tensor) and isinstance(number, Tensor):
                number = number.to(held.device, non_blocking=True)
            totals[name][index] = held + number


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")
