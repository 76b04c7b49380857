"""`Parallel`: the user's face of manycard. One training loop, any strategy.

It holds a strategy and passes work on; whatever depends on how the work is spread is in
`manycard.strategies`, whatever concerns batches in `manycard.data`. Settings, evaluation and what a checkpoint holds
have files beside this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from manycard.cards import Card
from manycard.data import Feed, GlobalLoader
from manycard.engine.batches.cutting import Split
from manycard.engine.split_calls import Merge
from manycard.errors import CheckpointError
from manycard.hangs import PULSE
from manycard.parallel.auto import PlannedStep, first_strategy
from manycard.parallel.evaluation import evaluate
from manycard.parallel.looking_on import LookingOn
from manycard.parallel.memory import MemoryWatch
from manycard.parallel.profiling import begin_from_environment
from manycard.parallel.progress import walked_with_bar
from manycard.parallel.run_state import load_run, save_run
from manycard.parallel.settings import (
    batch_settings,
    check_clip_norm,
    check_graphs,
    check_scheduler,
    choose_run_cards,
    compile_settings,
    lockstep_watch,
    optimizers_in,
    overridden,
    reduce_dtype_for,
    seed_all,
    sharding_for,
    splitting_for,
    use_nccl_settings,
    watch_for_hangs,
)
from manycard.precision import make_precision
from manycard.strategies import Splitting, Strategy, StrategyOptions, find_strategy, make_strategy
from manycard.strategies.strategy import LossFn, MetricFn, check_parameters
from manycard.strategies.train_step import TrainStep, TrainStepSettings

__all__ = ["Parallel"]


class Parallel(LookingOn):
    """Run training on one card or many; changing `strategy` changes nothing that the training computes.

    Args:
        strategy: ``single``, ``dp`` (all cards from this process), ``manual`` (as ``dp``, with shares that you
            decide), ``torch_dp`` (``nn.DataParallel``, to compare with), ``ddp`` (one process a card; start the
            script with ``manycard run``), or ``auto``: the first train step measures briefly and says what it took.
        cards: ``all``, ``auto`` (free ones), ``auto:N``, a count, a list of torch's indices (``"0,2"`` or
            ``[0, 2]``), or ``cpu:N`` for N simulated cards.
        precision: ``default`` (PyTorch's flags as they are), ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        accumulate: calls of a train step for one update; ``"auto"`` for one call that computes its batch in as many
            parts as memory asks for, which is ``per_card_batch="auto"``.
        per_card_batch: the most samples that a card computes at once: a batch is cut into parts, whose gradients add
            up to the whole one's. ``"auto"`` finds the largest number that fits, and halves it when a later batch
            runs out of memory.
        seed: seeds ``random``, NumPy and PyTorch, and orders the data; None leaves the script's seeds.
        sync_batchnorm: BatchNorm statistics over the whole global batch.
        shard_optimizer: each card keeps optimizer state for a part of the parameters, updates it in a train step, and
            sends it to the others: the same numbers with 1/N of the state on each card. In ``dp`` and ``manual``.
        reduce_dtype: ``bf16`` sums a train step's gradients over cards in bfloat16: half the bytes, with its rounding.
        compile: compile each card's module with ``torch.compile``: True, or a dict of its arguments.
        ddp_options: arguments for DistributedDataParallel in strategy ``ddp``.
        weights: in strategy ``manual``, each card's share of a batch, such as ``[2, 1]``; ``"auto"``, which is what
            it does by itself, finds shares by timing the cards.
        split: in strategy ``manual``, ``split(batch, cards)`` -> one shard a card, None for one that gets nothing.
        merge: with `split`, ``merge(outputs)`` -> output, for calls of the model outside a train step; without it
            those are cut evenly, as in ``dp``.
        check_split: check that `split` uses each sample once.
        nccl: ``saved`` applies the NCCL settings that ``manycard doctor --deep`` saved for this machine, if any;
            ``default`` leaves NCCL to itself.
        check_every: compare parameters and gradients of all cards and ranks after the first update and after every
            so many; a difference raises `LockstepError`. None compares when `check_lockstep` is called.
        hang_timeout: seconds without progress that count as a hang; ``"auto"`` takes 20 of the newest steps and at
            least 300 s, ``"off"`` never does.
        on_hang: what is done after printing who waits where: ``"end"`` the process, ``"raise"`` `HangError`, or only
            ``"say"`` it. Ranks of ``manycard run`` are always ended.

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
        accumulate: int | str = 1,
        per_card_batch: int | str | None = None,
        seed: int | None = None,
        sync_batchnorm: bool = False,
        shard_optimizer: bool = False,
        reduce_dtype: str | None = None,
        compile: bool | Mapping[str, Any] = False,
        ddp_options: Mapping[str, Any] | None = None,
        weights: str | Sequence[float] | None = None,
        split: Split | None = None,
        merge: Merge | None = None,
        check_split: bool = True,
        nccl: str = "saved",
        check_every: int | None = None,
        hang_timeout: float | str = "auto",
        on_hang: str = "end",
    ) -> None:
        splitting = Splitting(weights, split, merge, check_split)
        asked, strategy = strategy, str(overridden("MANYCARD_STRATEGY", "strategy", strategy))
        strategy, self._planned = first_strategy(strategy)
        find_strategy(strategy)
        splitting = splitting_for(strategy, asked, splitting)
        self.precision = make_precision(str(overridden("MANYCARD_PRECISION", "precision", precision)))
        self.accumulate, self._per_card_batch = batch_settings(
            strategy, asked, accumulate, per_card_batch, sync_batchnorm=sync_batchnorm
        )
        options = StrategyOptions(
            sync_batchnorm=sync_batchnorm,
            compile=compile_settings(compile),
            shard_optimizer=sharding_for(strategy, asked, shard_optimizer),
            reduce_dtype=reduce_dtype_for(strategy, asked, reduce_dtype),
            ddp=dict(ddp_options or {}),
            splitting=splitting,
        )
        watch_for_hangs(hang_timeout, on_hang)
        self._feed = Feed()
        chosen = choose_run_cards(overridden("MANYCARD_CARDS", "cards", cards))
        use_nccl_settings(overridden("MANYCARD_NCCL", "nccl", nccl), chosen)
        self.precision.apply_flags()
        self.seed = seed
        if seed is not None:
            seed_all(seed)
        self.strategy: Strategy = make_strategy(strategy, chosen, self.precision, self._feed, options)
        self._steps: weakref.WeakSet[TrainStep] = weakref.WeakSet()
        self._memory_watches: list[MemoryWatch] = []
        self._lockstep = lockstep_watch(check_every)
        self.strategy.watch = self._lockstep
        begin_from_environment(self.strategy)

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
        self.strategy.models.add(model)
        self.strategy.optimizers.update(optimizers)
        if self._lockstep is not None:
            self._lockstep.follow(model, optimizers)
        return (model, *optimizers) if optimizers else model

    def loader(
        self, dataset: Any, batch_size: int | None = None, *, to_card: bool = True, **settings: Any
    ) -> GlobalLoader:
        """A loader that walks global batches, each sample once an epoch, in the same order for every strategy.

        Args:
            dataset: a dataset, or a ``DataLoader`` whose settings are taken over.
            batch_size: samples in a global batch, over all cards.
            to_card: copy each batch to this process's primary card, beside the computing of earlier steps. False
                leaves it on the host; a train step of ``dp`` then copies each card's shard straight to its card.
            settings: ``shuffle``, ``drop_last``, ``num_workers`` (or ``workers``; ``"auto"`` measures how many are
                needed) and others of `GlobalLoader`.

        Raises:
            SettingError: a setting has a value that can't work.
        """
        seed = settings.pop("seed", self.seed)
        if "num_workers" not in settings:
            settings["num_workers"] = settings.pop("workers", 0)
        if self.device.type == "cuda" and not to_card and settings["num_workers"] != 0:
            settings.setdefault("pin_memory", True)  # the step copies from it
        return GlobalLoader(
            dataset,
            batch_size,
            seed=torch.initial_seed() % 2**31 if seed is None else seed,
            rank=self.rank,
            world_size=self.world_size,
            feed=self._feed,
            device=self.device if to_card else None,
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
        graphs: str = "auto",
    ) -> TrainStep:
        """Make the function that trains on one global batch.

        Args:
            loss_fn: ``loss_fn(model, batch)`` -> the mean over the batch's samples, or ``(sum, count)``.
            model: what `setup` returned.
            optimizer: one, or several that all step at every update.
            clip_norm: largest 2-norm of all gradients together.
            scheduler: stepped after every update that was not skipped.
            check_loss: check on the first batch that the loss is a mean over samples.
            graphs: ``"auto"`` replays forward, backward and update as CUDA graphs where they can be made, and says
                once why where they can't; ``"on"`` raises `GraphError` there; ``"off"`` runs eager.

        Returns:
            ``step(batch)`` -> loss; see `TrainStep`.
        """
        check_clip_norm(clip_norm)
        optimizers = optimizers_in(optimizer)
        for each in optimizers:
            check_parameters(each, self.strategy.unwrap(model))
        check_scheduler(scheduler)
        settings = TrainStepSettings(
            self.accumulate, clip_norm, check_loss, per_card_batch=self._per_card_batch, graphs=check_graphs(graphs)
        )
        kind = PlannedStep if self._planned else TrainStep
        step = kind(self.strategy, loss_fn, model, optimizers, scheduler, settings)
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
        return walked_with_bar(loader, "training" if epoch is None else f"epoch {epoch}", shown=self.is_primary)

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
        return evaluate(self.strategy, metric_fn, model, loader)

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
        with PULSE.busy("checkpoint"):
            save_run(self.strategy, path, model, optimizers_in(optimizer, none=True), loader, extra)

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
        with PULSE.busy("checkpoint"):
            return load_run(self.strategy, path, model, optimizers_in(optimizer, none=True), loader)

    # ---- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of threads and process groups; done at exit too."""
        for watch in self._memory_watches:
            watch.stop()
        self.strategy.close()
