"""A pipeline as rows and workloads use it: with the methods that they call of `Parallel`.

``pipeline`` is no strategy that `Parallel` knows, since a `Pipeline` is made for one model. In a benchmark it is one
row among the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manycard.benchmark.axes import setting
from manycard.benchmark.row import RowSpec
from manycard.cards import Card, choose_cards
from manycard.parallel import Pipeline
from manycard.parallel.settings import seed_all
from manycard.strategies.strategy import LossFn, MetricFn, Strategy
from manycard.strategies.train_step import TrainStep

__all__ = ["PIPELINE", "PipelineRun"]

PIPELINE = "pipeline"
"""What ``--strategies`` calls it."""


class PipelineRun:
    """One row's pipeline, made when the model is set up.

    Args:
        spec: the row.
    """

    rank, world_size, is_primary = 0, 1, True

    def __init__(self, spec: RowSpec) -> None:
        self._spec = spec
        self.cards: tuple[Card, ...] = choose_cards(spec.cards).cards
        self.device: torch.device = self.cards[0].device
        self._pipeline: Pipeline | None = None
        seed_all(spec.seed)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline, once there is one."""
        assert self._pipeline is not None, "setup comes first"
        return self._pipeline

    @property
    def strategy(self) -> Strategy:
        """What the row asks about processes."""
        return self.pipeline.strategy

    def setup(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Make the pipeline of `model`."""
        settings = self._spec.settings
        self._pipeline = Pipeline(
            model,
            self._spec.cards,
            replicas=setting(settings, "replicas", 1),
            micro_batches=setting(settings, "micro_batches"),
            schedule=setting(settings, "schedule", "1f1b"),
            checkpoint_activations=setting(settings, "checkpoint_activations", False),
            precision=str(setting(settings, "precision", self._spec.precision)),
        )
        return model, optimizer

    def train_step(
        self, loss_fn: LossFn, model: nn.Module, optimizer: Optimizer, *, check_loss: bool, graphs: str
    ) -> TrainStep:
        """See `Pipeline.train_step`; it has no CUDA graphs."""
        accumulate = setting(self._spec.settings, "accumulate", 1)
        return self.pipeline.train_step(loss_fn, optimizer, check_loss=check_loss, accumulate=accumulate)

    def loader(self, dataset: Any, **settings: Any) -> Any:
        """See `Pipeline.loader`."""
        return self.pipeline.loader(dataset, seed=self._spec.seed, **settings)

    def evaluate(self, metric_fn: MetricFn, model: nn.Module, loader: Any) -> dict[str, float]:
        """See `Pipeline.evaluate`."""
        return self.pipeline.evaluate(metric_fn, loader)

    def check_lockstep(self, model: nn.Module) -> None:
        """Compare the copies of the model, where it has replicas.

        Raises:
            LockstepError: two differ.
        """
        self.strategy.check_lockstep(model)

    def timeline(self, step: TrainStep, batch: Any) -> dict[str, Any]:
        """Where the time of one further step goes."""
        return self.pipeline.record(step, batch).as_dict()

    def close(self) -> None:
        """End the threads."""
        if self._pipeline is not None:
            self._pipeline.close()
