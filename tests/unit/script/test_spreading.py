"""Outermost calls of trained modules, spread; everything else as it was."""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from manycard.cards import choose_cards
from manycard.script import Interception, ScriptSpreading, SpreadSettings

CARDS = choose_cards("cpu:3").cards


@pytest.fixture
def spreading() -> Iterator[ScriptSpreading]:
    made = ScriptSpreading(SpreadSettings(choose=lambda: CARDS))
    with Interception(made):
        yield made
    made.close()


def reports(spreading: ScriptSpreading) -> dict[str, tuple[int, int]]:
    return {report.name: (report.spread, report.whole) for report in spreading.reports}


def test_training_and_evaluation_are_spread_and_a_loss_is_not(spreading: ScriptSpreading) -> None:
    model, loss = nn.Linear(4, 2), nn.MSELoss()
    loss(model(torch.randn(6, 4)), torch.zeros(6, 2)).backward()
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert reports(spreading) == {"Linear": (2, 0)}


def test_what_is_not_trained_runs_as_it_did(spreading: ScriptSpreading) -> None:
    frozen = nn.Linear(4, 2).requires_grad_(False)
    frozen(torch.randn(6, 4))
    with torch.no_grad():
        nn.Linear(4, 2)(torch.randn(6, 4))
    nn.ReLU()(torch.randn(6, 4))
    assert reports(spreading) == {}


def test_too_few_samples_run_on_one_card_and_more_are_spread(spreading: ScriptSpreading) -> None:
    model = nn.Linear(4, 2)
    model(torch.randn(1, 4))
    model(torch.randn(2, 4))
    assert reports(spreading) == {"Linear": (1, 1)}


def test_calls_inside_calls_and_in_backward_are_left_alone(spreading: ScriptSpreading) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).sum(1)

    model = Outer()
    model(torch.randn(6, 4)).sum().backward()
    assert reports(spreading) == {"Outer": (1, 0)}


def test_functional_calls_and_transforms_are_left_alone(spreading: ScriptSpreading) -> None:
    model = nn.Linear(4, 2)
    values = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    torch.func.functional_call(model, values, (torch.randn(6, 4),)).sum().backward()
    torch.func.vmap(model)(torch.randn(6, 4))
    assert reports(spreading) == {}
    model(torch.randn(6, 4))
    assert reports(spreading) == {"Linear": (1, 0)}


def test_a_hook_of_the_scripts_keeps_a_module_on_one_card(
    spreading: ScriptSpreading, capsys: pytest.CaptureFixture[str]
) -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    model(torch.randn(6, 4))
    assert seen == [6]
    assert reports(spreading) == {"Sequential": (0, 1)}
    assert "0 has a hook" in capsys.readouterr().err


def test_a_reason_is_said_once(spreading: ScriptSpreading, capsys: pytest.CaptureFixture[str]) -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    model = Centred(4, 2)
    for _ in range(3):
        model(torch.randn(6, 4))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("manycard: Centred runs on one card when called with (6, 4): cutting the batch changes")
    assert reports(spreading) == {"Centred": (0, 3)}


def test_what_a_changed_attribute_decides_is_compared_again(spreading: ScriptSpreading) -> None:
    class Switch(nn.Linear):
        centred = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0) if self.centred else x)

    torch.manual_seed(0)
    model, x = Switch(4, 2), torch.randn(6, 4)
    for _ in range(5):
        model(x)
    model.centred = True
    expected = F.linear(x - x.mean(0), model.weight, model.bias)
    assert torch.allclose(model(x), expected)
    assert reports(spreading) == {"Switch": (5, 1)}


def test_padding_that_comes_later_is_compared_at_once(spreading: ScriptSpreading) -> None:
    """While no label is ignored, a mean over tokens, shifted or not, and one over samples are the same."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 5)

        def forward(self, words: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.table(words).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    model, words, labels = Tagger(), torch.randint(0, 9, (6, 4)), torch.randint(0, 5, (6, 4))
    for _ in range(6):
        model(words, labels)
    labels[0, 1:] = -100
    labels[1, :3] = -100
    labels[4, 2:] = -100
    expected = F.cross_entropy(model.table(words).flatten(0, 1), labels.flatten())
    assert torch.allclose(model(words, labels), expected, rtol=1e-6)
    assert reports(spreading)["Tagger"] == (7, 0)


def test_data_parallel_in_a_script_is_replaced(spreading: ScriptSpreading) -> None:
    model = nn.DataParallel(nn.Linear(4, 2))
    x = torch.randn(6, 4)
    assert torch.allclose(model(x), F.linear(x, model.module.weight, model.module.bias))
    assert reports(spreading) == {"Linear": (1, 0)}


def test_compiled_modules_are_spread(spreading: ScriptSpreading) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model, x = torch.compile(inner, backend="eager"), torch.randn(6, 4)
    model(x).sum().backward()
    own = inner[0].weight.grad.clone()
    inner.zero_grad()
    inner[1](F.linear(x, inner[0].weight, inner[0].bias)).sum().backward()
    assert torch.allclose(own, inner[0].weight.grad)
    assert next(report.spread for report in spreading.reports) == 1


def test_other_cards_print_nothing(spreading: ScriptSpreading, capsys: pytest.CaptureFixture[str]) -> None:
    class Chatty(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print("hello")
            return super().forward(x)

    Chatty(4, 2)(torch.randn(6, 4))
    assert capsys.readouterr().out == "hello\n"


def test_a_batch_that_fits_no_single_card_is_spread(spreading: ScriptSpreading) -> None:
    class Large(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    model, x = Large(4, 2), torch.randn(12, 4)
    for _ in range(5):
        assert torch.allclose(model(x), F.linear(x, model.weight, model.bias))
    assert reports(spreading) == {"Large": (5, 0)}


def test_a_full_card_ends_no_spreading(spreading: ScriptSpreading) -> None:
    class Large(nn.Linear):
        full = False

        def forward(self, x: Tensor) -> Tensor:
            if Large.full and torch.get_default_dtype() is torch.float64 and x.dtype is torch.float64:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x).mean()

    model, x = Large(4, 2), torch.randn(12, 4)
    model(x)
    Large.full = True
    for _ in range(5):
        assert torch.allclose(model(x), F.linear(x, model.weight, model.bias).mean())
    assert reports(spreading) == {"Large": (6, 0)}


def test_everything_is_put_back() -> None:
    before = (nn.Module.__call__, torch.compile, sys.stdout, sys.stderr)
    spreading = ScriptSpreading(SpreadSettings(choose=lambda: CARDS))
    with Interception(spreading):
        assert nn.Module.__call__ is not before[0]
        nn.Linear(4, 2)(torch.randn(6, 4))
    spreading.close()
    assert (nn.Module.__call__, torch.compile, sys.stdout, sys.stderr) == before


def test_a_module_that_is_dropped_takes_everything_with_it(spreading: ScriptSpreading) -> None:
    model = nn.Linear(4, 2)
    model(torch.randn(6, 4)).sum().backward()
    gone = weakref.ref(model)
    assert threading.active_count() > 1
    del model
    gc.collect()
    assert gone() is None


def test_copies_and_saved_modules_are_without(spreading: ScriptSpreading) -> None:
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.randn(6, 4)
    model(x)
    twin, shallow, file = copy.deepcopy(model), copy.copy(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, shallow, loaded):
        assert torch.equal(other(x), model(x))
    assert [report.spread for report in spreading.reports] == [4, 1, 1, 1]


def test_modules_saved_whole_load_by_weights_only(spreading: ScriptSpreading) -> None:
    model, x, file = nn.Sequential(nn.Linear(4, 2)), torch.randn(6, 4), io.BytesIO()
    expected = model(x)
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear]):
        assert torch.equal(torch.load(file, weights_only=True)(x), expected)


def test_a_batch_too_small_for_batchnorm_runs_on_one_card(
    spreading: ScriptSpreading, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    for rows in (12, 4, 6):
        model(torch.randn(rows, 4))
    assert [(report.spread, report.whole) for report in spreading.reports] == [(2, 1)]
    assert "runs on one card when called with (4, 4): a card would hold one sample" in capsys.readouterr().err


def test_threads_of_the_script_are_served_in_turn(spreading: ScriptSpreading) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(6, 4)
    expected, found = F.linear(x, model.weight, model.bias), []
    model(x)
    threads = [threading.Thread(target=lambda: found.append(model(x).detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.allclose(value, expected) for value in found)


def test_batchnorm_layers_that_are_also_kept_in_a_plain_list_see_the_whole_batch() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = []
            for index in range(2):
                norm = nn.BatchNorm1d(4)
                setattr(self, f"norm{index}", norm)
                self.norms.append(norm)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = norm(x).tanh()
            return self.head(x)

    torch.manual_seed(0)
    alone, x = Listed(), torch.randn(9, 4) * 3 + 1
    together = copy.deepcopy(alone)
    spreading = ScriptSpreading(SpreadSettings(choose=lambda: CARDS, sync_batchnorm=True))
    with Interception(spreading):
        for _ in range(3):
            spread = together(x)
        together.eval()
        evaluated = together(x)
    spreading.close()
    for _ in range(3):
        expected = alone(x)
    alone.eval()
    assert torch.allclose(spread, expected, atol=1e-6)
    assert torch.allclose(evaluated, alone(x), atol=1e-6)


@pytest.mark.parametrize("precision", [torch.bfloat16])
def test_autocast_gives_fp32_outputs(precision: torch.dtype) -> None:
    seen: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(y.dtype)
            return y

    settings = SpreadSettings(choose=lambda: CARDS, autocast=lambda device: torch.autocast(device.type, precision))
    spreading = ScriptSpreading(settings)
    with Interception(spreading):
        y = Looks(4, 2)(torch.randn(6, 4))
    assert y.dtype == torch.float32
    spreading.close()
    assert seen[-1] == precision
