"""What ``manycard bench`` is asked for on the command line, and the run that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manycard.benchmark import MatrixSettings, read_axes
from manycard.benchmark.ablation import AblationSettings
from manycard.cards import CardChoice, choose_cards
from manycard.cli.bench_results import ResultFolder
from manycard.errors import SettingError
from manycard.launch import Script

__all__ = ["STRATEGIES", "BenchRequest"]

STRATEGIES = "single,torch_dp,dp,ddp"
"""What ``--strategies`` is where it isn't given."""


@dataclass(frozen=True)
class BenchRequest:
    """Every option of the command, by the name that the command's function has for it (see `bench_options`).

    Raises:
        SettingError: two of them don't go together.
    """

    script: str | None
    arguments: list[str] | None
    module: bool
    workload: list[str] | None
    cards: str | None
    counts: str | None
    strategies: str
    varied: list[str] | None
    precision: str | None
    batch: int | None
    per_card_batch: int | None
    steps: int | None
    epochs: int | None
    repeats: int
    small: bool
    channels_last: bool | None
    seed: int
    time_limit: float
    against: Path | None
    ablate: bool
    only: str | None
    files: Path | None
    resume: bool
    out: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.script is None and self.module:
            raise SettingError("-m", True, "no module is named", fix="write: manycard bench -m MODULE")
        if self.ablate:
            self._refuse_what_an_ablation_decides()
            return
        for option, value in {"--only": self.only, "--files": self.files}.items():
            if value is not None:
                raise SettingError(option, str(value), "it is for --ablate", fix="add --ablate, or leave it out")

    def _refuse_what_an_ablation_decides(self) -> None:
        given = {
            "SCRIPT": self.script,
            "--counts": self.counts,
            "--strategies": self.strategies if self.strategies != STRATEGIES else None,
            "--set": self.varied,
            "--precision": self.precision,
            "--epochs": self.epochs,
            "--channels-last": self.channels_last,
        }
        for option, value in given.items():
            if value is not None:
                raise SettingError(option, value, "--ablate decides that by itself", fix="leave one of them out")

    def choose_cards(self) -> CardChoice:
        """The cards of the run."""
        return choose_cards(self.cards or "all")

    def folder(self) -> ResultFolder:
        """Where results go."""
        return ResultFolder(self.out, self.against, resume=self.resume)

    def ablation(self, choice: CardChoice) -> AblationSettings:
        """The run with ``--ablate``."""
        each, cards = self.per_card_batch, choice.cards
        return AblationSettings(
            workload=_names(self.workload)[0] if self.workload else "resnet50",
            cards=cards,
            only=_names([self.only]) if self.only is not None else (),
            batch=self.batch if self.batch is not None or each is None else each * len(cards),
            files=self.files,
            steps=self.steps,
            repeats=self.repeats,
            seed=self.seed,
            small=self.small,
            time_limit=self.time_limit,
        )

    def matrix(self, choice: CardChoice) -> MatrixSettings:
        """The run without it."""
        target = None if self.script is None else Script(self.script, tuple(self.arguments or ()), self.module)
        return MatrixSettings(
            workloads=_names(self.workload) if self.workload is not None else ("digits",) if target is None else (),
            cards=choice.cards,
            strategies=_names([self.strategies]),
            counts=_numbers("--counts", self.counts),
            precision=self.precision or "default",
            batch=self.batch,
            per_card_batch=self.per_card_batch,
            steps=self.steps,
            epochs=self.epochs,
            repeats=self.repeats,
            seed=self.seed,
            small=self.small,
            channels_last=self.channels_last,
            axes=read_axes(self.varied or (), script=target is not None),
            script=target,
            time_limit=self.time_limit,
        )


def _names(values: list[str]) -> tuple[str, ...]:
    """The names in comma lists."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


def _numbers(option: str, value: str | None) -> tuple[int, ...]:
    """The whole numbers in a comma list; none where the option is not given."""
    if value is None:
        return ()
    try:
        return tuple(int(word) for word in _names([value]))
    except ValueError:
        raise SettingError(option, value, "it is no list of whole numbers", fix="write it like 1,2,4") from None
