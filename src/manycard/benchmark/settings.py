"""What a benchmark is to measure, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from manycard.benchmark.axes import AXES
from manycard.benchmark.pipeline_run import PIPELINE
from manycard.benchmark.workloads import Workload, find_workload
from manycard.cards import Card
from manycard.errors import SettingError, StrategyError
from manycard.launch import Script
from manycard.precision import make_precision
from manycard.strategies import STRATEGIES

__all__ = ["MatrixSettings"]


@dataclass(frozen=True)
class MatrixSettings:
    """Which rows a run has.

    Raises:
        SettingError: a value can't work; names the option of ``manycard bench``.
        MissingExtraError: a workload needs a package that isn't installed.
    """

    workloads: tuple[str, ...]
    """Names of built-in workloads; none where a script is measured."""
    cards: tuple[Card, ...]
    """The chosen cards; a row with n cards uses the first n."""
    strategies: tuple[str, ...] = ("single", "torch_dp", "dp", "ddp")
    counts: tuple[int, ...] = ()
    """How many cards rows have; empty for all of `cards`. ``single`` always has one."""
    precision: str = "default"
    batch: int | None = None
    """The global batch (strong scaling); excludes `per_card_batch`."""
    per_card_batch: int | None = None
    """The batch a card (weak scaling); the workload's own default where neither is given."""
    steps: int | None = None
    """Steady steps to time, for workloads measured in steps; None for as many as tell the speed."""
    epochs: int | None = None
    """Epochs, for workloads measured in epochs; None for the workload's default."""
    repeats: int = 1
    """Rounds over all rows; figures are medians over the rounds."""
    seed: int = 0
    small: bool = False
    channels_last: bool | None = None
    """Memory format of image workloads; None for channels-last."""
    axes: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    """Settings that rows differ in, each with its values; see `read_axes`."""
    script: Script | None = None
    """Measured in place of workloads."""
    time_limit: float = 600.0
    """Seconds that one row may take, its start included."""
    kinds: tuple[type[Workload], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.script is not None:
            self.script.check()
        elif not self.workloads:
            raise SettingError("--workload", "", "no workload is named", fix="name one, such as --workload digits")
        kinds = tuple(find_workload(name) for name in dict.fromkeys(self.workloads))
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "strategies", tuple(dict.fromkeys(self.strategies)))
        object.__setattr__(self, "counts", tuple(sorted(set(self.counts))) or (len(self.cards),))
        for kind in kinds:
            kind.check_available()
        make_precision(self.precision)
        self._check_strategies()
        self._check_pipelines()
        self._check_sizes()
        self._check_fits_workloads()

    @property
    def simulated(self) -> bool:
        """Whether the CPU plays the cards."""
        return self.cards[0].simulated

    @property
    def subjects(self) -> tuple[type[Workload] | None, ...]:
        """What is measured: workloads, or None for the script."""
        return self.kinds or (None,)

    @property
    def script_name(self) -> str:
        """How rows call the script."""
        assert self.script is not None, "there is a script where no workload is"
        return self.script.name if self.script.is_module else PurePath(self.script.name).name

    def name_of(self, kind: type[Workload] | None) -> str:
        """How rows call what they measure."""
        return self.script_name if kind is None else kind.name

    def scaling_of(self, kind: type[Workload] | None) -> str:
        """``strong`` where the global batch is fixed, by the caller or by the script, else ``weak``."""
        return "strong" if self.batch is not None or (kind is None and self.per_card_batch is None) else "weak"

    def batch_of(self, kind: type[Workload] | None, cards: int) -> int | None:
        """The global batch of a row; None where the script says it."""
        if self.batch is not None:
            return self.batch
        own = None if kind is None else kind(small=self.small).default_batch
        each = self.per_card_batch or own
        return None if each is None else each * cards

    def epochs_of(self, kind: type[Workload] | None) -> int | None:
        """The epochs of a row; None where it runs until it is steady."""
        if kind is None or kind.length_unit != "epochs":
            return None
        return self.epochs or kind.default_length

    def length_of(self, kind: type[Workload] | None) -> str:
        """How long a row runs, in words."""
        epochs = self.epochs_of(kind)
        if epochs is not None:
            return f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"
        return "until steady" if self.steps is None else f"{self.steps} steady steps"

    def _check_strategies(self) -> None:
        if not self.strategies:
            raise StrategyError("--strategies", "", "no strategy is named", fix="name some, such as single,dp")
        for name in self.strategies:
            if name not in STRATEGIES and name != PIPELINE:
                known = ", ".join((*STRATEGIES, PIPELINE))
                raise StrategyError("--strategies", name, "there is no such strategy", fix=f"choose from {known}")
        if self.simulated and self.strategies == ("torch_dp",):
            raise StrategyError(
                "--strategies", "torch_dp", "nn.DataParallel needs GPUs, and these cards are simulated", fix="add dp"
            )

    def _check_pipelines(self) -> None:
        if PIPELINE in self.strategies and self.script is not None:
            raise StrategyError(
                "--strategies",
                PIPELINE,
                "a script makes its own mc.Pipeline, for one model",
                fix="leave it out, or measure a built-in workload",
            )
        axes = dict(self.axes)
        given = next((name for name in axes if name in AXES and AXES[name].strategies == (PIPELINE,)), None)
        if given is not None and PIPELINE not in self.strategies:
            problem = "only pipelines read it, and no row is one"
            raise SettingError("--set", given, problem, fix="add pipeline to --strategies, or leave it out")
        for replicas in axes.get("replicas", ()):
            if all(count % replicas for count in self.counts):
                counts = ", ".join(map(str, self.counts))
                problem = f"{counts} cards can't be shared out to {replicas} replicas"
                raise SettingError(
                    "--set", f"replicas={replicas}", problem, fix="take a number that divides one of --counts"
                )

    def _check_sizes(self) -> None:
        if self.batch is not None and self.per_card_batch is not None:
            raise SettingError(
                "--per-card-batch",
                self.per_card_batch,
                f"--batch={self.batch} is given as well",
                fix="give --batch for strong scaling or --per-card-batch for weak scaling",
            )
        options = {
            "--batch": self.batch,
            "--per-card-batch": self.per_card_batch,
            "--steps": self.steps,
            "--epochs": self.epochs,
            "--repeats": self.repeats,
        }
        for option, value in options.items():
            if value is not None and value < 1:
                raise SettingError(option, value, "it must be at least 1", fix="give a whole number from 1 up")
        if not self.time_limit > 0:
            raise SettingError(
                "--time-limit", self.time_limit, "it must be above 0 seconds", fix="leave it out for 600"
            )
        if "precision" in dict(self.axes) and self.precision != "default":
            raise SettingError("--precision", self.precision, "--set varies it as well", fix="leave one of them out")
        if not 0 <= self.seed < 2**32:
            raise SettingError("--seed", self.seed, "it must be from 0 to 2**32 - 1", fix="leave it out for 0")
        for count in self.counts:
            if not 1 <= count <= len(self.cards):
                there = f"{len(self.cards)} {'card is' if len(self.cards) == 1 else 'cards are'} chosen"
                most = len(self.cards)
                raise SettingError(
                    "--counts", count, there, fix=f"give counts from 1 to {most}, or choose more with --cards"
                )
        if self.batch is not None and self.batch < max(self.counts):
            raise SettingError(
                "--batch",
                self.batch,
                f"{max(self.counts)} cards would not get a sample each",
                fix=f"give at least {max(self.counts)}",
            )

    def _check_fits_workloads(self) -> None:
        if self.script is not None:
            self._check_fits_script()
            return
        units = {kind.length_unit for kind in self.kinds}
        names = ", ".join(kind.name for kind in self.kinds)
        for option, value, unit, other in (
            ("--steps", self.steps, "steps", "--epochs"),
            ("--epochs", self.epochs, "epochs", "--steps"),
        ):
            if value is not None and unit not in units:
                raise SettingError(option, value, f"{names}: not measured in {unit}", fix=f"give {other}")
        has_images = any(kind.has_images for kind in self.kinds)
        if "channels_last" in dict(self.axes) and not has_images:
            raise SettingError("--set", "channels_last", f"{names}: no image workload", fix="leave it out")
        if self.channels_last is not None and not any(kind.has_images for kind in self.kinds):
            raise SettingError(
                "--channels-last" if self.channels_last else "--no-channels-last",
                self.channels_last,
                f"{names}: no image workload",
                fix="leave it out",
            )

    def _check_fits_script(self) -> None:
        given = {
            "--workload": self.workloads or None,
            "--epochs": self.epochs,
            "--small": self.small or None,
            "--channels-last": self.channels_last,
        }
        for option, value in given.items():
            if value is not None:
                raise SettingError(
                    option, value, "it is for built-in workloads, and a script is given", fix="leave it out"
                )
