"""A loss that shards can't make exact stops the first step in words; what is exact trains.

Report kinds: loss-averaging, dp-contrastive, unwrapped-params (class weights in the loss).
"""

from __future__ import annotations

import pytest
import torch

import manycard as mc

from .cases import mse
from .conftest import Get
from .models import Dropped
from .test_equivalence import ON

MANY = [(strategy, cards) for strategy, cards in ON if cards > 1]


@pytest.mark.parametrize(("strategy", "cards"), MANY)
@pytest.mark.parametrize("loss", ["sum", "class_weighted", "contrastive"])
def test_a_loss_that_is_no_mean_over_samples_is_refused_before_it_trains(
    get: Get, strategy: str, cards: int, loss: str
) -> None:
    for result in get(strategy, cards, f"loss/{loss}"):
        assert "Fix:" in result["error"]
        assert "(sum, count)" in result["error"]
        assert not result["trained"]


@pytest.mark.parametrize(("strategy", "cards"), ON)
@pytest.mark.parametrize("loss", ["mean", "class_weighted_pair"])
def test_a_mean_and_a_sum_with_its_count_pass(get: Get, strategy: str, cards: int, loss: str) -> None:
    for result in get(strategy, cards, f"loss/{loss}"):
        assert result["error"] == ""
        assert result["trained"]


@pytest.mark.parametrize(("strategy", "cards"), ON)
def test_a_loss_that_is_no_number_is_refused(get: Get, strategy: str, cards: int) -> None:
    for result in get(strategy, cards, "loss/vector"):
        assert "Fix:" in result["error"]
        assert not result["trained"]


@pytest.mark.parametrize(("strategy", "cards"), MANY)
@pytest.mark.parametrize("loss", ["sum", "vector"])
def test_a_right_loss_trains_after_the_refusal(get: Get, strategy: str, cards: int, loss: str) -> None:
    (alone,) = get("single", 1, "loss/vector")
    for result in get(strategy, cards, f"loss/{loss}"):
        assert result["after"] == pytest.approx(alone["after"], rel=1e-9)


@pytest.mark.parametrize(("strategy", "cards"), ON)
def test_the_check_disturbs_no_draws_and_no_statistics(get: Get, strategy: str, cards: int) -> None:
    """Dropout would make the compared losses differ; the check must neither stop there nor use up draws."""
    for (checked, checked_state), (plain, plain_state) in get(strategy, cards, "check_disturbs_nothing"):
        assert checked == plain
        assert all(torch.equal(checked_state[name], tensor) for name, tensor in plain_state.items())


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_never_taken_for_a_wrong_loss(seed: int) -> None:
    """Functional dropout draws in every computation of the loss, so nothing can be told and nothing is said."""
    torch.manual_seed(seed)
    module = Dropped()
    parallel = mc.Parallel("dp", cards="cpu:2")
    model, optimizer = parallel.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x = torch.randn(4, 6)
    parallel.train_step(mse, model, optimizer)((x, x[:, :3]))
    parallel.close()
