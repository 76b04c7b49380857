"""What a checkpoint of a run holds, and how a run takes it up again: on any number of cards, under any strategy.

Behaviour:
    * Rank 0 writes. It has the state of the module, of each optimizer and of the loader, every rank's random states,
      the loss scale, and the script's own values.
    * Every rank learns whether the file was written before it goes on, and raises if it was not.
    * A rank that the writing run did not have takes up the random states of one that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manycard.checkpoint import global_rng_state, load_global_rng_state, read_checkpoint, write_checkpoint
from manycard.data import GlobalLoader
from manycard.errors import CheckpointError, ManycardError
from manycard.strategies import Strategy

__all__ = ["load_run", "save_run"]


def save_run(
    strategy: Strategy,
    path: str | Path,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    loader: GlobalLoader | None,
    extra: dict[str, Any],
) -> None:
    """Write the state of a run.

    Raises:
        CheckpointError: it can't be written.
    """
    if model is not None:
        strategy.settle(model)
    peers, scale = strategy.peers, strategy.precision.scale
    random_states = peers.gather_objects({"host": global_rng_state(), "cards": strategy.generators.state_dict()})
    problem = ""
    if peers.rank == 0:
        state = {
            "model": None if model is None else strategy.unwrap(model).state_dict(),
            "optimizers": [each.state_dict() for each in optimizers],
            "loader": None if loader is None else loader.state_dict(),
            "random": random_states,
            "strategy": {} if model is None else strategy.state_dict(model),
            "scale": None if scale is None else scale.state_dict(),
            "extra": extra,
        }
        try:
            write_checkpoint(Path(path), state)
        except ManycardError as error:
            problem, failure = str(error), error
    problems = peers.gather_objects(problem)
    if problem:
        raise failure
    if problems[0]:
        raise CheckpointError(f"rank 0 could not write it: {problems[0].rstrip('.')}")


def load_run(
    strategy: Strategy,
    path: str | Path,
    model: nn.Module | None,
    optimizers: Sequence[Optimizer],
    loader: GlobalLoader | None,
) -> dict[str, Any]:
    """Put back the state of a run, and return the script's own values.

    Raises:
        CheckpointError: the file isn't there, isn't whole, or doesn't hold what is asked for.
    """
    state = read_checkpoint(Path(path))
    if model is not None:
        _require(state["model"] is not None, path, "model")
        strategy.unwrap(model).load_state_dict(state["model"])
        strategy.load_state_dict(model, state.get("strategy") or {})
    _require(not optimizers or len(optimizers) == len(state["optimizers"]), path, "optimizer")
    for each, kept in zip(optimizers, state["optimizers"], strict=False):
        each.load_state_dict(kept)
    if loader is not None:
        _require(state["loader"] is not None, path, "loader")
        loader.load_state_dict(state["loader"])
    scale = strategy.precision.scale
    if scale is not None and state["scale"] is not None:
        scale.load_state_dict(state["scale"])
    states = state["random"]
    own = states[strategy.peers.rank % len(states)]
    load_global_rng_state(own["host"])
    strategy.generators.load_state_dict(own["cards"])
    extra: dict[str, Any] = state["extra"]
    return extra


def _require(there: bool, path: str | Path, what: str) -> None:
    if not there:
        raise CheckpointError(f"{path} holds no such {what}", fix=f"give save() and load() the same {what}")
