"""Everything that scripts do with an output: a spread one gathers itself, and nothing else differs."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manycard.errors import BatchError
from tests.unit.engine.twins import close, same_state, twins

from .models import TIMES, WORDS, Words, batch, is_spread, numbers, plainly


def outputs(samples: int = 7, *, graph: bool = False) -> tuple[Tensor, Tensor]:
    """One output, alone and left spread."""
    alone, together = twins(Words, outputs="spread")
    with torch.set_grad_enabled(graph):
        return alone(batch(samples)), together(batch(samples))


def test_what_it_is_can_be_asked_without_gathering() -> None:
    mine, theirs = outputs(graph=True)
    for ask in (
        *(lambda y: y.shape, lambda y: y.dtype, lambda y: y.device, lambda y: y.size(), lambda y: y.size(1)),
        *(lambda y: y.dim(), lambda y: y.ndim, lambda y: len(y), lambda y: y.numel(), lambda y: y.requires_grad),
        *(
            lambda y: y.stride(),
            lambda y: y.is_contiguous(),
            lambda y: y.is_cuda,
            lambda y: y.is_leaf,
            lambda y: y.layout,
        ),
        *(
            lambda y: isinstance(y, Tensor),
            torch.is_tensor,
            lambda y: y.is_floating_point(),
            lambda y: y.element_size(),
        ),
        *(lambda y: y.detach().requires_grad, lambda y: y._version, lambda y: y.nbytes),
    ):
        assert ask(theirs) == ask(mine)
    assert theirs.grad_fn is not None
    assert is_spread(theirs)


READS: dict[str, Any] = {
    "numpy": lambda y: torch.from_numpy(y.numpy()),
    "asarray": lambda y: torch.from_numpy(np.asarray(y)),
    "tolist": lambda y: y.tolist(),
    "item": lambda y: y[0, 0, 0].item(),
    "float": lambda y: float(y.sum()),
    "bool": lambda y: bool((y > -9).all()),
    "format": lambda y: f"{y[0, 0, 0]:.6f} {y.sum():.3f}",
    "repr": repr,
    "str": lambda y: str(y[:, 0]),
    "contains": lambda y: 3.0 in y,
    "iteration": lambda y: [row.sum() for row in y],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "save": lambda y: _saved(y),
    "dlpack": lambda y: torch.from_dlpack(y),
    "data": lambda y: y.data * 2,
    "storage": lambda y: y.untyped_storage().nbytes(),
    "pointer": lambda y: y.data_ptr() != 0,
    "cpu": lambda y: y.cpu(),
    "allclose": lambda y: torch.allclose(y, y + 0),
    "equal": lambda y: torch.equal(y, y + 0),
    "out": lambda y: torch.add(y, 1, out=torch.empty(7, TIMES, WORDS, dtype=torch.float64)),
    "each row": lambda y: torch.vmap(lambda row: row.sum())(y),
    "where": lambda y: torch.where(y > 0),
    "nonzero": lambda y: (y > 0).nonzero(),
    "set": lambda y: {y: 1}[y],
}


def _saved(tensor: Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"y": tensor}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["y"]


@pytest.mark.parametrize("name", READS)
def test_reading(name: str) -> None:
    mine, theirs = outputs()
    found, expected = READS[name](theirs), READS[name](mine)
    if isinstance(expected, str):
        assert found == expected
    else:
        close(plainly(found), plainly(expected))
    if isinstance(found, Tensor) and name not in ("cpu", "data", "each row", "set"):
        assert type(found) is Tensor, "what is kept or saved is an ordinary tensor"


def test_what_pytorch_refuses_of_a_tensor_with_a_graph() -> None:
    _, theirs = outputs(graph=True)
    with pytest.raises(RuntimeError, match="requires grad"):
        theirs.numpy()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(theirs)


WRITES: dict[str, Any] = {
    "in place": lambda y: y.mul_(2).add_(1),
    "operator": lambda y: y.__iadd__(1.5),
    "an item": lambda y: y.__setitem__((slice(None), 0), 0.0),
    "a sample": lambda y: y[2].zero_(),
    "a view": lambda y: y.view(-1, WORDS)[3:5].fill_(1.0),
    "a view of spread views": lambda y: y.transpose(0, 1)[:, :, 1].exp_(),
    "masked": lambda y: y.masked_fill_(numbers(len(y)) > 0.5, 0.0),
    "copied into": lambda y: y.copy_(numbers(len(y))),
    "clamped": lambda y: y.clamp_(min=0),
    "relu": lambda y: F.relu(y, inplace=True),
    "index put": lambda y: y.index_fill_(0, torch.tensor([1, 3]), 0.25),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_writing_is_seen_by_all_views_and_in_gradients(name: str, before: bool) -> None:
    """`before`: views were made while it was spread; they see what is written afterwards, as views do."""
    alone, together = twins(Words, outputs="spread")
    found = []
    for model in (alone, together):
        y = model(batch(7))
        seen = [y[:, 0], y.flatten(0, 1)] if before else []
        read = float(y[:, 1].sum().detach())
        WRITES[name](y)
        loss = y.square().mean() + sum(view.sum() for view in seen)
        loss.backward()
        found.append([read, plainly(y), *map(plainly, seen), loss.detach()])
    close(found[1], found[0])
    same_state(alone, together)


def test_writing_gives_back_the_tensor_itself() -> None:
    _, theirs = outputs()
    assert theirs.mul_(2) is theirs
    assert theirs.detach_() is theirs
    theirs += 1
    assert isinstance(theirs, Tensor)


def test_writing_into_a_detached_output_is_writing_into_it() -> None:
    mine, theirs = outputs(graph=True)
    for y in (mine, theirs):
        y.detach().zero_()
        y.data[0] = 4.0
    close(plainly(theirs), plainly(mine))


def test_new_data() -> None:
    mine, theirs = outputs()
    for y in (mine, theirs):
        y.data = numbers(7)
        y.add_(1)
    close(plainly(theirs), plainly(mine))
    with pytest.raises(BatchError, match=r"data of another kind.*outputs="):
        theirs.data = numbers(3)


@pytest.mark.parametrize("change", ["unsqueeze_", "squeeze_", "t_", "resize_"])
def test_a_change_of_shape_in_place_is_refused_in_words(change: str) -> None:
    _, theirs = outputs()
    args = {"unsqueeze_": (1,), "squeeze_": (), "t_": (), "resize_": (3, 3)}[change]
    y = theirs[:, 0] if change == "t_" else theirs
    with pytest.raises(BatchError, match=f"{change} would change in place the shape.*Fix: write x = x"):
        getattr(y, change)(*args)


def test_a_leaf_of_the_scripts_own() -> None:
    mine, theirs = outputs()
    grads = []
    for y in (mine, theirs):
        y.requires_grad_()
        F.cross_entropy(y.flatten(0, 1), torch.arange(7 * TIMES) % WORDS).backward()
        y.square().mean().backward()
        grads.append(plainly(y.grad))
        assert y.is_leaf
    close(grads[1], grads[0])


class Squares(torch.autograd.Function):
    """A function of the script's own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 * ctx.saved_tensors[0]


def test_functions_hooks_and_modes_of_the_scripts_own() -> None:
    alone, together = twins(Words, outputs="spread")
    for model in (alone, together):
        y = model(batch(7))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            loss = Squares.apply(y).mean() + y.exp().mean() + F.mse_loss(y, numbers(7))  # type: ignore[no-untyped-call]
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            loss.backward()
    same_state(alone, together)


def test_a_loss_compiled_by_the_script() -> None:
    alone, together = twins(Words, outputs="spread")
    loss = torch.compile(lambda y: (y.softmax(-1) ** 2).mean(), backend="aot_eager")
    for model in (alone, together):
        loss(model(batch(7))).backward()
    same_state(alone, together)


def test_functional_transforms() -> None:
    mine, theirs = outputs()
    found = [plainly(torch.func.grad(lambda y: (y.sin() ** 2).sum())(y)) for y in (mine, theirs)]
    close(found[1], found[0])


def test_outputs_outlive_the_model() -> None:
    mine, theirs = outputs()
    close(plainly(theirs[:, :2] * 2), plainly(mine[:, :2] * 2))


def test_memory_behind_pythons_back_is_refused_and_not_read() -> None:
    _, theirs = outputs()
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(theirs)


def test_a_head_of_the_scripts_own_trains() -> None:
    alone, together = twins(Words, outputs="spread")
    heads = []
    for model in (alone, together):
        torch.manual_seed(3)
        head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(TIMES * WORDS), nn.Linear(TIMES * WORDS, 3)).double()
        for step in range(2):
            F.cross_entropy(head(model(batch(7, step))), torch.arange(7) % 3).backward()
        heads.append([parameter.grad for parameter in head.parameters()])
    close(heads[1], heads[0])
    same_state(alone, together)
