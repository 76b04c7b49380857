"""Settings that a strategy from the command line has no use for: left out in words; by the script's word a mistake."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import manycard as mc
from manycard.errors import SettingError
from manycard.parallel.settings import batch_settings, reduce_dtype_for, sharding_for


@pytest.mark.parametrize("strategy", ["ddp", "torch_dp"])
def test_sharing_state_out_is_left_out(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sharding_for(strategy, "dp", True) is False
    assert sharding_for(strategy, strategy, False) is False
    assert capsys.readouterr().err == f"manycard: strategy {strategy!r} leaves the script's shard_optimizer= out\n"
    with pytest.raises(SettingError, match=f"shard_optimizer=True: strategy {strategy!r} does not share"):
        sharding_for(strategy, strategy, True)
    assert sharding_for("dp", strategy, True) is True


def test_the_dtype_of_sums_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert reduce_dtype_for("torch_dp", "ddp", "bf16") is None
    assert capsys.readouterr().err == "manycard: strategy 'torch_dp' leaves the script's reduce_dtype= out\n"
    with pytest.raises(SettingError, match="reduce_dtype='fp8'"):
        reduce_dtype_for("torch_dp", "ddp", "fp8")
    with pytest.raises(SettingError, match="strategy 'torch_dp' sums"):
        reduce_dtype_for("torch_dp", "torch_dp", "bf16")


def test_parts_of_a_batch_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert batch_settings("manual", "dp", 2, 4, sync_batchnorm=False) == (2, None)
    assert capsys.readouterr().err == "manycard: strategy 'manual' leaves the script's per_card_batch= out\n"
    with pytest.raises(SettingError, match="per_card_batch=4"):
        batch_settings("manual", "manual", 2, 4, sync_batchnorm=False)


def test_a_run_goes_on_with_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCARD_STRATEGY", "manual")
    trained = []
    for settings in ({"per_card_batch": 2}, {}):
        torch.manual_seed(0)
        parallel = mc.Parallel("dp", cards="cpu:2", **settings)  # type: ignore[arg-type]
        model = nn.Linear(4, 1)
        model, optimizer = parallel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = parallel.train_step(lambda m, batch: m(batch).square().mean(), model, optimizer)
        trained.append([float(step(torch.randn(8, 4))) for _ in range(3)])
        parallel.close()
    assert trained[0] == trained[1]
    assert capsys.readouterr().err.count("leaves the script's per_card_batch= out") == 1
