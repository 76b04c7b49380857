"""A rank decodes on its own card, one process for all cards on all of them."""

from __future__ import annotations

import pytest
import torch

import manycard as mc
from manycard.data.image_files.places import own_devices

GPUS = [torch.device("cuda", index) for index in (0, 2)]


def test_one_process_has_all_cards() -> None:
    assert own_devices([0, 2]) == GPUS
    assert own_devices([mc.Card(0, GPUS[0]), mc.Card(1, GPUS[1])]) == GPUS
    assert own_devices(mc.choose_cards("cpu:2").cards) == [torch.device("cpu")] * 2
    assert own_devices(None) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert own_devices([mc.Card(0, GPUS[0]), mc.Card(1, GPUS[1])]) == [GPUS[rank]]
    assert own_devices([2]) == [GPUS[1]]
