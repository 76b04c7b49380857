"""Probe: do the driver, torch, CUDA and NCCL fit together and fit the cards?

Rules: CUDA Compatibility guide. A driver runs code of its own CUDA's major version and of older ones; a newer minor
version of the same major runs too, but then code that the driver would have to translate doesn't.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding

__all__ = ["probe"]

_OLDEST_TORCH = (2, 11)
_INSTALL = "install a torch for it: https://pytorch.org/get-started/locally/"


def probe(facts: Facts) -> list[Finding]:
    """Find versions that don't fit together."""
    return [*_torch(facts), *_driver(facts), *_kernels(facts), *_nccl(facts), *_other_nccl(facts), *_shadowed(facts)]


def _torch(facts: Facts) -> list[Finding]:
    findings = []
    numbers = re.match(r"(\d+)\.(\d+)", facts.torch.version)
    if numbers and (int(numbers[1]), int(numbers[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        findings.append(
            Finding(
                cause="torch is older than what manycard is made for",
                evidence=f"torch {facts.torch.version}, and {oldest} is the oldest",
                fix=f"pip install 'torch>={oldest}'",
                severity="error",
            )
        )
    if facts.machine.cards and facts.torch.cuda is None and facts.torch.hip is None:
        findings.append(
            Finding(
                cause="torch is built for the CPU only, and this machine has GPUs",
                evidence=f"torch {facts.torch.version}; {_list_cards(facts)}",
                fix=_INSTALL,
                severity="error",
            )
        )
    return findings


def _driver(facts: Facts) -> list[Finding]:
    torch, driver = facts.torch.cuda, facts.machine.driver_cuda
    if not facts.machine.cards or torch is None:
        return []
    evidence = f"the driver is {facts.machine.driver or 'unknown'}"
    evidence += f" (up to CUDA {_dotted(driver)})" if driver else ""
    evidence += f", torch {facts.torch.version} is built for CUDA {_dotted(torch)}"
    if driver is not None and driver[0] < torch[0]:
        return [
            Finding(
                cause="the driver is too old for torch's CUDA",
                evidence=evidence,
                fix=f"update NVIDIA's driver, or install a torch for CUDA {driver[0]}",
                severity="error",
            )
        ]
    hidden = any("CUDA_VISIBLE_DEVICES" in line or "no slice" in line for line in facts.visible.said)
    if facts.measured.hung_at and not facts.torch.available:
        return []  # it hangs, which has a finding of its own
    if not facts.torch.available and not hidden:
        return [
            Finding(
                cause="torch can't start CUDA, though driver and torch are there",
                evidence=f"torch.cuda.is_available() is False; {evidence}; {_list_cards(facts)}",
                fix="run python -c 'import torch; torch.zeros(1).cuda()' for CUDA's own message; in a container, start "
                "it with --gpus all",
                severity="error",
            )
        ]
    if driver is not None and driver < torch:
        return [
            Finding(
                cause="the driver is older than torch's CUDA, of the same major version",
                evidence=evidence,
                fix="update the driver if a kernel fails with 'unsupported toolchain' or 'no kernel image'",
                severity="note",
            )
        ]
    return []


def _kernels(facts: Facts) -> list[Finding]:
    findings = []
    for name, info in facts.chosen:
        if info.capability is None or facts.torch.cuda is None or not facts.torch.archs:
            continue
        if not _runs_on(facts.torch.archs, info.capability):
            findings.append(
                Finding(
                    cause=f"torch holds no kernels for {name} ({info.name})",
                    evidence=f"compute capability {_dotted(info.capability)}; torch {facts.torch.version} holds "
                    + " ".join(facts.torch.archs),
                    fix=f"leave the card out, with --cards and the numbers of the others, or {_INSTALL}",
                    severity="error",
                )
            )
    return findings


def _runs_on(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for one of `archs` runs on a card: machine code of its major version, or what can be translated."""
    card = 10 * capability[0] + capability[1]
    for arch in archs:
        written = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
        if written is None:
            continue
        made_for = int(written[2])
        same_major = made_for // 10 == capability[0]
        if written[3] == "a":
            runs = made_for == card
        elif written[1] == "sm" or written[3] == "f":
            runs = same_major and made_for <= card
        else:
            runs = made_for <= card
        if runs:
            return True
    return False


def _nccl(facts: Facts) -> list[Finding]:
    if len(facts.chosen) < 2 or facts.torch.nccl is not None or facts.torch.hip is not None:
        return []
    return [
        Finding(
            cause="this torch has no NCCL, so several GPUs can't exchange gradients",
            evidence=f"torch {facts.torch.version}, {len(facts.chosen)} GPUs chosen",
            fix="use Linux and a torch from pytorch.org or PyPI, which bring it; or one card, --cards 0,",
            severity="error",
        )
    ]


_NCCL_FOR = ((10, (2, 25)), (9, (2, 15)))
"""Major compute capability -> the oldest NCCL that knows such cards; the newest first."""


def _other_nccl(facts: Facts) -> list[Finding]:
    loaded, packaged = facts.torch.nccl, facts.torch.nccl_packaged
    if loaded is None:
        return []
    findings = []
    if packaged is not None and _numbers(loaded) != _numbers(packaged):
        findings.append(
            Finding(
                cause="another NCCL is loaded than the one that torch was built with",
                evidence=f"loaded: {loaded}; installed with torch: {packaged}"
                + (
                    f"; LD_LIBRARY_PATH or LD_PRELOAD has {', '.join(facts.surroundings.shadowing)}"
                    if any("nccl" in path for path in facts.surroundings.shadowing)
                    else ""
                ),
                fix="take the other libnccl.so out of LD_LIBRARY_PATH and LD_PRELOAD, or reinstall torch",
                severity="warning",
            )
        )
    newest = max((info.capability[0] for _, info in facts.chosen if info.capability), default=0)
    needed = next((version for major, version in _NCCL_FOR if newest >= major), None)
    if needed is not None and len(facts.chosen) > 1 and _numbers(loaded) < needed:
        findings.append(
            Finding(
                cause="NCCL is older than these cards and doesn't know them",
                evidence=f"NCCL {loaded}; cards of compute capability {newest}.x need {_dotted(needed)} or newer",
                fix="install a newer torch, which brings its NCCL, or the package nvidia-nccl-cu* of a newer version",
                severity="error",
            )
        )
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:3])


def _shadowed(facts: Facts) -> list[Finding]:
    paths = [path for path in facts.surroundings.shadowing if "nccl" not in path.rsplit("/", 1)[-1]]
    if not paths or facts.torch.cuda is None:
        return []
    return [
        Finding(
            cause="libraries outside torch's own stand in for those it was built with",
            evidence=f"LD_LIBRARY_PATH or LD_PRELOAD has {', '.join(paths[:3])}",
            fix="take those folders out of LD_LIBRARY_PATH: torch's packages bring CUDA's libraries with them",
            severity="note",
        )
    ]


def _list_cards(facts: Facts) -> str:
    return ", ".join(f"card {info.index}: {info.name}" for info in facts.machine.cards)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
