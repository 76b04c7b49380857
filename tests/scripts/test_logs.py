"""`same_log` forgives rounding and nothing else."""

from __future__ import annotations

import pytest

from .logs import numbers_in, same_log


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("", ""),
        ("epoch 1 loss 0.12345", "epoch 1 loss 0.12345"),
        ("loss 0.1234", "loss 0.1235"),  # within 1e-4, absolutely
        ("loss 12345.6", "loss 12346.1"),  # within 1e-4, relatively
        ("lr 1e-06 x", "lr 1.00001e-6 x"),
        ("norm 10.00000", "norm 9.99996"),
        ("norm  9.99999|", "norm 10.00000|"),  # padding gives way to a digit
        ("bias -0.00001", "bias 0.00001"),
        ("loss 2.0", "loss 2"),
        ("done\n\n", "done"),
        ("done  \nagain", "done\nagain"),
        ("loss nan", "loss nan"),
        ("[0.5, 0.25]", "[0.50001, 0.25001]"),
    ],
)
def test_rounding_is_forgiven(a: str, b: str) -> None:
    assert same_log(a, b) is None
    assert same_log(b, a) is None


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ("loss 0.1234", "loss 0.1237", "0.1234 and 0.1237 differ by 0.0003"),
        ("loss 12345.6", "loss 12348.6", "differ by 3"),
        ("loss -0.5", "loss 0.5", "differ by 1"),
        ("loss 1e-3", "loss 1e-2", "differ by 0.009"),
        ("loss nan", "loss 0.5", "the text differs"),
        ("loss nan", "loss inf", "the text differs"),
        ("step 10000 done", "step 10001 done", "differ by 1"),  # integers are counts
        ("loss: 0.5", "loss = 0.5", "the text differs"),
        ("fc1 0.5", "fc2 0.5", "the text differs"),
        ("0.5 0.25", "0.5", "the text differs"),
        ("a  b", "a b", "the text differs"),
    ],
)
def test_a_difference_is_described(a: str, b: str, says: str) -> None:
    difference = same_log(a, b)
    assert difference is not None
    assert says in difference
    assert same_log(b, a) is not None


def test_the_first_difference_is_the_one_described() -> None:
    difference = same_log("start\nloss 1.0\nloss 2.0", "start\nloss 1.5\nloss 2.5")
    assert difference == "line 2: 1.0 and 1.5 differ by 0.5\n  a: loss 1.0\n  b: loss 1.5"


def test_a_line_that_only_one_log_has_is_a_difference() -> None:
    assert same_log("one\ntwo\nthree", "one") == "line 2: only a has it\n  a: two"
    assert same_log("one", "one\ntwo") == "line 2: only b has it\n  b: two"
    assert same_log("", "one") is not None


def test_the_tolerance_is_the_callers() -> None:
    assert same_log("loss 0.5", "loss 0.502", tolerance=1e-2) is None
    assert same_log("loss 0.5", "loss 0.500002", tolerance=1e-6) is not None


def test_numbers_are_found_in_text() -> None:
    assert numbers_in("epoch 3: loss=0.25, lr 1e-05 (-2.5%), conv12 [64, 10]") == [
        "3",
        "0.25",
        "1e-05",
        "-2.5",
        "64",
        "10",
    ]
