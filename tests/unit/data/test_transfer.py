"""Batches sent to the card ahead: handed out in order, each with what the feed says of it, none counted too soon."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from manycard.data import Feed, GlobalLoader, loader
from manycard.data.transfer import Transfer, make_transfer, sent_ahead

from .datasets import Numbers, walk


class Noted(Transfer):
    """Notes what is sent and received, and when."""

    ahead = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self.said: list[tuple[str, int]] = []

    def send(self, batch: Any) -> Any:
        self.said.append(("sent", int(batch[0])))
        return ("on its way", batch)

    def receive(self, sent: Any) -> Any:
        self.said.append(("received", int(sent[1][0])))
        return sent[1]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What the loaders of this test send batches by."""
    transfer = Noted()
    monkeypatch.setattr(loader, "make_transfer", lambda device: transfer)
    return transfer


def test_the_next_batch_is_sent_before_one_is_handed_out(noted: Noted) -> None:
    made = GlobalLoader(Numbers(8), 3, num_workers=1, feed=Feed())
    handed = walk(made)
    assert [batch for batch, _ in handed] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [(info.held, info.last) for _, info in handed] == [(3, False), (3, False), (2, True)]
    assert noted.said == [
        ("sent", 0),
        ("sent", 3),
        ("received", 0),
        ("sent", 6),
        ("received", 3),
        ("received", 6),
    ]


def test_loading_in_the_scripts_own_process_waits_until_it_is_asked(noted: Noted) -> None:
    walk(GlobalLoader(Numbers(6), 3, feed=Feed()))
    assert noted.said == [("sent", 0), ("received", 0), ("sent", 3), ("received", 3)]


def test_a_batch_that_was_only_sent_is_not_used_yet(noted: Noted) -> None:
    made = GlobalLoader(Numbers(12), 3, num_workers=1, feed=Feed())
    walk(made, 2)
    state = made.state_dict()
    assert state["batches"] == 2
    restored = GlobalLoader(Numbers(12), 3, num_workers=1, feed=Feed())
    restored.load_state_dict(state)
    assert [batch for batch, _ in walk(restored)] == [[6, 7, 8], [9, 10, 11]]


def test_nothing_is_sent_ahead_to_simulated_cards() -> None:
    plain = make_transfer(torch.device("cpu"))
    assert not plain.ahead
    batch = torch.ones(2)
    assert plain.receive(plain.send(batch)) is batch
    assert make_transfer(None).send(batch) is batch


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_batch_comes_once(count: int) -> None:
    batches = [(torch.tensor([number]), number) for number in range(count)]
    assert [(int(batch), info) for batch, info in sent_ahead(batches, Noted())] == [(n, n) for n in range(count)]
