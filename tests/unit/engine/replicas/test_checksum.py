"""Checksums: any difference shows, wherever it is; equal tensors are equal however they lie in memory."""

from __future__ import annotations

import pytest
import torch

from manycard.engine.replicas.checksum import checksums, nonfinite

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    return (drawn * 10).to(dtype) if dtype is not torch.bool else drawn > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_shows_in_its_tensor_alone(dtype: torch.dtype) -> None:
    tensors = [make(dtype, 7), make(dtype, 5, 3), make(dtype, 4)]
    before = checksums(tensors)
    torch.view_as_real(tensors[1])[2, 1, 0].neg_() if dtype.is_complex else tensors[1][2, 1].copy_(
        ~tensors[1][2, 1] if dtype is torch.bool else tensors[1][2, 1] + 1
    )
    assert (checksums(tensors) != before).tolist() == [False, True, False]


def test_the_last_bit_the_sign_of_zero_and_places_count() -> None:
    x = torch.zeros(10)
    for other in (torch.tensor([-0.0] + [0.0] * 9), torch.tensor([1.4e-45] + [0.0] * 9)):
        assert checksums([x]) != checksums([other])
    swapped = torch.arange(10.0)
    swapped[[3, 7]] = swapped[[7, 3]]
    assert checksums([swapped]) != checksums([torch.arange(10.0)])
    second_difference = torch.zeros(10, dtype=torch.int64)
    second_difference[4:7] = torch.tensor([1, -2, 1])
    assert checksums([second_difference]) != checksums([torch.zeros(10, dtype=torch.int64)])


def test_nan_is_equal_to_itself_bit_for_bit() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert checksums([x]) == checksums([x.clone()])


def test_tensors_of_several_chunks() -> None:
    large = torch.zeros(3 * 2**20 + 5, dtype=torch.uint8)
    seen = set()
    for place in (0, 2**20, 2 * 2**20, 3 * 2**20 + 4):  # the same place of each chunk
        one = large.clone()
        one[place] = 1
        seen.add(int(checksums([torch.zeros(3), one])[1]))
    assert len(seen) == 4


def test_layout_does_not_count() -> None:
    x = torch.randn(6, 4)
    assert checksums([x]) == checksums([x.t().contiguous().t()])
    sparse = torch.eye(3).to_sparse()
    assert checksums([sparse]) == checksums([sparse.clone()])


def test_nothing_and_the_empty() -> None:
    assert checksums([]).tolist() == []
    assert checksums([torch.zeros(0), torch.ones(2)])[0] == 0


def test_what_is_not_finite_is_found() -> None:
    tensors = [torch.ones(3), torch.tensor([1.0, float("inf")]), torch.tensor([1]), torch.tensor([float("nan")])]
    assert nonfinite([*tensors, torch.zeros(0)]).tolist() == [False, True, False, True, False]
