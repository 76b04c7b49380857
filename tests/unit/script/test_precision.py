"""The precision of an unmodified script's calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from manycard.cards import choose_cards
from manycard.errors import SettingError
from manycard.script import Interception, ScriptSpreading, SpreadSettings
from manycard.script.precision import call_context, refuse_unscaled


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    """Put back what a precision sets."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _called(precision: str, module: nn.Module, x: Tensor) -> Tensor:
    cards = choose_cards("cpu:2").cards
    spreading = ScriptSpreading(SpreadSettings(choose=lambda: cards, autocast=call_context(precision)))
    try:
        with Interception(spreading):
            value: Tensor = module(x)
        return value
    finally:
        spreading.close()


def test_the_default_has_no_context() -> None:
    assert call_context(None) is None
    assert call_context("default") is None


def test_fp16_is_refused_at_the_first_call() -> None:
    with pytest.raises(SettingError, match=r"--precision='fp16': it needs loss scaling.*Fix: use bf16"):
        _called("fp16", nn.Linear(4, 2), torch.randn(6, 4))
    with pytest.raises(SettingError, match="precision='fp16'"):
        refuse_unscaled("fp16", "precision")
    refuse_unscaled("bf16", "precision")


def test_bf16_gives_fp32_outputs_of_bf16_products() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(64, 64), torch.randn(6, 64)
    found, exact = _called("bf16", module, x), module(x)
    assert found.dtype == torch.float32
    assert 1e-4 < float((found - exact).detach().abs().max()) < 0.1


def test_a_script_in_double_precision_stays_in_it() -> None:
    module = nn.Linear(4, 2).double()
    assert _called("fp32", module, torch.randn(6, 4).double()).dtype == torch.float64


def test_flags_are_those_of_the_precision() -> None:
    for precision, allowed in (("tf32", True), ("fp32", False)):
        _called(precision, nn.Linear(4, 2), torch.randn(6, 4))
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (allowed, allowed)
