"""NCCL's variables that were measured to be best on this machine, saved for the runs that follow.

Behaviour:
    * Saved for a set of cards: their models and number, the driver and NCCL's version. Another set, a new driver or
      a new NCCL has settings of its own, or none.
    * `apply_saved` puts them into this process's environment before NCCL starts, and says so in one line. A variable
      that is set already stays as it is, and that is said.
    * A file that can't be read or holds something else is said once and otherwise ignored; no run fails by it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from manycard.cards.card import Card
from manycard.cards.nvml import session
from manycard.errors import SettingError

__all__ = [
    "NcclMachine",
    "NcclSettings",
    "apply_saved",
    "check_nccl",
    "load_settings",
    "save_settings",
    "settings_file",
    "take_back",
]

_SAID: set[str] = set()
_APPLIED = "MANYCARD_NCCL_APPLIED"
"""Names the variables that were set here, also to the processes that this one starts."""


@dataclass(frozen=True)
class NcclMachine:
    """What settings are saved for."""

    models: tuple[str, ...]
    """The cards' models, sorted; one entry a card."""
    driver: str
    nccl: str

    @property
    def key(self) -> str:
        """A short name that differs between machines."""
        text = json.dumps([list(self.models), self.driver, self.nccl])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def of(cls, cards: Sequence[Card]) -> NcclMachine | None:
        """The machine that these cards are of; None where they can't use NCCL together."""
        if len(cards) < 2 or any(card.simulated for card in cards) or torch.version.cuda is None:
            return None
        if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
            return None
        with session() as nvml:
            driver = nvml.ask("nvmlSystemGetDriverVersion") or ""
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return cls(tuple(sorted(card.model for card in cards)), str(driver), nccl)


@dataclass(frozen=True)
class NcclSettings:
    """What was found best."""

    variables: Mapping[str, str]
    """Such as ``{"NCCL_MIN_NCHANNELS": "16"}``; empty where the default is best."""
    gain: float
    """Times as fast as the default, over all sizes."""
    sizes: tuple[int, ...] = ()
    """Bytes of the all-reduces that were measured."""
    measured_on: str = ""
    """The day, as 2026-01-31."""


def settings_file(machine: NcclMachine, environment: Mapping[str, str] = os.environ) -> Path:
    """Where a machine's settings are saved: below XDG_CONFIG_HOME, by default ``~/.config``."""
    home = environment.get("HOME") or os.path.expanduser("~")  # which Path would raise for where there is none
    base = environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    return Path(base) / "manycard" / "nccl" / f"{machine.key}.json"


def save_settings(machine: NcclMachine, settings: NcclSettings, file: Path | None = None) -> Path:
    """Save settings, in place of what was saved for the same machine.

    Raises:
        OSError: the file can't be written.
    """
    file = file or settings_file(machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": asdict(machine), **asdict(settings)}
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    beside.replace(file)  # whole or not at all
    return file


def load_settings(machine: NcclMachine, file: Path | None = None) -> NcclSettings | None:
    """What was saved for a machine; None where nothing was.

    Raises:
        ValueError: the file holds something else.
    """
    file = file or settings_file(machine)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return None
    document = json.loads(text)
    variables = document.get("variables") if isinstance(document, dict) else None
    if not isinstance(variables, dict) or not all(
        isinstance(name, str) and name.startswith("NCCL_") and isinstance(value, str)
        for name, value in variables.items()
    ):
        raise ValueError("it holds no variables of NCCL's")
    return NcclSettings(
        variables,
        float(document.get("gain", 1)),
        tuple(document.get("sizes", ())),
        str(document.get("measured_on", "")),
    )


def check_nccl(value: str, setting: str = "nccl") -> str:
    """``saved`` or ``default``.

    Raises:
        SettingError: it is neither.
    """
    if value not in ("saved", "default"):
        raise SettingError(
            setting,
            value,
            "it is neither saved nor default",
            fix="leave it out, or write default for NCCL's own choice",
        )
    return value


def apply_saved(
    cards: Sequence[Card], environment: MutableMapping[str, str] | None = None, *, speaks: bool = True
) -> Mapping[str, str]:
    """Set the variables that were saved for these cards, before NCCL starts.

    Args:
        cards: the cards of the run on this machine.
        environment: where to set them; this process's by default.
        speaks: whether this process says so; one rank of a run does.

    Returns:
        the variables that were set here.
    """
    machine = NcclMachine.of(cards)
    if machine is None:
        return {}
    environment = os.environ if environment is None else environment
    file = settings_file(machine, environment)
    try:
        saved = load_settings(machine, file)
    except (ValueError, TypeError) as wrong:
        _say(f"the saved NCCL settings in {file} are left out: {wrong}; run manycard doctor --deep anew", speaks)
        return {}
    if saved is None or not saved.variables:
        return {}
    new = {name: value for name, value in saved.variables.items() if name not in environment}
    kept = [name for name, value in saved.variables.items() if environment.get(name, value) != value]
    environment.update(new)
    if new:
        environment[_APPLIED] = ",".join(new)
        pairs = " ".join(f"{name}={value}" for name, value in new.items())
        _say(
            f"NCCL settings saved for this machine: {pairs} ({saved.gain:.2f}x the default, measured "
            f"{saved.measured_on}; --nccl default leaves them out)",
            speaks,
        )
    if kept:
        pairs = ", ".join(f"{name}={environment[name]}" for name in kept)
        _say(f"{pairs} stays as you set it, in place of what was saved for this machine", speaks)
    return new


def take_back(environment: MutableMapping[str, str] | None = None) -> None:
    """Unset what `apply_saved` has set, here or in the process that started this one."""
    environment = os.environ if environment is None else environment
    for name in environment.pop(_APPLIED, "").split(","):
        environment.pop(name, None)


def _say(line: str, speaks: bool) -> None:
    """Say a line, once a process."""
    if speaks and line not in _SAID:
        _SAID.add(line)
        print(f"manycard: {line}", file=sys.stderr, flush=True)
