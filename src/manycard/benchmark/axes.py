"""What ``--set NAME=VALUES`` varies: one axis of the matrix a name.

Behaviour:
    * A name in capitals is an environment variable of the row's process and its ranks (``NCCL_ALGO=Ring,Tree``).
    * A setting that a strategy doesn't read makes no rows there: that strategy's row is run once, without it.
    * A value that can't work is refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from manycard.errors import SettingError
from manycard.pipeline.schedule import find_schedule
from manycard.precision import make_precision

__all__ = [
    "AXES",
    "Axis",
    "combinations",
    "compile_argument",
    "ddp_options",
    "environment_of",
    "read_axes",
    "setting",
    "written",
]

Setting = tuple[str, Any]
_ON_OFF = {"on": True, "off": False}


@dataclass(frozen=True)
class Axis:
    """One setting that rows can differ in."""

    name: str
    read: Callable[[str], Any]
    """From the word on the command line to its value; raises ValueError."""
    values: str
    """The values that there are, in words."""
    strategies: tuple[str, ...] = ()
    """Those that read it; empty for all."""
    scripts: bool = True
    """Whether a script's rows can have it."""
    option: bool = False
    """Whether it is an argument of DistributedDataParallel."""

    def applies(self, strategy: str) -> bool:
        """Whether `strategy` reads it."""
        return not self.strategies or strategy in self.strategies


def _precision(word: str) -> str:
    make_precision(word)
    return word


def _on_off(word: str) -> bool:
    if word not in _ON_OFF:
        raise ValueError
    return _ON_OFF[word]


def _graphs(word: str) -> str:
    if word not in ("auto", "on", "off"):
        raise ValueError
    return word


def _schedule(word: str) -> str:
    find_schedule(word)
    return word


def _from_one(word: str) -> int:
    if int(word) < 1:
        raise ValueError
    return int(word)


def _compile(word: str) -> Any:
    modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    return word if word in modes else _on_off(word)


AXES = {
    axis.name: axis
    for axis in (
        Axis("precision", _precision, "default, fp32, tf32, bf16, fp16"),
        Axis("graphs", _graphs, "auto, on, off", ("dp",)),
        Axis("compile", _compile, "on, off, or a mode of torch.compile", ("single", "dp", "ddp")),
        Axis("accumulate", _from_one, "whole numbers from 1 up"),
        Axis("sync_batchnorm", _on_off, "on, off", ("dp", "ddp")),
        Axis("channels_last", _on_off, "on, off", scripts=False),
        Axis("fused", _on_off, "on, off", scripts=False),
        Axis("gradient_as_bucket_view", _on_off, "on, off", ("ddp",), option=True),
        Axis("static_graph", _on_off, "on, off", ("ddp",), option=True),
        Axis("bucket_cap_mb", _from_one, "whole numbers from 1 up", ("ddp",), option=True),
        Axis("replicas", _from_one, "whole numbers from 1 up", ("pipeline",), scripts=False),
        Axis("micro_batches", _from_one, "whole numbers from 1 up", ("pipeline",), scripts=False),
        Axis("schedule", _schedule, "1f1b, gpipe", ("pipeline",), scripts=False),
        Axis("checkpoint_activations", _on_off, "on, off", ("pipeline",), scripts=False),
    )
}


def read_axes(given: Sequence[str], *, script: bool = False) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The axes that the words after ``--set`` stand for.

    Args:
        given: each like ``precision=bf16,fp32``.
        script: whether a script is measured.

    Raises:
        SettingError: a name or a value can't work.

    Example:
        >>> read_axes(["precision=bf16,fp32", "NCCL_ALGO=Ring,Tree"])
        (('precision', ('bf16', 'fp32')), ('NCCL_ALGO', ('Ring', 'Tree')))
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in given:
        name, equals, words = text.partition("=")
        name = name.strip()
        values = [word.strip() for word in words.split(",") if word.strip()]
        if not equals or not name or not values:
            raise SettingError("--set", text, "it is not NAME=VALUES", fix="write it like --set precision=bf16,fp32")
        if name in axes:
            raise SettingError("--set", text, f"{name} is given twice", fix=f"write --set {name}=VALUE,VALUE once")
        axes[name] = tuple(_read(name, word, script=script) for word in dict.fromkeys(values))
    return tuple(axes.items())


def _read(name: str, word: str, *, script: bool) -> Any:
    if _is_variable(name):
        return word
    axis = AXES.get(name)
    if axis is None:
        known = ", ".join(AXES)
        raise SettingError(
            "--set", name, "there is no such setting", fix=f"choose from {known}, or name an environment variable"
        )
    if script and not axis.scripts:
        raise SettingError(
            "--set", name, "a script decides that by itself", fix="leave it out, or measure a built-in workload"
        )
    try:
        return axis.read(word)
    except ValueError:
        raise SettingError(
            "--set", f"{name}={word}", "there is no such value", fix=f"{name} takes {axis.values}"
        ) from None


def _is_variable(name: str) -> bool:
    return name.isupper()


def combinations(axes: Sequence[tuple[str, tuple[Any, ...]]], strategy: str) -> list[tuple[Setting, ...]]:
    """Every combination of values that `strategy` reads.

    Example:
        >>> combinations((("precision", ("bf16", "fp32")), ("graphs", ("on", "off"))), "ddp")
        [(('precision', 'bf16'),), (('precision', 'fp32'),)]
    """
    read = [(name, values) for name, values in axes if name not in AXES or AXES[name].applies(strategy)]
    return [
        tuple(zip([name for name, _ in read], chosen, strict=True)) for chosen in product(*(each for _, each in read))
    ]


def setting(settings: Sequence[Setting], name: str, default: Any = None) -> Any:
    """The value of `name` in `settings`."""
    return dict(settings).get(name, default)


def ddp_options(settings: Sequence[Setting]) -> dict[str, Any]:
    """The arguments of DistributedDataParallel among `settings`."""
    return {name: value for name, value in settings if name in AXES and AXES[name].option}


def environment_of(settings: Sequence[Setting]) -> dict[str, str]:
    """The environment variables among `settings`."""
    return {name: value for name, value in settings if _is_variable(name)}


def written(value: Any) -> str:
    """A value as the command line has it.

    Example:
        >>> written(True), written("bf16"), written(25)
        ('on', 'bf16', '25')
    """
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def compile_argument(settings: Sequence[Setting]) -> Any:
    """What `Parallel` is to be given as `compile`; None where no setting says it."""
    value = setting(settings, "compile")
    return {"mode": value} if isinstance(value, str) else value
