"""Which NCCL settings are worth trying on these cards.

One variable (or one pair that belongs together) a candidate; the sweep combines the best. A variable that is set in
the environment or a file of NCCL's is its owner's word and is tried with nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.nccl_variables import nccl_settings

__all__ = ["candidates_for"]

_ALWAYS: tuple[Mapping[str, str], ...] = (
    {"NCCL_ALGO": "Ring"},
    {"NCCL_ALGO": "Tree"},
    {"NCCL_PROTO": "Simple"},
    {"NCCL_PROTO": "LL128"},
    {"NCCL_MIN_NCHANNELS": "8"},
    {"NCCL_MIN_NCHANNELS": "16"},
    {"NCCL_MIN_NCHANNELS": "32"},
    {"NCCL_MAX_NCHANNELS": "4"},
    {"NCCL_MAX_NCHANNELS": "8"},
    {"NCCL_NTHREADS": "512"},
    {"NCCL_BUFFSIZE": str(8 << 20)},
    {"NCCL_BUFFSIZE": str(16 << 20)},
)
_NVSWITCH: tuple[Mapping[str, str], ...] = ({"NCCL_ALGO": "NVLS"}, {"NCCL_NVLS_ENABLE": "0"})
_PCIE: tuple[Mapping[str, str], ...] = (
    {"NCCL_P2P_LEVEL": "PXB"},
    {"NCCL_P2P_LEVEL": "PHB"},
    {"NCCL_P2P_LEVEL": "SYS"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_PROTO": "LL"},
)


def candidates_for(facts: Facts) -> list[Mapping[str, str]]:
    """Settings to compare with the default; none of a variable that the user has set."""
    between = [facts.links.between(info, other_info) for (_, info), (_, other_info) in combinations(facts.chosen, 2)]
    found = list(_ALWAYS)
    hopper = all((info.capability or (0, 0)) >= (9, 0) for _, info in facts.chosen)
    if between and all(link.nvlinks for link in between):
        found += _NVSWITCH if hopper and len(facts.chosen) > 2 else ()
    else:
        found += _PCIE
    taken = nccl_settings(facts)
    return [settings for settings in found if not settings.keys() & taken.keys()]
