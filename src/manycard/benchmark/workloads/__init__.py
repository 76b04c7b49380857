"""Built-in workloads, one a file; `workload.py` is the contract."""

from __future__ import annotations

from manycard.benchmark.workloads.digits import Digits
from manycard.benchmark.workloads.gpt2 import GPT2
from manycard.benchmark.workloads.gpt2_xl import GPT2XL
from manycard.benchmark.workloads.mlp import MLP
from manycard.benchmark.workloads.resnet18_cifar import ResNet18Cifar
from manycard.benchmark.workloads.resnet50 import ResNet50
from manycard.benchmark.workloads.workload import Feeding, Workload
from manycard.errors import SettingError

__all__ = ["WORKLOADS", "Feeding", "Workload", "find_workload"]

WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind for kind in (Digits, ResNet50, GPT2, GPT2XL, ResNet18Cifar, MLP)
}


def find_workload(name: str) -> type[Workload]:
    """The workload called `name`.

    Raises:
        SettingError: there is none.
    """
    if name not in WORKLOADS:
        raise SettingError("--workload", name, "there is no such workload", fix=f"choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
