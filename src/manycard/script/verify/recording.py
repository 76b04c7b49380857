"""What one run of a script did, step by step: written by the run's process, read by the one that compares.

Behaviour:
    * A step is one call of ``optimizer.step()`` with what led to it: calls of modules, backward passes. In a script
      without an optimizer of PyTorch's, each backward pass is a step.
    * Gradients and parameters are kept whole, as flat vectors, while they fit the budget; beyond it as sketches
      (`sketch`), whose 2-norms and differences estimate those of the vectors.
    * A folder holds one process's recording: ``recording.json``, and ``tensors.pt``, which is mapped and not read.
    * A run in ranks leaves one recording a rank; `together` makes one of them, where each has seen its own samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manycard.script.verify.samples import Rows, join_rows

__all__ = ["NO_OPTIMIZER", "Call", "OptimizerRecord", "Recording", "StepRecord", "keeps_whole", "sketch", "together"]

NO_OPTIMIZER = "no optimizer"
"""The kind of a script's that has none of PyTorch's."""
_BUCKETS = 4096
_CHUNK = _BUCKETS * 1024


@dataclass(frozen=True)
class Call:
    """One outermost call of a module, or one call of a train step."""

    module: str
    """The module's class."""
    rows: Rows
    """What tells its samples apart, in their order."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    optimizer: int
    """Which of the recording's optimizers."""
    losses: tuple[float, ...]
    """The root of each backward pass since the step before."""
    rates: tuple[float, ...]
    """Learning rates of the parameter groups."""
    gradients: tuple[Tensor | None, ...]
    """Of each parameter, in the order of the groups, just before the update; vectors or sketches."""
    parameters: tuple[Tensor, ...]
    """After the update."""
    before: tuple[Tensor, ...] = ()
    """Before the optimizer's first update; empty in later steps."""
    calls: tuple[Call, ...] = ()
    """Calls of modules since the step before."""
    epoch: int = 0
    """How many times a loader had been walked from its beginning."""
    backward_at: str = ""
    """Where the script called backward, as ``file:line``."""
    step_at: str = ""
    """Where it called step."""
    scaled_clip: bool = False
    """Whether gradients were clipped while a loss scale was still in them."""

    @property
    def samples(self) -> int:
        """Samples of the first call; 0 where there was none."""
        return len(self.calls[0].rows) if self.calls else 0


@dataclass(frozen=True)
class OptimizerRecord:
    """One optimizer."""

    kind: str
    """Its class."""
    names: tuple[str, ...]
    """Of its parameters, in the order of its groups."""


@dataclass(frozen=True)
class Recording:
    """What one process did."""

    steps: tuple[StepRecord, ...] = ()
    optimizers: tuple[OptimizerRecord, ...] = ()
    cards: tuple[str, ...] = ()
    """The cards that this process used, as far as manycard chose them."""
    ended: str = "script"
    """``steps``: all that were asked for; ``script``: the script ended sooner; ``failed``; ``ranks``: it asks for
    one process a card."""
    error: str = ""
    """The traceback, where it failed."""
    asks_for: tuple[str, str] = ("", "")
    """The strategy and cards that it asks for, where it ended in ``ranks``."""
    uses_manycard: bool = False
    """Whether it made a `Parallel` or a `DataParallel`."""
    draws: bool = False
    """Whether a forward pass drew at random."""
    batchnorm: tuple[str, ...] = ()
    """Classes of modules in which BatchNorm took statistics from a part of the batch."""
    precision: str = "single"
    """``double``, ``single`` or ``half``: the coarsest that was computed in."""
    on_gpu: bool = False
    sketched: bool = False
    """Whether gradients and parameters are sketches."""
    shuffles: bool = False
    """Whether a DistributedSampler shuffled."""
    padding: int = 0
    """Samples that a DistributedSampler repeats in each epoch."""
    in_lockstep: bool = False
    """Whether ranks ran a script for one card in lockstep, so that each has seen whole batches."""
    spread: tuple[dict[str, Any], ...] = ()
    """What became of the modules of a script that manycard spreads by itself."""

    def write(self, folder: Path) -> None:
        """Write it to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        steps = [_step_words(step) for step in self.steps]
        words = {name: value for name, value in vars(self).items() if name not in ("steps", "optimizers")}
        words |= {"optimizers": [asdict(optimizer) for optimizer in self.optimizers], "steps": steps}
        torch.save([_step_tensors(step) for step in self.steps], folder / "tensors.pt")
        partial = folder / "recording.partial"
        partial.write_text(json.dumps(words), encoding="utf-8")
        partial.replace(folder / "recording.json")

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Read what `write` wrote.

        Raises:
            FileNotFoundError: the process left none.
        """
        words = json.loads((folder / "recording.json").read_text(encoding="utf-8"))
        tensors = torch.load(folder / "tensors.pt", mmap=True, weights_only=True)
        steps = tuple(_read_step(*pair) for pair in zip(words.pop("steps"), tensors, strict=True))
        optimizers = tuple(OptimizerRecord(each["kind"], tuple(each["names"])) for each in words.pop("optimizers"))
        lists = {name: tuple(value) for name, value in words.items() if isinstance(value, list)}
        return cls(steps=steps, optimizers=optimizers, **(words | lists))


def _step_words(step: StepRecord) -> dict[str, Any]:
    kept = ("optimizer", "losses", "rates", "epoch", "backward_at", "step_at", "scaled_clip")
    return {name: getattr(step, name) for name in kept} | {"modules": [call.module for call in step.calls]}


def _step_tensors(step: StepRecord) -> dict[str, Any]:
    return {
        "gradients": list(step.gradients),
        "parameters": list(step.parameters),
        "before": list(step.before),
        "rows": [vars(call.rows) for call in step.calls],
    }


def _read_step(words: dict[str, Any], tensors: dict[str, Any]) -> StepRecord:
    rows = [Rows(**each) for each in tensors.pop("rows")]
    calls = tuple(Call(module, of) for module, of in zip(words.pop("modules"), rows, strict=True))
    parts: dict[str, Any] = {name: tuple(value) for name, value in tensors.items()}
    losses, rates = tuple(words.pop("losses")), tuple(words.pop("rates"))
    return StepRecord(losses=losses, rates=rates, calls=calls, **words, **parts)


def together(ranks: Sequence[Recording]) -> Recording:
    """One recording of what ranks did together.

    Losses are means weighted by samples; samples are those of all ranks, in the order of ranks; gradients and
    parameters are rank 0's.
    """
    first = ranks[0]
    if len(ranks) == 1:
        return first
    count = min(len(rank.steps) for rank in ranks)
    steps = tuple(_joined([rank.steps[number] for rank in ranks]) for number in range(count))
    return replace(
        first,
        steps=steps,
        cards=tuple(dict.fromkeys(card for rank in ranks for card in rank.cards)),
        draws=any(rank.draws for rank in ranks),
        batchnorm=tuple(dict.fromkeys(name for rank in ranks for name in rank.batchnorm)),
    )


def _joined(steps: Sequence[StepRecord]) -> StepRecord:
    weights = [float(step.samples) for step in steps]
    if not any(weights):
        weights = [1.0] * len(steps)
    passes = min(len(step.losses) for step in steps)
    losses = tuple(
        sum(step.losses[number] * weight for step, weight in zip(steps, weights, strict=True) if weight) / sum(weights)
        for number in range(passes)
    )
    made = min(len(step.calls) for step in steps)
    calls = tuple(
        Call(steps[0].calls[number].module, join_rows([step.calls[number].rows for step in steps]))
        for number in range(made)
    )
    return replace(steps[0], losses=losses, calls=calls)


def keeps_whole(elements: int, steps: int, budget: int) -> bool:
    """Whether gradients and parameters of `steps` steps fit into `budget` bytes, at 4 bytes each."""
    return elements * 4 * 2 * steps <= budget


def sketch(vector: Tensor) -> Tensor:
    """Fold a flat vector to `_BUCKETS` sums with random signs, the same signs for every vector of its length.

    The 2-norm of a sketch, or of the difference of two, is that of the vectors within about 2 % (a count sketch).
    Source: Charikar, Chen and Farach-Colton (2002), https://doi.org/10.1007/3-540-45465-9_59
    """
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(_BUCKETS, dtype=torch.float64, device="cpu")
    for part in torch.split(vector, _CHUNK):
        signs = torch.randint(2, (len(part),), generator=generator, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
        signed = part.to(torch.float64) * signs
        short = -len(signed) % _BUCKETS
        total += torch.nn.functional.pad(signed, (0, short)).view(-1, _BUCKETS).sum(0)
    return total
