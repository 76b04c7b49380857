"""bf16 and fp16 learn, clip gradients of their true size, and skip an overflow on every card alike.

Report kinds: clip-unscale (clipping the scaled gradients makes updates tiny), skip-step-desync, sched-scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import manycard as mc

from .conftest import Get
from .runs import RUNS


@pytest.fixture(autouse=True)
def tf32_flags() -> Iterator[None]:
    """fp32 and tf32 set flags of the whole process; put them back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


ON = [("single", 1), ("dp", 1), ("dp", 3), ("ddp", 1), ("ddp", 3)]


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("mode", ["step", "loop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_converges(get: Get, strategy: str, cards: int, precision: str, mode: str) -> None:
    for result in get(strategy, cards, f"converge/{precision}/{mode}"):
        losses = result["losses"]
        assert sum(losses[-3:]) < 0.2 * sum(losses[:3])
        assert result["dtypes"] == {"torch.float32"}, "the parameters stay fp32 masters"


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("mode", ["step", "loop"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_clips_unscaled_gradients(get: Get, strategy: str, cards: int, precision: str, mode: str) -> None:
    for length in get(strategy, cards, f"clipped/{precision}/0.05/{mode}"):
        assert length == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("mode", ["step", "loop"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_leaves_gradients_below_the_limit_as_they_are(
    get: Get, tmp_path: Path, strategy: str, cards: int, precision: str, mode: str
) -> None:
    plain = RUNS["clipped/fp32/1000.0/step"](partial(mc.Parallel, "single", cards="cpu:1"), tmp_path)
    assert plain > 0.1
    for length in get(strategy, cards, f"clipped/{precision}/1000.0/{mode}"):
        assert length == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_on_one_card_skips_the_update_and_the_schedule_everywhere(
    get: Get, strategy: str, cards: int, accumulate: int
) -> None:
    for result in get(strategy, cards, f"overflow/{accumulate}"):
        ends = [update for update in (True, True, False, True, True) for _ in range(accumulate)]
        wanted = [good and (index + 1) % accumulate == 0 for index, good in enumerate(ends)]
        assert result["updated"] == wanted
        assert result["changed"] == wanted
        assert result["optimizer steps"] == {4}
        assert result["rates"][-1] == pytest.approx(1e-2 * 0.5**4)
        assert result["scales"][-1] == result["scales"][0] / 2
        assert result["finite"]


@pytest.mark.parametrize(("strategy", "cards"), [("dp", 2), ("dp", 3), ("ddp", 3)])
def test_gradients_summed_in_bf16_are_rounded_and_no_worse(get: Get, strategy: str, cards: int) -> None:
    whole = get(strategy, cards, "summed in None")[0]
    for rounded in get(strategy, cards, "summed in bf16"):
        apart = ((rounded - whole).norm() / whole.norm()).item()
        assert 1e-5 < apart < 2**-7, "bf16 keeps 8 bits"


def test_one_card_sums_nothing(get: Get) -> None:
    assert torch.equal(get("dp", 1, "summed in bf16")[0], get("dp", 1, "summed in None")[0])


@pytest.mark.parametrize(("strategy", "dtype"), [("dp", "fp8"), ("torch_dp", "bf16")])
def test_other_sums_are_refused(strategy: str, dtype: str) -> None:
    with pytest.raises(mc.errors.SettingError, match="reduce_dtype"):
        mc.Parallel(strategy, cards="cpu:2", reduce_dtype=dtype)
