"""Probe: what do the NCCL variables that are set do, and do they help here?

Each variable that is set is in one finding at most: what it does here where that is known, else what it does. Names
that NCCL doesn't read, and values that it can't, are findings of their own. Interface names are `interfaces`'s.
"""

from __future__ import annotations

import difflib
import re
from itertools import combinations

from manycard.cards import Link
from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding
from manycard.diagnosis.nccl_variables import HARMLESS, KNOWN, MEANINGS, NUMBERS, Setting, nccl_settings

__all__ = ["probe"]

_OWN_PROBE = frozenset({"NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME"})
_OF_TORCH = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
}
_TIMEOUTS = frozenset({"NCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "NCCL_TIMEOUT_MS", "NCCL_COMM_TIMEOUT", "DDP_TIMEOUT"})
_LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "NODE", "SYS")
_ALIKE = 0.8


def probe(facts: Facts) -> list[Finding]:
    """Find what is set for NCCL and hurts, does nothing, or is worth knowing."""
    findings = [_no_timeout(name, facts.environment[name]) for name in sorted(_TIMEOUTS & facts.environment.keys())]
    for name, setting in nccl_settings(facts).items():
        if name in _OWN_PROBE | _TIMEOUTS | HARMLESS:
            continue
        finding = (
            _misspelt(name, setting)
            or _no_number(name, setting)
            or _judge(facts, name, setting)
            or _told(name, setting)
        )
        findings += [finding] if finding else []
    return findings


def _no_timeout(name: str, value: str) -> Finding:
    return Finding(
        cause=f"{name} sets no time limit: nothing reads it",
        evidence=f"{name}={value}",
        fix="init_process_group(timeout=timedelta(minutes=60)) sets it; mc.Parallel(strategy='ddp') makes the group "
        "by itself. Better: don't let one rank work alone for so long",
        severity="warning",
    )


def _misspelt(name: str, setting: Setting) -> Finding | None:
    if name in _OF_TORCH:
        return Finding(
            cause=f"{name} is a variable of torch's whose name has changed",
            evidence=f"{name}={setting}",
            fix=f"write {_OF_TORCH[name]}, or drop it: waiting without a limit is not torch's default any more",
            severity="note",
        )
    if name in KNOWN:
        return None
    close = difflib.get_close_matches(name, sorted(KNOWN), n=1, cutoff=_ALIKE)
    if not close:
        return None
    return Finding(
        cause=f"{name} is no variable that NCCL reads",
        evidence=f"{name}={setting}; the closest that it reads is {close[0]}",
        fix=f"write {close[0]}",
        severity="warning",
    )


def _no_number(name: str, setting: Setting) -> Finding | None:
    if name not in NUMBERS or re.fullmatch(r"-?[0-9]+", setting.value.strip()):
        return None
    return Finding(
        cause=f"{name} holds no whole number, so NCCL takes its default",
        evidence=f"{name}={setting}",
        fix=f"write a number ({MEANINGS[name]}), such as {name}=1, or unset it",
        severity="warning",
    )


def _judge(facts: Facts, name: str, setting: Setting) -> Finding | None:
    value = setting.value.strip()
    set_to = f"{name}={setting}"
    if name == "NCCL_P2P_DISABLE" and value != "0":
        return _p2p_off(facts, set_to)
    if name == "NCCL_P2P_LEVEL":
        return _p2p_level(facts, value, set_to)
    if name == "NCCL_SHM_DISABLE" and value != "0":
        return _warn(
            "NCCL may not use shared memory, so cards without P2P talk over the network within one machine",
            set_to,
            "unset NCCL_SHM_DISABLE; where /dev/shm is too small, start the container with --ipc=host",
        )
    if name == "NCCL_IB_DISABLE" and value != "0" and facts.surroundings.infiniband:
        there = ", ".join(facts.surroundings.infiniband)
        return Finding(
            "InfiniBand is switched off though it is there; between machines NCCL then talks over TCP",
            f"{set_to}; active: {there}",
            "unset NCCL_IB_DISABLE before you use several machines; within one machine it makes no difference",
            "note",
        )
    if name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        return Finding(
            "NCCL prints what it does, from every rank",
            set_to,
            "unset NCCL_DEBUG, or set NCCL_DEBUG=WARN, when you are done looking",
            "note",
        )
    return _judge_speed(facts, name, value, set_to)


def _judge_speed(facts: Facts, name: str, value: str, set_to: str) -> Finding | None:
    over_nvlink = any(link.nvlinks for *_, link in _pairs(facts))
    if name in ("NCCL_PROTO", "NCCL_ALGO") and not value.startswith("^") and "," not in value:
        return _warn(
            f"{name} forces one choice for every size, and what is best for small sizes is slow for large ones",
            set_to,
            f"unset {name}, or let manycard doctor --deep measure whether it helps here",
        )
    if name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS") and over_nvlink and int(value) < 8:
        return _warn(
            "NCCL may use too few blocks of a card to fill its NVLinks",
            set_to,
            f"unset {name}, or let manycard doctor --deep measure it",
        )
    if name == "NCCL_NVLS_ENABLE" and value == "0" and over_nvlink and len(facts.chosen) > 2:
        return Finding(
            "sums in the NVSwitches (NVLS) are switched off; they speed up large all-reduces of several cards",
            set_to,
            "unset NCCL_NVLS_ENABLE, unless NCCL fails to start with it (as in a virtual machine without multicast)",
            "note",
        )
    if name == "NCCL_CHECK_POINTERS" and value == "1":
        return _warn("NCCL checks every pointer of every call, which costs time", set_to, f"unset {name}")
    if name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE"):
        return _warn(
            "NCCL is told the machine's topology by a file instead of looking; a file of another machine is slow",
            set_to,
            f"unset {name}, unless the provider of this virtual machine says that it is needed",
        )
    return None


def _p2p_off(facts: Facts, set_to: str) -> Finding:
    works = [f"{one}-{other}" for one, other, link in _pairs(facts) if link.p2p]
    if not works:
        return Finding(
            "NCCL may not use direct access between cards, which these cards don't have anyway",
            set_to,
            "leave it, or unset it: it makes no difference here",
            "note",
        )
    damaged = any(copy.wrong_bytes for copy in facts.measured.copies)
    if damaged:
        return Finding(
            "NCCL goes around direct access between cards, which is damaged here; copies of a script's own don't",
            set_to,
            "keep it until copies arrive right (see above)",
            "note",
        )
    return _warn(
        "direct access between cards (P2P) is switched off though the driver has it: every all-reduce goes through "
        "the host's memory",
        f"{set_to}; P2P works on {', '.join(works[:4])}",
        "unset NCCL_P2P_DISABLE",
    )


def _p2p_level(facts: Facts, value: str, set_to: str) -> Finding | None:
    word = value.upper()
    if word not in _LEVELS:
        if value.isdecimal():  # the old form, which NCCL still reads
            return None
        return _warn(
            "NCCL_P2P_LEVEL holds no level, so NCCL takes its default",
            set_to,
            f"write one of {', '.join(level for level in _LEVELS if level != 'NODE')}, or unset it",
        )
    shut_out = [
        f"{one}-{other} ({link.kind})"
        for one, other, link in _pairs(facts)
        if link.p2p and _distance(link.kind) > _LEVELS.index(word)
    ]
    if not shut_out:
        return None
    return _warn(
        "NCCL_P2P_LEVEL keeps pairs of cards from reaching each other directly though the driver has P2P for them",
        f"{set_to}; shut out: {', '.join(shut_out[:4])}",
        "unset it, or let manycard doctor --deep measure which level is best",
    )


def _distance(kind: str) -> int:
    if kind.startswith("NV"):
        return _LEVELS.index("NVL")
    return {"BOARD": 2}.get(kind, _LEVELS.index(kind) if kind in _LEVELS else 0)


def _pairs(facts: Facts) -> list[tuple[str, str, Link]]:
    return [
        (one, other, facts.links.between(info, other_info))
        for (one, info), (other, other_info) in combinations(facts.chosen, 2)
    ]


def _told(name: str, setting: Setting) -> Finding | None:
    what = MEANINGS.get(name)
    if what is None:
        return None
    return Finding(
        cause=f"{name} is set: it {what}" if not what[0].isdecimal() else f"{name} is set: {what}",
        evidence=f"{name}={setting}",
        fix="unset it unless you have measured that it helps here; manycard doctor --deep compares settings",
        severity="note",
    )


def _warn(cause: str, evidence: str, fix: str) -> Finding:
    return Finding(cause, evidence, fix, "warning")
