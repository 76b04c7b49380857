"""Stand-ins of parameters: their memory, nodes of their own, and gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manycard.engine.recording.stand_ins import StandIns


def gatherer(parameter: Tensor) -> Any:
    """The node in which a parameter's gradient is gathered."""
    node = (parameter * 1).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def test_a_stand_in_has_the_memory_but_not_the_node_of_its_parameter() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 3), nn.Linear(3, 3).requires_grad_(False))
    module[0].bias = module[1].bias_hh_l0 = nn.Parameter(torch.randn(9)[:3])  # tied, though of no use
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    held = [gatherer(parameter) for parameter in parameters]
    module[1]._init_flat_weights()  # as its next forward pass would, to take note of its new bias
    lists = module[1]._flat_weights, module[1]._flat_weight_refs
    stand_ins = StandIns(module)
    own = stand_ins.of(parameters)
    with stand_ins.inside():
        assert [id(each) for each in module.parameters() if each.requires_grad] == [id(each) for each in own]
        assert module[0].bias is module[1].bias_hh_l0
        assert module[1].weight_hh_l0 is module[1]._flat_weights[1]
        assert not module[1]._weights_have_changed()  # or it would move them to other memory
        for each, parameter, node in zip(own, parameters, held, strict=True):
            assert each.data_ptr() == parameter.data_ptr()
            assert gatherer(each) is not node
    assert [id(each) for each in module.parameters() if each.requires_grad] == [id(each) for each in parameters]
    assert [gatherer(parameter) for parameter in parameters] == held
    assert module[1]._flat_weights is lists[0]
    assert module[1]._flat_weight_refs is lists[1]
    assert not module[1]._weights_have_changed()


def test_the_module_has_its_own_parameters_again_after_an_error() -> None:
    module = nn.Linear(3, 3)
    weight = module.weight
    stand_ins = StandIns(module)

    def fail() -> None:
        with stand_ins.inside():
            assert module.weight is not weight
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert module.weight is weight
