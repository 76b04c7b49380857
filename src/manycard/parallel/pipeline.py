"""`Pipeline`: a model that is cut into stages, one a card, and trained from one process like any other.

Settings are checked here; what a batch does is in `manycard.pipeline`, what is true of every strategy in
`manycard.strategies`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from manycard.cards import Card, in_words
from manycard.data import GlobalLoader
from manycard.engine.batches.batch import move
from manycard.engine.batches.joining import join_values, plan_join
from manycard.errors import CheckpointError, ModelError, SettingError
from manycard.hangs import PULSE
from manycard.parallel.evaluation import evaluate
from manycard.parallel.pipeline_settings import (
    check_alone,
    check_cards,
    check_model,
    check_stages,
    memory_limits,
    on_or_off,
)
from manycard.parallel.profiling import begin_from_environment
from manycard.parallel.run_state import load_run, save_run
from manycard.parallel.settings import (
    check_clip_norm,
    check_scheduler,
    choose_run_cards,
    optimizers_in,
    overridden,
    watch_for_hangs,
    whole_number,
)
from manycard.pipeline import PipelineSettings, Timeline
from manycard.pipeline.schedule import find_schedule
from manycard.precision import make_precision
from manycard.strategies.pipeline import PipelineStrategy
from manycard.strategies.strategy import LossFn, MetricFn, check_parameters
from manycard.strategies.train_step import TrainStep, TrainStepSettings

__all__ = ["Pipeline"]


class Pipeline:
    """A model in stages over several cards.

    The model runs as it is written. When its ``forward`` calls a module with which a stage begins, it goes on on that
    stage's card; nothing is traced or rewritten.

    Args:
        model: the module. Its parameters are moved to their stages' cards in place.
        cards: as for `Parallel`; one for each stage of each replica.
        stages: ``"auto"`` to measure the model's parts on the first batch and cut it where stages take equally long and
            fit; or the names of the modules with which the second, third, ... stage begin.
        micro_batches: into how many parts each replica's batch is cut; default 4 for each stage. More of them make the
            bubble smaller, (p - 1) / (m + p - 1) of a step, and each one less work for a card.
        schedule: ``"1f1b"``, or ``"gpipe"``, which holds the activations of all micro-batches.
        replicas: copies of the whole model side by side, which share each batch; stages x replicas = cards.
        checkpoint_activations: keep only the inputs of each part and compute the rest again in its backward pass.
        precision: ``default``, ``fp32``, ``tf32``, ``bf16`` or ``fp16``.
        memory: what a stage may take of each card, such as ``"20GiB"`` or one amount a stage; by default what is free.
        hang_timeout: seconds without progress that count as a hang, as for `Parallel`: ``"auto"`` or ``"off"``.
        on_hang: what is done then: ``"end"``, ``"raise"`` or ``"say"``.

    Raises:
        SettingError: a setting has a value that can't work.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> pipeline = Pipeline(model, "cpu:2", stages=["2"], micro_batches=2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = pipeline.train_step(lambda model, x: model(x).square().mean(), optimizer)
        >>> step(torch.ones(4, 3)).shape
        torch.Size([])
        >>> pipeline.close()
    """

    def __init__(
        self,
        model: nn.Module,
        cards: str | int | Sequence[int] = "all",
        *,
        stages: str | Sequence[str] = "auto",
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        replicas: int = 1,
        checkpoint_activations: bool = False,
        precision: str = "default",
        memory: int | str | Sequence[int | str] | None = None,
        hang_timeout: float | str = "auto",
        on_hang: str = "end",
    ) -> None:
        check_alone()
        check_model(model)
        find_schedule(schedule)
        whole_number("replicas", replicas, fix="leave it out for one copy of the model")
        if micro_batches is not None:
            whole_number("micro_batches", micro_batches, fix="leave it out for 4 a stage")
        self.precision = make_precision(str(overridden("MANYCARD_PRECISION", "precision", precision)))
        chosen = check_cards(choose_run_cards(overridden("MANYCARD_CARDS", "cards", cards)), cards, replicas)
        number = len(chosen) // replicas
        self.module = model
        settings = PipelineSettings(
            starts=check_stages(stages, number, replicas),
            micro_batches=micro_batches or 4 * number,
            schedule=schedule,
            replicas=replicas,
            checkpointed=on_or_off("checkpoint_activations", checkpoint_activations),
            limits=memory_limits(memory, number),
        )
        watch_for_hangs(hang_timeout, on_hang)
        self.precision.apply_flags()
        self._strategy = PipelineStrategy(model, chosen, self.precision, settings)
        self._steps: weakref.WeakSet[TrainStep] = weakref.WeakSet()
        begin_from_environment(cards=[card.name for card in chosen], name=self._strategy.name)

    # ---- what it is ----------------------------------------------------------------------------------------

    @property
    def cards(self) -> tuple[Card, ...]:
        """The cards, by replica and then by stage."""
        return self._strategy.cards

    @property
    def device(self) -> torch.device:
        """Where losses and outputs arrive."""
        return self._strategy.device

    @property
    def strategy(self) -> PipelineStrategy:
        """How batches are spread."""
        return self._strategy

    @property
    def stages(self) -> list[str]:
        """The parts of each stage, in words; empty before the first batch has shown them."""
        plan = self._strategy.engine.plan
        return [] if plan is None else [plan.names(stage) for stage in range(plan.stages)]

    def describe(self) -> str:
        """The stages as a text: what each holds, and what it was measured to cost."""
        engine = self._strategy.engine
        if engine.plan is None:
            return "the stages are found with the first batch"
        lines = []
        for stage, names in enumerate(self.stages):
            card = ", ".join(engine.cards_of(replica)[stage].name for replica in range(engine.settings.replicas))
            size = sum(each.nbytes for each in engine.parameters_by_stage()[stage])
            line = f"stage {stage} on {card}: {names}, {in_words(size)} of parameters"
            lines.append(line + _measured(engine.plan, engine.costs, stage))
        return "\n".join(lines)

    # ---- training ------------------------------------------------------------------------------------------

    def train_step(
        self,
        loss_fn: LossFn,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        clip_norm: float | None = None,
        accumulate: int = 1,
        scheduler: Any = None,
        check_loss: bool = True,
    ) -> TrainStep:
        """Make the function that trains on one global batch.

        Args:
            loss_fn: ``loss_fn(model, batch)`` -> the mean over the batch's samples, or ``(sum, count)``; called with
                micro-batches.
            optimizer: one, or several, over the model's parameters; made before or after the pipeline.
            clip_norm: largest 2-norm of all stages' gradients together.
            accumulate: calls for one update.
            scheduler: stepped after every update that was not skipped.
            check_loss: check on the first batch that the loss is a mean over samples.

        Returns:
            ``step(batch)`` -> loss, on `device`; the same as `Parallel.train_step` gives.
        """
        check_clip_norm(clip_norm)
        whole_number("accumulate", accumulate, fix="leave it out for an update in every step")
        optimizers = optimizers_in(optimizer)
        check_scheduler(scheduler)
        for each in optimizers:
            check_parameters(each, self.module)
            self._strategy.setup_optimizer(self.module, each)
        settings = TrainStepSettings(accumulate, clip_norm, check_loss, graphs="off")
        step = TrainStep(self._strategy, loss_fn, self.module, optimizers, scheduler, settings)
        self._steps.add(step)
        return step

    def record(self, step: TrainStep, batch: Any) -> Timeline:
        """Train on one batch as ``step(batch)`` does, and say when each card worked on what.

        The cards are waited for. Call it after a few steps: the first ones are slower than the others.

        Raises:
            SettingError: `step` is no train step of this pipeline.
        """
        if not isinstance(step, TrainStep) or step not in self._steps:
            fix = "write timeline = pipeline.record(step, batch), with step = pipeline.train_step(...)"
            raise SettingError("step", type(step).__name__, "it is no train step of this pipeline", fix=fix)
        self._strategy.recording = True
        try:
            step(batch)
        finally:
            self._strategy.recording = False
        assert self._strategy.timeline is not None, "a batch was recorded"
        return self._strategy.timeline

    def loader(self, dataset: Any, batch_size: int | None = None, **settings: Any) -> GlobalLoader:
        """A loader of global batches, as `Parallel.loader` makes it: it tells train steps where an epoch ends."""
        seed = settings.pop("seed", None)
        return GlobalLoader(
            dataset,
            batch_size,
            seed=torch.initial_seed() % 2**31 if seed is None else seed,
            rank=0,
            world_size=1,
            feed=self._strategy.feed,
            device=self.device,
            gather_objects=self._strategy.peers.gather_objects,
            **settings,
        )

    # ---- outputs and metrics -------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """The model's output for a whole batch, without gradients, on `device`.

        Raises:
            ModelError: the model is in training mode and gradients are enabled.
        """
        if torch.is_grad_enabled() and self.module.training:
            raise ModelError(
                "pipeline(x) gives outputs without gradients, and the model is in training mode",
                fix="train with pipeline.train_step(loss_fn, optimizer); for outputs call pipeline.eval() first,"
                " or with torch.no_grad()",
            )

        def work(module: nn.Module, part: Any) -> Any:
            return module(*part[0], **part[1])

        with self._strategy.lock, PULSE.busy("call"), torch.no_grad():
            engine = self._strategy.engine
            self._strategy.prepare(work, (inputs, named))
            pieces = engine.cut((inputs, named))
            results = [move(each, self.device) for each in self._strategy.evaluate(self.module, work, (inputs, named))]
            sizes = [size for each in pieces.sizes for size in each]

            def join(path: str, parts: list[tuple[int, Tensor]]) -> Tensor:
                tensors, samples = [part for _, part in parts], [sizes[place] for place, _ in parts]
                return plan_join(tensors, samples, 0, path).join(tensors)

            return join_values(results, sizes, 0, join)

    def evaluate(self, metric_fn: MetricFn, loader: Any) -> dict[str, float]:
        """Metrics over a whole set, every sample once: ``{name: sum of sums / sum of counts}``.

        Args:
            metric_fn: ``metric_fn(model, batch)`` -> ``{name: (sum, count)}``, called in evaluation mode.
            loader: a ``DataLoader``, or one of `loader`.
        """
        if isinstance(loader, DataLoader):
            loader = self.loader(loader)
        return evaluate(self._strategy, metric_fn, self.module, loader)

    def train(self, mode: bool = True) -> Pipeline:
        """Put the model in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put the model in evaluation mode."""
        return self.train(False)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The model's own state, with its own names."""
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        """Load a state of the model, from any number of cards."""
        return self.module.load_state_dict(state, strict=strict)

    def save(
        self,
        path: str | Path,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        loader: GlobalLoader | None = None,
        **extra: Any,
    ) -> None:
        """Write a checkpoint of the model and what is named, which `Parallel.load` reads as well.

        Raises:
            CheckpointError: it can't be written, or a group of micro-batches is unfinished.
        """
        pending = max((step.pending for step in self._steps), default=0)
        if pending:
            raise CheckpointError(
                f"a group of batches is not complete ({pending} so far), and a checkpoint can't hold its gradients",
                fix="save after a call for which step.updated is True, or call step.flush() first",
            )
        with PULSE.busy("checkpoint"):
            save_run(self._strategy, path, self.module, optimizers_in(optimizer, none=True), loader, extra)

    def load(
        self,
        path: str | Path,
        *,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        loader: GlobalLoader | None = None,
    ) -> dict[str, Any]:
        """Restore what `save` of this or of `Parallel` wrote, and return its `extra`.

        Raises:
            CheckpointError: the file isn't there, isn't whole, or doesn't hold what is asked for.
        """
        with PULSE.busy("checkpoint"):
            return load_run(self._strategy, path, self.module, optimizers_in(optimizer, none=True), loader)

    def close(self) -> None:
        """End the threads. The model stays on its cards."""
        self._strategy.close()


def _measured(plan: Any, costs: Any, stage: int) -> str:
    if costs is None:
        return ""
    names = {part.name for part in plan.parts if part.stage == stage}
    parts = [part for part in costs.parts if part.name in names]
    seconds, activations = sum(p.seconds for p in parts), sum(p.activation_bytes for p in parts)
    return f", {1000 * seconds:.1f} ms and {in_words(activations)} of activations a micro-batch"
