"""``--set``: names, values, and which strategies have rows for them."""

from __future__ import annotations

import pytest
import torch

from manycard.benchmark import MatrixSettings, read_axes
from manycard.benchmark.axes import combinations, compile_argument, ddp_options, environment_of
from manycard.benchmark.matrix import matrix_rows
from manycard.benchmark.training import fused
from manycard.cards import choose_cards
from manycard.errors import ManycardError, SettingError


@pytest.mark.parametrize(
    "text",
    ["precision", "precision=", "=bf16", "precision=fp7", "graphs=maybe", "accumulate=0", "accumulate=x", "nope=1"],
)
def test_what_cannot_work_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(SettingError) as caught:
        read_axes([text])
    assert caught.value.fix


def test_a_name_is_given_once_and_values_count_once() -> None:
    with pytest.raises(SettingError, match="twice"):
        read_axes(["graphs=on", "graphs=off"])
    assert read_axes(["graphs=on,on,off"]) == (("graphs", ("on", "off")),)


def test_a_script_decides_about_its_optimizer() -> None:
    with pytest.raises(SettingError, match="a script decides"):
        read_axes(["fused=on"], script=True)


def test_only_strategies_that_read_a_setting_have_rows_for_it() -> None:
    axes = read_axes(["precision=bf16,fp32", "static_graph=on,off", "graphs=on,off", "NCCL_ALGO=Ring"])
    assert len(combinations(axes, "single")) == 2
    assert len(combinations(axes, "dp")) == 4
    assert len(combinations(axes, "ddp")) == 4
    (first, *_) = combinations(axes, "ddp")
    assert first == (("precision", "bf16"), ("static_graph", True), ("NCCL_ALGO", "Ring"))
    assert ddp_options(first) == {"static_graph": True}
    assert environment_of(first) == {"NCCL_ALGO": "Ring"}
    assert compile_argument(read_one("compile=max-autotune")) == {"mode": "max-autotune"}
    assert compile_argument(read_one("compile=off")) is False


def read_one(text: str) -> tuple[tuple[str, object], ...]:
    return tuple((name, values[0]) for name, values in read_axes([text]))


def test_the_matrix_has_every_combination() -> None:
    settings = MatrixSettings(
        ("mlp", "resnet18-cifar"),
        choose_cards("cpu:2").cards,
        ("single", "ddp"),
        counts=(1, 2),
        axes=read_axes(["bucket_cap_mb=1,25", "channels_last=on,off"]),
    )
    rows = [(row.workload, row.strategy, len(row.card_names), dict(row.settings)) for row in matrix_rows(settings)]
    assert len([row for row in rows if row[0] == "mlp"]) == 1 + 2 * 2, "it has no images"
    assert len([row for row in rows if row[0] == "resnet18-cifar"]) == 2 + 2 * 4
    assert ("resnet18-cifar", "ddp", 2, {"bucket_cap_mb": 25, "channels_last": False}) in rows


def test_fused_keeps_every_other_setting_of_the_optimizer() -> None:
    layer = torch.nn.Linear(3, 2)
    for plain in (
        torch.optim.AdamW(layer.parameters(), lr=0.3, weight_decay=0.2, betas=(0.8, 0.9)),
        torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    ):
        made = fused(plain)
        assert made.defaults["fused"]
        for name in ("lr", "weight_decay", "betas", "momentum", "nesterov"):
            assert made.defaults.get(name) == plain.defaults.get(name)
        assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in layer.parameters()]
    with pytest.raises(ManycardError, match="no fused"):
        fused(torch.optim.Rprop(layer.parameters()))
