"""Spreading in a live session."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manycard as mc
from manycard.errors import SettingError
from manycard.script.loaders import FedLoaders


def test_a_session_spreads_until_it_stops() -> None:
    with mc.spread("cpu:2") as spreading:
        model = nn.Linear(4, 2)
        model(torch.randn(6, 4)).sum().backward()
        assert "Linear was spread in 1 of 1 call" in spreading.describe()
    gradient = model.weight.grad
    model(torch.randn(6, 4))
    assert "1 of 1 call" in spreading.describe()
    assert gradient is not None
    spreading.stop()  # once more does nothing


def test_two_at_once_and_loss_scaling_are_refused() -> None:
    with mc.spread("cpu:2"), pytest.raises(SettingError, match="already"):
        mc.spread("cpu:2")
    with pytest.raises(SettingError, match="loss scaling"):
        mc.spread("cpu:2", precision="fp16")


def test_an_interrupted_cell_leaves_the_session_usable() -> None:
    class Interrupted(nn.Linear):
        interrupted = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    torch.manual_seed(0)
    with mc.spread("cpu:2"):
        model, x = Interrupted(4, 2), torch.randn(6, 4)
        model(x)
        model.interrupted = True
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.interrupted = False
        assert torch.allclose(model(x), x @ model.weight.T + model.bias)


def test_the_notebook_extension() -> None:
    call = nn.Module.__call__
    mc.load_ipython_extension(None)
    mc.load_ipython_extension(None)
    assert nn.Module.__call__ is not call
    mc.unload_ipython_extension(None)
    assert nn.Module.__call__ is call


def test_loaders_without_workers_get_some_and_keep_their_order() -> None:
    data = TensorDataset(torch.arange(20))

    def order() -> list[int]:
        torch.manual_seed(3)
        loader = DataLoader(data, batch_size=4, shuffle=True)
        return [int(value) for (batch,) in loader for value in batch]

    plain = order()
    with FedLoaders(pin_memory=False) as loaders:
        loaders.workers = 2
        assert order() == plain
        assert loaders.fed == 1
        assert DataLoader(data, num_workers=1).num_workers == 1
        assert loaders.fed == 1
    assert DataLoader(data).num_workers == 0
