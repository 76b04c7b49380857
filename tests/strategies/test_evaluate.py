"""Loaders hand out each sample once an epoch and `evaluate` counts each once, however the sizes fall.

Report kinds: eval-padding, eval-dup, uneven-inputs (ranks with unequal batches), tiny-dataset (a rank without data).
"""

from __future__ import annotations

import pytest

from .conftest import Get
from .test_equivalence import ON

SIZES = [(24, 8), (25, 8), (7, 3), (3, 8), (2, 1), (1, 4)]


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
def test_metrics_use_every_sample_exactly_once(
    get: Get, strategy: str, cards: int, samples: int, batch_size: int, shuffle: bool
) -> None:
    ids = range(1, samples + 1)
    expected = {
        "mean": sum(ids) / samples,
        "square": sum(i * i for i in ids) / samples,
        "samples": float(samples),  # `samples` counted / times that sample 1 was seen
    }
    for result in get(strategy, cards, f"evaluate/{samples}/{batch_size}/{shuffle}"):
        for metrics in result["metrics"]:
            assert metrics == pytest.approx(expected, rel=1e-12)
            assert all(type(value) is float for value in metrics.values())
        assert result["modes"] == (True, True, False), "evaluation leaves each module's mode as it was"


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
def test_an_epoch_has_every_sample_once_in_global_batches(
    get: Get, strategy: str, cards: int, samples: int, batch_size: int, drop_last: bool
) -> None:
    full, rest = divmod(samples, batch_size)
    sizes = [batch_size] * full + ([rest] if rest and not drop_last else [])
    (alone,) = get("single", 1, f"loaded/{samples}/{batch_size}/{drop_last}")
    for result in get(strategy, cards, f"loaded/{samples}/{batch_size}/{drop_last}"):
        first, second, length = result
        assert length == len(sizes)
        for epoch in (first, second):
            assert [len(batch) for batch in epoch] == sizes
            used = [sample for batch in epoch for sample in batch]
            assert len(set(used)) == len(used)
            assert drop_last or sorted(used) == list(range(samples))
        assert result == alone, "the same seed gives the same global batches under every strategy"
    if samples == 25:
        assert first != second, "each epoch has an order of its own"
