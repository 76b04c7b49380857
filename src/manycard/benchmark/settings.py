"""What a benchmark is to measure, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from manycard.benchmark.pipeline_run import PIPELINE
from manycard.benchmark.workloads import Workload, find_workload
from manycard.cards import Card
from manycard.errors import SettingError, StrategyError
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
    """Timed steps, for workloads measured in steps; None for the workload's default."""
    epochs: int | None = None
    """Epochs, for workloads measured in epochs; None for the workload's default."""
    repeats: int = 1
    """Rounds over all rows; figures are medians over the rounds."""
    seed: int = 0
    small: bool = False
    channels_last: bool | None = None
    """Memory format of image workloads; None for channels-last."""
    kinds: tuple[type[Workload], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.workloads:
            raise SettingError("--workload", "", "no workload is named", fix="name one, such as --workload digits")
        kinds = tuple(find_workload(name) for name in dict.fromkeys(self.workloads))
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "strategies", tuple(dict.fromkeys(self.strategies)))
        object.__setattr__(self, "counts", tuple(sorted(set(self.counts))) or (len(self.cards),))
        for kind in kinds:
            kind.check_available()
        make_precision(self.precision)
        self._check_strategies()
        self._check_sizes()
        self._check_fits_workloads()

    @property
    def simulated(self) -> bool:
        """Whether the CPU plays the cards."""
        return self.cards[0].simulated

    @property
    def scaling(self) -> str:
        """``strong`` where the global batch is fixed, else ``weak``."""
        return "strong" if self.batch is not None else "weak"

    def batch_of(self, kind: type[Workload], cards: int) -> int:
        """The global batch of a row."""
        if self.batch is not None:
            return self.batch
        return (self.per_card_batch or kind(small=self.small).default_batch) * cards

    def length_of(self, kind: type[Workload]) -> int:
        """How long a row runs, as the workload counts."""
        asked = self.epochs if kind.length_unit == "epochs" else self.steps
        return asked or kind.default_length

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
        units = {kind.length_unit for kind in self.kinds}
        names = ", ".join(kind.name for kind in self.kinds)
        for option, value, unit, other in (
            ("--steps", self.steps, "steps", "--epochs"),
            ("--epochs", self.epochs, "epochs", "--steps"),
        ):
            if value is not None and unit not in units:
                raise SettingError(option, value, f"{names}: not measured in {unit}", fix=f"give {other}")
        if self.channels_last is not None and not any(kind.has_images for kind in self.kinds):
            raise SettingError(
                "--channels-last" if self.channels_last else "--no-channels-last",
                self.channels_last,
                f"{names}: no image workload",
                fix="leave it out",
            )
