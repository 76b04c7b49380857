"""What `Pipeline` was asked for, checked before any card is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from manycard.cards import Card, parse_size
from manycard.engine.data_parallel import DataParallel
from manycard.errors import CardsError, ModelError, SettingError, StrategyError

__all__ = ["check_alone", "check_cards", "check_model", "check_stages", "memory_limits", "on_or_off"]

_SPREADING = (DataParallel, nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_alone() -> None:
    """Check that this process is no rank.

    Raises:
        StrategyError: it is one of several.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        raise StrategyError(
            "strategy",
            os.environ.get("MANYCARD_STRATEGY", "ddp"),
            f"a Pipeline drives all its cards from one process, and this script runs in {ranks} ranks",
            fix="start it with python, or with manycard run without a strategy",
        )


def check_model(model: Any) -> None:
    """Check that a pipeline can run `model`.

    Raises:
        ModelError: it can't.
    """
    if isinstance(model, type):
        raise ModelError(f"the model is the class {model.__name__}", fix=f"pass one of its kind: {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}, no nn.Module", fix="pass the module itself")
    spreads = next((part for part in model.modules() if isinstance(part, _SPREADING)), None)
    if spreads is not None:
        raise ModelError(
            f"the model holds a {type(spreads).__name__}, which spreads its calls over cards by itself",
            fix="pass the module inside (its attribute .module); replicas= makes copies of the whole pipeline",
        )
    if any(is_lazy(each) for each in [*model.parameters(), *model.buffers()]):
        raise ModelError("the model has lazy parameters", fix="run a batch through it once, which gives them shapes")
    inner = getattr(model, "_orig_mod", None)
    if inner is not None or model.__dict__.get("_compiled_call_impl") is not None:
        raise ModelError(
            "the model is compiled as a whole, so that no card can take over in the middle",
            fix="pass the uncompiled model, and compile its blocks: for block in model.blocks: block.compile()",
        )


def check_cards(chosen: tuple[Card, ...], given: Any, replicas: int) -> tuple[Card, ...]:
    """The cards, which can be shared out to the replicas.

    Raises:
        SettingError: they can't, or one is named twice.
    """
    real = [card for card in chosen if not card.simulated]
    if len({card.device for card in real}) != len(real):
        raise CardsError("cards", given, "a card is named twice", fix="name each card once: a card holds one stage")
    if len(chosen) % replicas:
        problem = f"{len(chosen)} cards can't be shared out to {replicas} replicas evenly"
        raise SettingError("replicas", replicas, problem, fix="take a number that divides that of the cards")
    return chosen


def check_stages(stages: Any, number: int, replicas: int) -> tuple[str, ...] | None:
    """The names with which stages but the first begin; None to find them.

    Raises:
        SettingError: they are no names, or not one for each stage but the first.
    """
    if stages == "auto":
        return None
    named = isinstance(stages, Sequence) and not isinstance(stages, str)
    if not named or not all(isinstance(name, str) for name in stages):
        fix = 'give stages="auto", or a list of module names such as ["blocks.6"]'
        raise SettingError("stages", stages, 'it is neither "auto" nor names', fix=fix)
    if len(stages) != number - 1:
        each = f" of each of the {replicas} replicas" if replicas > 1 else ""
        raise SettingError(
            "stages",
            list(stages),
            f"{_counted(len(stages), 'name')} for {_counted(len(stages) + 1, 'stage')}, and there"
            f" {'are' if number != 1 else 'is'} {_counted(number, 'card')}{each}",
            fix=f"give {number - 1}: the first stage begins with the model, so name where the others do",
        )
    return tuple(stages)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s'[: number != 1]}"


def memory_limits(memory: Any, stages: int) -> tuple[int | None, ...] | None:
    """What each stage may take of its card, in bytes; None to ask the cards.

    Raises:
        SettingError: it is no amount, nor one for each stage.
    """
    if memory is None:
        return None
    amounts = list(memory) if isinstance(memory, list | tuple) else [memory] * stages
    if len(amounts) != stages:
        problem = f"there {'are' if len(amounts) != 1 else 'is'} {_counted(len(amounts), 'amount')} for"
        problem += f" {_counted(stages, 'stage')}"
        raise SettingError("memory", memory, problem, fix='give one amount for all, such as "20GiB", or one a stage')
    return tuple(parse_size(amount, setting="memory") for amount in amounts)


def on_or_off(setting: str, value: Any) -> bool:
    """`value`, which is True or False.

    Raises:
        SettingError: it is neither.
    """
    if not isinstance(value, bool):
        raise SettingError(setting, value, "it is neither True nor False", fix=f"give {setting}=True, or leave it out")
    return value
