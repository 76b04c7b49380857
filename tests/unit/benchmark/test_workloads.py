"""Workloads: the same seed gives the same training, and each is what its name says."""

from __future__ import annotations

import math
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_digits

from manycard.benchmark.workloads import WORKLOADS, Feeding, Workload
from manycard.benchmark.workloads.digits import Digits
from manycard.benchmark.workloads.gpt2 import GPT2
from manycard.benchmark.workloads.resnet18_cifar import CifarResNet18, ResNet18Cifar
from manycard.benchmark.workloads.resnet50 import ResNet50
from manycard.benchmark.workloads.synthetic import SyntheticWorkload

FEEDING = Feeding(batch=5, length=3, seed=0)
SYNTHETIC = [kind for kind in WORKLOADS.values() if issubclass(kind, SyntheticWorkload)]


def process(rank: int = 0, world_size: int = 1) -> SimpleNamespace:
    """Where a process stands, which is all that a synthetic workload asks of `Parallel`."""
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


def parameters(workload: Workload, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [parameter.detach() for parameter in workload.make_model().parameters()]


def size(workload: Workload) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in workload.make_model().parameters())


@pytest.mark.parametrize("kind", WORKLOADS.values(), ids=WORKLOADS)
def test_initial_weights_follow_the_seed(kind: type[Workload]) -> None:
    workload = kind(small=True)
    assert all(map(torch.equal, parameters(workload, 1), parameters(workload, 1)))
    assert not all(map(torch.equal, parameters(workload, 1), parameters(workload, 2)))


@pytest.mark.parametrize("kind", SYNTHETIC, ids=lambda kind: kind.name)
def test_the_shards_of_all_ranks_are_the_global_batch(kind: type[SyntheticWorkload]) -> None:
    workload = kind(small=True)
    whole = list(islice(workload.batches(process(), FEEDING), 5))  # type: ignore[arg-type]
    shards = [list(islice(workload.batches(process(rank, 3), FEEDING), 5)) for rank in range(3)]  # type: ignore[arg-type]
    assert workload.total_steps(FEEDING) is None, "it goes on for as long as it is asked to"
    for step, (batch, samples) in enumerate(whole):
        assert samples == 5
        for part in range(2):
            joined = torch.cat([shards[rank][step][0][part] for rank in range(3)])
            assert torch.equal(joined, batch[part])


@pytest.mark.parametrize("kind", SYNTHETIC, ids=lambda kind: kind.name)
def test_training_brings_the_loss_down(kind: type[SyntheticWorkload]) -> None:
    workload = kind(small=True)
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = workload.make_optimizer(model)
    losses = []
    for batch, _ in islice(workload.batches(process(), Feeding(batch=8, length=1, seed=0)), 30):  # type: ignore[arg-type]
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "millions"), [(GPT2, 124.5), (ResNet50, 25.6), (ResNet18Cifar, 11.2), (WORKLOADS["mlp"], 11.6)]
)
def test_a_model_has_the_size_of_its_name(kind: type[Workload], millions: float) -> None:
    assert size(kind()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_cifar_resnet_keeps_the_full_resolution_in_its_stem() -> None:
    model = CifarResNet18(width=8)
    images = torch.randn(2, 3, 32, 32)
    assert model.stem(images).shape == (2, 8, 32, 32)
    assert model(images).shape == (2, 10)


def test_the_gpt_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = GPT2(small=True).make_model().eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_gpt_ties_its_embeddings() -> None:
    model = GPT2(small=True).make_model()
    assert model.head.weight is model.tokens.weight


@pytest.mark.parametrize("channels_last", [True, False])
def test_images_and_models_have_the_memory_format_that_was_asked_for(channels_last: bool) -> None:
    workload = ResNet18Cifar(small=True, channels_last=channels_last)
    (images, _), _ = next(workload.batches(process(1, 2), FEEDING))  # type: ignore[arg-type]
    weight = workload.make_model().get_parameter("stem.0.weight")
    for tensor in (images, weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last) is channels_last


def test_digits_are_split_without_overlap() -> None:
    digits = Digits()
    train, test = digits.train_set.tensors, digits.test_set.tensors
    assert (len(train[0]), len(test[0])) == (1437, 360)
    labels = torch.cat([train[1], test[1]])
    assert torch.equal(labels.bincount(), torch.from_numpy(load_digits().target).bincount())
    assert train[0].max() == 1.0
    seen = {image.numpy().tobytes() for image in train[0]}
    assert not any(image.numpy().tobytes() in seen for image in test[0])


def test_digits_count_every_step_of_every_epoch() -> None:
    digits = Digits()
    feeding = Feeding(batch=128, length=3, seed=0)
    assert digits.total_steps(feeding) == 36
