"""Figures of data sheets, for cards that aren't here: ``--cards-model "8xH100 NVLink"``.

Behaviour:
    * Each figure has its source. Tensor-core rates are dense ones, links are one direction of one card.
    * What is derived from them is marked as stated. A step's time is the sum over its operators of the longer of
      arithmetic and memory traffic (the roofline of each), at the shares of the peaks that training reaches.
    * A model that isn't in the table, or words that say no cards, are refused with what can be written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from manycard.errors import SettingError
from manycard.planner.facts import CardFacts, LinkFacts

__all__ = ["CARD_MODELS", "CardModel", "Operator", "derived_ms", "parse_cards_model"]


@dataclass(frozen=True)
class CardModel:
    """What a maker states of one product."""

    name: str
    memory_gib: float
    half_tflops: float
    """bf16 (fp16 where there is no bf16) on tensor cores, dense, accumulated in fp32."""
    tf32_tflops: float
    """TF32 on tensor cores, dense; fp32 where there are none of those."""
    fp32_tflops: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float | None
    """All NVLinks of a card, one direction; None where it has none."""
    pcie_gb_per_s: float
    """Its PCIe slot, one direction."""
    pcie_p2p: bool
    """Whether the driver lets it read another card's memory over PCIe."""
    source: str


CARD_MODELS: tuple[CardModel, ...] = (
    CardModel("B200", 180, 2250, 1125, 75, 8000, 900, 64, True, "NVIDIA HGX B200 data sheet, 2025"),
    CardModel("H200", 141, 989, 494, 67, 4800, 450, 64, True, "NVIDIA H200 SXM data sheet, 2024"),
    CardModel("H100", 80, 989, 494, 67, 3350, 450, 64, True, "NVIDIA H100 SXM data sheet, 2023"),
    CardModel("H100 PCIe", 80, 756, 378, 51, 2000, None, 64, True, "NVIDIA H100 PCIe data sheet, 2023"),
    CardModel("A100", 80, 312, 156, 19.5, 2039, 300, 32, True, "NVIDIA A100 80GB SXM data sheet, 2021"),
    CardModel("A100 40GB", 40, 312, 156, 19.5, 1555, 300, 32, True, "NVIDIA A100 40GB SXM data sheet, 2020"),
    CardModel("L40S", 48, 362, 183, 91.6, 864, None, 32, True, "NVIDIA L40S data sheet, 2023"),
    CardModel("A10G", 24, 70, 35, 31.2, 600, None, 32, True, "AWS G5 and NVIDIA A10 data sheets, 2021"),
    CardModel("V100", 32, 125, 15.7, 15.7, 900, 150, 16, True, "NVIDIA V100 SXM2 32GB data sheet, 2018"),
    CardModel("T4", 16, 65, 8.1, 8.1, 320, None, 16, True, "NVIDIA T4 data sheet, 2018"),
    CardModel("RTX 4090", 24, 165, 82.6, 82.6, 1008, None, 32, False, "NVIDIA Ada architecture whitepaper, 2022"),
    CardModel("RTX 3090", 24, 71, 35.6, 35.6, 936, None, 32, False, "NVIDIA GA102 architecture whitepaper, 2020"),
)

_LINKS = ("NVLink", "PCIe", "host")
_WRITTEN = re.compile(r"(?:(\d{1,4})\s*x\s*)?(?:NVIDIA\s+)?(.+?)(?:[\s,]+(NVLink|PCIe|host))?", re.IGNORECASE)
_FREE_SHARE = 0.97
"""What a CUDA context and the driver leave of a card's memory."""
_HALF_BYTES = 0.6
"""What operators move in half precision over fp32: weights and some of the operators stay in fp32."""
_ARITHMETIC_SHARE = 0.5
"""Of the stated arithmetic, what matrix products and convolutions of training reach."""
_TRAFFIC_SHARE = 0.75
_KERNEL_MS = 0.002
"""The shortest that an operator takes on a card."""

Operator = tuple[float, float]
"""Floating-point operations, and bytes read and written in fp32, of one operator."""


def parse_cards_model(text: str) -> tuple[tuple[CardFacts, ...], LinkFacts, CardModel]:
    """Read ``8xH100 NVLink``: how many, which model, how they are joined.

    Raises:
        SettingError: it names no cards that are known here.

    Example:
        >>> cards, links, model = parse_cards_model("8xH100 NVLink")
        >>> len(cards), links.kind, model.memory_gib
        (8, 'NVLink', 80)
    """
    known = ", ".join(model.name for model in CARD_MODELS)
    written = _WRITTEN.fullmatch(text.strip())
    if written is None:
        raise SettingError("--cards-model", text, "it names no cards", fix='write it like "8xH100 NVLink"')
    count, link = int(written[1] or 1), written[3]
    model = _find_model(f"{written[2]} {link or ''}")  # "H100 PCIe" is a product, and no H100 on a slot
    if model is None:
        model = _find_model(written[2])
    if model is None:
        raise SettingError(
            "--cards-model", text, f"there are no figures for {written[2]!r}", fix=f"name one of {known}"
        )
    if count < 1:
        raise SettingError("--cards-model", text, "there must be at least one card", fix='write it like "2xH100"')
    kind = next((each for each in _LINKS if link and each.lower() == link.lower()), None)
    kind = kind or ("NVLink" if model.nvlink_gb_per_s else "PCIe")
    if kind == "NVLink" and model.nvlink_gb_per_s is None:
        raise SettingError("--cards-model", text, f"{model.name} has no NVLink", fix="write PCIe, or leave it out")
    facts = CardFacts(model.name, memory_mib=_FREE_SHARE * model.memory_gib * 1024)
    return (facts,) * count, _links(model, kind), model


def _find_model(words: str) -> CardModel | None:
    name = " ".join(words.upper().split())
    return next((each for each in CARD_MODELS if each.name.upper() == name), None)


def _links(model: CardModel, kind: str) -> LinkFacts:
    if kind == "NVLink":
        return LinkFacts(kind, True, copy_gb_per_s=model.nvlink_gb_per_s, stated=True)
    p2p = kind == "PCIe" and model.pcie_p2p
    # Through the host each byte passes its memory twice.
    return LinkFacts(kind, p2p, copy_gb_per_s=(0.8 if p2p else 0.4) * model.pcie_gb_per_s, stated=True)


def derived_ms(operators: Sequence[Operator], model: CardModel, precision: str) -> float:
    """What a step of these operators takes on a card of this model, in milliseconds.

    Args:
        precision: ``bf16``, ``fp16``, ``tf32``, ``fp32`` or ``default``, which is fp32 here.
    """
    half = precision in ("bf16", "fp16")
    rate = model.half_tflops if half else model.tf32_tflops if precision == "tf32" else model.fp32_tflops
    bytes_share = _HALF_BYTES if half else 1.0
    total = 0.0
    for operations, moved in operators:
        arithmetic = operations / (_ARITHMETIC_SHARE * rate * 1e9)
        traffic = bytes_share * moved / (_TRAFFIC_SHARE * model.memory_gb_per_s * 1e6)
        total += max(arithmetic, traffic, _KERNEL_MS)
    return total
