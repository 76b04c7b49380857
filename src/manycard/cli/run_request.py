"""What a run is asked for on the command line, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from manycard.cards.nccl_settings import check_nccl
from manycard.cli.options import check_hang_timeout
from manycard.engine.spread_tensor import least_bytes
from manycard.errors import SettingError, StrategyError
from manycard.launch import Script
from manycard.precision import make_precision
from manycard.strategies import STRATEGIES

__all__ = ["RunRequest"]


@dataclass(frozen=True)
class RunRequest:
    """What the command line asks for, checked."""

    script: Script
    strategy: str | None
    cards: str | None
    precision: str | None
    as_json: bool
    sync_batchnorm: bool = False
    compile: bool = False
    channels_last: bool = False
    loader: str | None = None
    graphs: bool = False
    nccl: str | None = None
    hang_timeout: str | None = None
    outputs: str = "auto"

    def __post_init__(self) -> None:
        self.script.check()
        if self.strategy is not None and self.strategy not in (*STRATEGIES, "auto"):
            known = ", ".join((*STRATEGIES, "auto"))
            raise StrategyError("--strategy", self.strategy, "there is no such strategy", fix=f"choose one of {known}")
        if self.precision is not None:
            make_precision(self.precision)
        check_nccl(self.nccl or "saved", "--nccl")
        if self.hang_timeout is not None:
            check_hang_timeout(self.hang_timeout)
        if self.loader not in (None, "auto"):
            raise SettingError(
                "--loader", self.loader, "there is no such way", fix="write --loader auto, or leave it out"
            )
        if self.loader is not None and self.has_ranks:
            raise SettingError("--loader", self.loader, "ranks read with the script's own loaders", fix="leave it out")
        if self.graphs and self.has_ranks:
            raise SettingError(
                "--graphs", "on", "ranks run without CUDA graphs", fix="take --strategy dp, or leave it out"
            )

        least_bytes(self.outputs, "--outputs")
        if self.outputs == "spread" and self.has_ranks:
            raise SettingError(
                "--outputs", "spread", "every rank sees whole outputs", fix="take --strategy dp, or leave it out"
            )

    @property
    def has_ranks(self) -> bool:
        """Whether ranks are to be started at once."""
        return self.strategy in STRATEGIES and STRATEGIES[self.strategy].ranks

    def words(self, strategy: str, cards: str) -> list[str]:
        """The command line that asks for the same with `strategy` and `cards`."""
        precision = ["--precision", self.precision] if self.precision else []
        switches = {
            "--json": self.as_json,
            "--sync-batchnorm": self.sync_batchnorm,
            "--compile": self.compile,
            "--channels-last": self.channels_last,
        }
        given = [name for name, on in switches.items() if on]
        nccl = ["--nccl", self.nccl] if self.nccl else []
        given += ["--hang-timeout", self.hang_timeout] if self.hang_timeout else []
        return ["run", "--strategy", strategy, "--cards", cards, *precision, *nccl, *given, *self.script.argv]

    def environment(self) -> dict[str, str]:
        """What `Parallel` reads, besides the cards."""
        pairs = {
            "MANYCARD_STRATEGY": self.strategy,
            "MANYCARD_PRECISION": self.precision,
            "MANYCARD_NCCL": self.nccl,
            "MANYCARD_HANG_TIMEOUT": self.hang_timeout,
        }
        return {name: value for name, value in pairs.items() if value is not None}
