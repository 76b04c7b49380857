"""The contract of a strategy: how one global batch's work is spread, and nothing else.

Behaviour every strategy keeps:
    * `forward_backward` on the micro-batches of a group leaves, after `update`, exactly the gradient that one
      card would compute on all of the group's samples at once. A mean loss is weighted by samples, a ``(sum,
      count)`` loss by its count.
    * The loss that comes back is the mean over the *global* micro-batch, a fresh tensor on `device`, and
      nothing waited for the card.
    * A failure leaves the strategy usable: gradients of the unfinished group are dropped, the next step starts
      a group of its own.

How a group is weighted. Micro-batch j of a group has n_ij samples on card i. With R the first micro-batch's
global sample count (the *unit*), card i's backward pass adds ``n_ij / R`` times its mean loss's gradient (or
``1 / R`` times its sum loss's). When the group ends, gradients summed over cards are multiplied by ``R /
sum(n)`` (or ``R / sum(count)``). With one full micro-batch and a mean loss that factor is 1 and costs nothing;
an incomplete group gets its true weight by the same rule.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manycard.cards.card import Card
from manycard.data.feed import Feed
from manycard.engine.batches.batch import count_samples
from manycard.engine.driving.random import CardGenerators
from manycard.engine.graphs import Graphs
from manycard.errors import OptimizerError, SettingError
from manycard.precision import Precision
from manycard.strategies.loss_scaling import make_loss_scaling
from manycard.strategies.peers import Peers
from manycard.strategies.splitting import Splitting

__all__ = [
    "Count",
    "LossFn",
    "MetricFn",
    "MicroBatch",
    "StepWatch",
    "Strategy",
    "StrategyOptions",
    "Update",
    "check_parameters",
    "move_state",
]

LossFn = Callable[[Any, Any], Any]
"""``loss_fn(model, batch)`` -> a mean loss (0-dim tensor), or ``(sum, count)``."""
MetricFn = Callable[[Any, Any], dict[str, tuple[Any, Any]]]
"""``metric_fn(model, batch)`` -> ``{name: (sum, count)}``."""
Count = float | Tensor
"""A number of samples or tokens: known on the host, or still on a card."""


@dataclass(frozen=True)
class StrategyOptions:
    """Settings that only some strategies read."""

    sync_batchnorm: bool = False
    """BatchNorm statistics over the whole global batch; costs one small exchange a layer, forward and backward."""
    compile: dict[str, Any] | None = None
    """Arguments of ``torch.compile`` for each card's module; None leaves modules uncompiled."""
    shard_optimizer: bool = False
    """Each card keeps optimizer state for, and updates, a part of the parameters."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are summed in between cards; None for their own dtype."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Arguments handed to DistributedDataParallel, over manycard's own choices."""
    splitting: Splitting = field(default_factory=Splitting)
    """How strategy ``manual`` splits batches."""


@dataclass(frozen=True)
class MicroBatch:
    """What a strategy gives back for one micro-batch."""

    loss: Tensor
    """Mean over the global micro-batch; 0-dim, detached, on the strategy's device."""
    samples: Count
    """Samples in the global micro-batch."""
    count: Count
    """What the gradient is to be divided by: samples for a mean loss, the global count for ``(sum, count)``."""


@dataclass(frozen=True)
class Update:
    """How the gradients of a group become an update."""

    factor: Count
    """What gradients are multiplied by: ``unit / sum(count)``, which doesn't contain the loss scale."""
    clip_norm: float | None
    """The largest 2-norm of all gradients together; None leaves them."""
    reduced: bool
    """Whether the group's last `forward_backward` was told that it ends the group, and so reduced gradients."""
    graphs: Graphs | None = None
    """What `Strategy.make_graphs` gave the train step."""


class StepWatch(Protocol):
    """Looks on as train steps run."""

    def note_losses(self, losses: Sequence[Tensor]) -> None:
        """A micro-batch has run: the loss of each card of this process, 0-dim, that nothing has waited for."""

    def updating(self) -> AbstractContextManager[object]:
        """Optimizer steps inside are part of a train step's update."""

    def updated(self, model: nn.Module) -> None:
        """A train step has updated the parameters."""


class Strategy(ABC):
    """How the work of a global batch is spread over cards.

    Args:
        cards: the chosen cards; the first is the primary.
        precision: how forward passes compute.
        feed: what the loaders say about the newest batch.
        options: settings that only some strategies read.

    Raises:
        StrategyError: the cards can't be used this way.
    """

    name: ClassVar[str]
    ranks: ClassVar[bool] = False
    """Whether this strategy has one process a card."""
    generators: CardGenerators
    """The random states of this process's cards."""

    def __init__(self, cards: Sequence[Card], precision: Precision, feed: Feed, options: StrategyOptions) -> None:
        self.cards = tuple(cards)
        self.precision = precision
        self.feed = feed
        self.options = options
        self.peers = Peers()
        """What this process and the run's others tell one another."""
        self.lock = threading.RLock()
        """Held by a train step: several threads of a script are served in turn."""
        self.open_steps: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        """For each model, the train step whose group of micro-batches is open."""
        self.tells_of_memory = False
        """Whether ranks tell one another, after each part of a batch, that they ran out of memory."""
        self.scaling = make_loss_scaling(precision.scale)
        """What is done to losses and gradients in fp16; nothing in other precisions."""
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """What `Parallel.setup` gave."""
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.watch: StepWatch | None = None
        """What looks on as steps run."""

    @property
    def device(self) -> torch.device:
        """The card on which this process's script sees losses and outputs."""
        return self.cards[0].device

    # ---- set-up --------------------------------------------------------------------------------------------

    @abstractmethod
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Put the user's module on its card or cards and return what the script calls from now on."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module inside `model`; `model` itself where nothing wraps it."""

    def setup_optimizer(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make the user's optimizer fit; it stays the same object, so that schedulers and logs keep working.

        Raises:
            OptimizerError: it holds parameters that no module set up here holds.
        """
        check_parameters(optimizer, self.unwrap(model))
        move_state(optimizer)
        self.scaling.guard(optimizer)

    # ---- the step ------------------------------------------------------------------------------------------

    def count_samples(self, batch: Any) -> int:
        """How many samples a micro-batch holds in this process.

        Raises:
            BatchError: they can't be counted.
        """
        return count_samples(batch)

    @abstractmethod
    def start_group(self, model: nn.Module) -> None:
        """Drop gradients: a new group of micro-batches begins."""

    def make_graphs(self, model: nn.Module, mode: str) -> Graphs | None:
        """What a train step of this model needs to run as CUDA graphs; None where it runs eager.

        Raises:
            SettingError: `mode` is ``"on"``, and there can be none.
        """
        if mode == "on":
            problem = f"strategy {self.name!r} runs without CUDA graphs"
            raise SettingError("graphs", mode, problem, fix='take strategy="dp", on one card too, or graphs="auto"')
        return None

    @abstractmethod
    def forward_backward(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        batch: Any,
        unit: Count | None,
        *,
        ends_group: bool,
        graphs: Graphs | None = None,
    ) -> MicroBatch:
        """Run one micro-batch forward and backward, adding to the gradients of the group.

        Args:
            graphs: what `make_graphs` gave the train step.
            unit: samples of the group's first micro-batch; None when this is the first.
            ends_group: whether an update follows, so that gradients may be reduced during backward.
        """

    @abstractmethod
    def update(self, model: nn.Module, optimizers: Sequence[Optimizer], update: Update) -> bool:
        """Reduce what is not reduced, multiply gradients by the group's factor, unscale, clip, and step.

        Returns:
            Whether the parameters were updated; False when loss scaling found inf or NaN.
        """

    def check_loss(self, model: nn.Module, loss_fn: LossFn, batch: Any) -> None:
        """Check on one batch that the loss is a mean over samples, where that matters.

        Raises:
            LossError: it is not.
        """

    # ---- the explicit loop ---------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, weighted so that `loss` counts as the mean over this process's shard."""
        self.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Backward passes inside leave gradients unreduced where that saves something."""
        return nullcontext()

    # ---- evaluation ----------------------------------------------------------------------------------------

    @abstractmethod
    def evaluate(self, model: nn.Module, metric_fn: MetricFn, batch: Any) -> list[dict[str, tuple[Any, Any]]]:
        """The metrics of this process's part of one global batch: one dict for each card that had samples.

        Called with gradients disabled and the module in evaluation mode.
        """

    def settle(self, model: nn.Module) -> None:
        """Give every process the buffers of rank 0, before evaluation or a checkpoint reads them."""
        self.peers.broadcast(self.unwrap(model).buffers())

    def shares(self, model: nn.Module) -> tuple[float, ...] | None:
        """Each card's part of a batch, where batches of this model are cut by weights."""
        return None

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """What the strategy has found out for a model and a resumed run shall not have to find out again."""
        return {}

    def load_state_dict(self, model: nn.Module, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, as far as it fits."""

    # ---- replicas, and the end -----------------------------------------------------------------------------

    def check_lockstep(self, model: nn.Module) -> None:
        """Compare the replicas' parameters bit by bit.

        Raises:
            LockstepError: two replicas differ; names the parameter and the cards.
        """

    def holdings(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> list[tuple[Card, list[nn.Module], list[Optimizer], list[Tensor]]]:
        """Of each card of this process: the modules and optimizers on it, and further gradients that it holds."""
        card = next((card for card in self.cards if card.device == self.device), self.cards[0])
        return [(card, [self.unwrap(model) for model in models], list(optimizers), [])]

    def marks(self) -> list[tuple[str, Callable[[], bool]]]:
        """What tells whether each card has finished what it was given so far."""
        marks: list[tuple[str, Callable[[], bool]]] = []
        for card in self.cards:
            if not card.simulated:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(card.device))
                marks.append((card.name, event.query))
        return marks

    def close(self) -> None:
        """Let go of threads, process groups and card memory."""


def check_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Check that the optimizer holds parameters of `module` only.

    Raises:
        OptimizerError: it holds others, which would never get the other cards' gradients.
    """
    inside = {id(parameter) for parameter in module.parameters()}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in inside:
                raise OptimizerError(
                    f"parameter {index} of the optimizer's group {group_index}, of shape {tuple(parameter.shape)}, is"
                    " no parameter of the model, so other cards' gradients would never reach it",
                    fix="make it a parameter of a module, and set up one module that contains all of them",
                )


def move_state(optimizer: Optimizer) -> None:
    """Put the optimizer's state where its parameters are now (a state loaded before the model moved, say)."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[key] = value.to(parameter.device)
