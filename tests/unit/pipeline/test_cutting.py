"""Sizes of micro-batches."""

from __future__ import annotations

import pytest
from torch import nn

from manycard.pipeline.cutting import least_samples, micro_batch_sizes


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_sample_is_in_one_micro_batch_and_sizes_are_even(replicas: int, micro_batches: int, least: int) -> None:
    for samples in range(1, 40):
        sizes = micro_batch_sizes(samples, replicas, micro_batches, least)
        assert sum(map(sum, sizes)) == samples
        assert 1 <= len(sizes) <= replicas
        for own in sizes:
            assert len(own) <= micro_batches
            assert max(own) - min(own) <= 1
            assert min(own) >= min(least, samples)
        if samples >= replicas * micro_batches * least:
            assert [len(own) for own in sizes] == [micro_batches] * replicas


def test_only_batchnorm_that_takes_statistics_of_the_batch_needs_two_samples() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    assert least_samples(model) == 2
    assert least_samples(model.eval()) == 1
    assert least_samples(nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)).eval()) == 2
    assert least_samples(nn.Sequential(nn.LayerNorm(3), nn.InstanceNorm1d(3))) == 1
