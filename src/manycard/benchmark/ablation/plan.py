"""Which rows an ablation has: the baseline, each step alone, and all of them one after another.

Behaviour:
    * A step alone is compared with the way that it stands on, as that way is without it.
    * Together, each row adds one step to the row before. A step that doesn't apply here is a row that says why, and the
      next row stands on the one before it.
    * Rows with the same recipe are one row and run once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from manycard.benchmark.ablation.recipe import Recipe
from manycard.benchmark.ablation.steps import STEPS, Situation, Step
from manycard.benchmark.measurement import Measurement
from manycard.benchmark.meter import Goal
from manycard.benchmark.workloads import Workload, find_workload
from manycard.cards import Card, choose_cards
from manycard.data.image_files.folder import find_images
from manycard.errors import SettingError
from manycard.launch import cards_setting

__all__ = ["AblationRow", "AblationSettings", "AblationSpec", "plan_rows"]


@dataclass(frozen=True)
class AblationSpec:
    """One training, before it has run."""

    worker: ClassVar[str] = "manycard.benchmark.ablation.worker"

    workload: str
    recipe: Recipe
    cards: str
    card_names: tuple[str, ...]
    simulated: bool
    batch: int
    """Samples in the global batch."""
    files: str | None = None
    """A folder of images, one sub-folder a class; None trains on drawn batches."""
    steps: int | None = None
    small: bool = False
    seed: int = 0
    label: str = field(default="", compare=False)
    """How progress calls it."""

    @property
    def strategy(self) -> str:
        """How the work is spread."""
        return self.recipe.way

    @property
    def environment(self) -> dict[str, str]:
        """The variables that its process and its ranks get."""
        return dict(self.recipe.environment)

    @property
    def goal(self) -> Goal:
        """When it has run for long enough."""
        return Goal() if self.steps is None else Goal(self.steps, seconds=0.0)

    def measurement(self, **found: Any) -> Measurement:
        """A row of results with `found` in it."""
        return Measurement(
            workload=self.workload,
            unit=find_workload(self.workload).unit,
            strategy=self.strategy,
            cards=len(self.card_names),
            card_names=self.card_names,
            simulated=self.simulated,
            scaling="strong",
            batch=self.batch,
            per_card_batch=-(-self.batch // len(self.card_names)),
            precision=self.recipe.precision,
            settings=self.recipe.changed(),
            **found,
        )

    def to_json(self) -> str:
        """The row as text; the same for rows that run the same."""
        fields = asdict(self)
        del fields["label"]
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> AblationSpec:
        """The opposite of `to_json`."""
        fields = json.loads(text)
        recipe = Recipe.from_json(fields.pop("recipe"))
        return cls(recipe=recipe, card_names=tuple(fields.pop("card_names")), **fields)


@dataclass(frozen=True)
class AblationRow:
    """One row of the table."""

    part: str
    """``baseline``, ``alone`` or ``together``."""
    step: str
    title: str
    spec: AblationSpec
    """What is run, where the step applies."""
    beside: AblationSpec | None = None
    """What its gain is taken from."""
    why_not: str | None = None
    """Why the step doesn't apply; None where it does."""


@dataclass(frozen=True)
class AblationSettings:
    """What is to be taken apart.

    Raises:
        SettingError: a value can't work; names the option of ``manycard bench``.
    """

    workload: str
    cards: tuple[Card, ...]
    only: tuple[str, ...] = ()
    """Names of steps; without any all."""
    batch: int | None = None
    """The global batch; the workload's own a card where it is None."""
    files: Path | None = None
    steps: int | None = None
    repeats: int = 1
    seed: int = 0
    small: bool = False
    time_limit: float = 600.0
    kind: type[Workload] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", find_workload(self.workload))
        self.kind.check_available()
        if self.kind.length_unit == "epochs":
            raise SettingError(
                "--workload", self.workload, "an ablation needs one that is measured in steps", fix="give resnet50"
            )
        known = [step.name for step in STEPS]
        for name in self.only:
            if name not in known:
                raise SettingError("--only", name, "there is no such setting", fix=f"choose from {', '.join(known)}")
        for option, value in (("--batch", self.batch), ("--steps", self.steps), ("--repeats", self.repeats)):
            if value is not None and value < 1:
                raise SettingError(option, value, "it must be at least 1", fix="give a whole number from 1 up")
        if self.global_batch < len(self.cards):
            raise SettingError(
                "--batch", self.batch, f"{len(self.cards)} cards would not get a sample each", fix="give more"
            )
        if not self.time_limit > 0:
            raise SettingError("--time-limit", self.time_limit, "it must be above 0 seconds", fix="give seconds")
        if self.files is not None:
            self._check_files(self.files)

    def _check_files(self, folder: Path) -> None:
        if not self.kind.has_images:
            raise SettingError("--files", str(folder), f"{self.workload} has no images", fix="give --workload resnet50")
        make = "write some: manycard bench data --make 2000 FOLDER"
        if not folder.is_dir():
            raise SettingError("--files", str(folder), "there is no such folder", fix=make)
        number = sum(1 for _ in find_images(folder))
        if number < 2 * self.global_batch:
            raise SettingError(
                "--files",
                str(folder),
                f"it holds {number} images, and two batches have {2 * self.global_batch}",
                fix=make,
            )

    @property
    def global_batch(self) -> int:
        """Samples in the global batch, the same in every row."""
        return self.batch or self.kind(small=self.small).default_batch * len(self.cards)

    @property
    def simulated(self) -> bool:
        """Whether the CPU plays the cards."""
        return self.cards[0].simulated

    @property
    def visible(self) -> tuple[Card, ...]:
        """The cards that `nn.DataParallel` takes by itself."""
        if self.simulated:
            return self.cards
        number = torch.cuda.device_count()
        return choose_cards(",".join(map(str, range(number))) + ("," if number == 1 else "")).cards

    def situation(self) -> Situation:
        """What decides whether steps apply."""
        return Situation(self.simulated, len(self.cards), len(self.visible), self.kind, self.files is not None)


def plan_rows(settings: AblationSettings) -> list[AblationRow]:
    """Every row, in the order of the table."""
    here = settings.situation()
    chosen = [step for step in STEPS if not settings.only or step.name in settings.only]
    applying = [step for step in chosen if step.why_not(here) is None]
    plain = _spec(settings, Recipe(), "baseline")
    rows = [AblationRow("baseline", "baseline", "nn.DataParallel as people write it", plain)]
    rows += [_alone(settings, step, step.why_not(here)) for step in chosen]
    recipe, before = Recipe(), plain
    for step in applying:
        if step.together and (step.stands_on == "torch_dp" or step.stands_on == recipe.way):
            recipe = replace(recipe, **step.changes)
            spec = _spec(settings, recipe, f"together, + {step.name}")
            rows.append(AblationRow("together", step.name, f"+ {step.title}", spec, before))
            before = spec
    return rows


def _alone(settings: AblationSettings, step: Step, why_not: str | None) -> AblationRow:
    base = Recipe(way=step.stands_on)
    beside = _spec(settings, base, f"{step.stands_on} as it is")
    spec = _spec(settings, replace(base, **step.changes), f"{step.name} alone")
    return AblationRow("alone", step.name, step.title, spec, beside, why_not)


def _spec(settings: AblationSettings, recipe: Recipe, label: str) -> AblationSpec:
    cards = settings.cards if recipe.chosen_cards or recipe.way != "torch_dp" else settings.visible
    return AblationSpec(
        workload=settings.workload,
        recipe=recipe,
        cards=cards_setting(cards),
        card_names=tuple(card.name for card in cards),
        simulated=settings.simulated,
        batch=settings.global_batch,
        files=None if settings.files is None else str(settings.files),
        steps=settings.steps,
        small=settings.small,
        seed=settings.seed,
        label=f"{settings.workload}, {label}",
    )
