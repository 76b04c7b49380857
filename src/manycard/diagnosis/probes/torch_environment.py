"""Probe: are variables left on that make CUDA or torch slow, talkative or less exact?"""

from __future__ import annotations

from dataclasses import dataclass

from manycard.diagnosis.facts import Facts
from manycard.diagnosis.finding import Finding, Severity

__all__ = ["probe"]

_OFF = frozenset({"", "0", "false", "no", "off", "n"})


@dataclass(frozen=True)
class _Left:
    """A variable whose presence is worth a word."""

    cause: str
    fix: str
    severity: Severity = "warning"
    values: frozenset[str] | None = None
    """The values that count, in lower case; None for all that are not off."""


def _values(*values: str) -> frozenset[str]:
    return frozenset(values)


_LEFT_ON = {
    "CUDA_LAUNCH_BLOCKING": _Left(
        "every kernel is waited for (CUDA_LAUNCH_BLOCKING): cards wait for the host and for one another",
        "unset CUDA_LAUNCH_BLOCKING; set it only while you look for the kernel that fails",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": _Left(
        "torch asks the driver for each piece of memory anew, which waits for the card each time",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
    ),
    "TORCH_DISTRIBUTED_DEBUG": _Left(
        "torch.distributed checks every collective of every rank, which slows training down",
        "unset TORCH_DISTRIBUTED_DEBUG; INFO is cheap, DETAIL is for looking for a hang",
        values=_values("detail"),
    ),
    "TORCH_NCCL_BLOCKING_WAIT": _Left(
        "ranks wait on the host for every collective (TORCH_NCCL_BLOCKING_WAIT), so nothing overlaps",
        "unset TORCH_NCCL_BLOCKING_WAIT",
    ),
    "TORCH_NCCL_DESYNC_DEBUG": _Left(
        "torch notes every collective of every rank (TORCH_NCCL_DESYNC_DEBUG), which costs time",
        "unset TORCH_NCCL_DESYNC_DEBUG when you are done looking for a hang",
        "note",
    ),
    "TORCH_CPP_LOG_LEVEL": _Left(
        "torch prints what its C++ part does, from every rank",
        "unset TORCH_CPP_LOG_LEVEL",
        "note",
        _values("info", "0"),
    ),
    "TORCH_LOGS": _Left("torch prints logs of its compiler (TORCH_LOGS)", "unset TORCH_LOGS", "note"),
    "TORCHDYNAMO_DISABLE": _Left(
        "torch.compile does nothing (TORCHDYNAMO_DISABLE), and the model runs uncompiled without a word",
        "unset TORCHDYNAMO_DISABLE",
    ),
    "TORCH_COMPILE_DISABLE": _Left(
        "torch.compile does nothing (TORCH_COMPILE_DISABLE), and the model runs uncompiled without a word",
        "unset TORCH_COMPILE_DISABLE",
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": _Left(
        "a card takes work from one queue only, so copies and NCCL wait for computing",
        "unset CUDA_DEVICE_MAX_CONNECTIONS, unless Megatron's sequence or tensor parallelism asks for it",
        values=_values("1"),
    ),
    "CUDA_MODULE_LOADING": _Left(
        "all kernels are loaded at the start (CUDA_MODULE_LOADING), which takes seconds and memory on each card",
        "unset CUDA_MODULE_LOADING; CUDA loads a kernel when it is first used",
        "note",
        _values("eager"),
    ),
    "CUDA_FORCE_PTX_JIT": _Left(
        "the driver translates every kernel anew (CUDA_FORCE_PTX_JIT): a start takes minutes",
        "unset CUDA_FORCE_PTX_JIT",
    ),
    "CUDA_CACHE_DISABLE": _Left(
        "kernels that the driver has translated are not kept (CUDA_CACHE_DISABLE)", "unset CUDA_CACHE_DISABLE", "note"
    ),
    "CUBLAS_WORKSPACE_CONFIG": _Left(
        "cuBLAS is told which workspaces to use, which makes matrix products repeatable and some of them slower",
        "unset CUBLAS_WORKSPACE_CONFIG unless results must repeat bit by bit",
        "note",
    ),
    "CUBLAS_LOGINFO_DBG": _Left("cuBLAS logs each call", "unset CUBLAS_LOGINFO_DBG", "note"),
    "CUDNN_LOGINFO_DBG": _Left("cuDNN logs each call", "unset CUDNN_LOGINFO_DBG", "note"),
    "CUDNN_LOGLEVEL_DBG": _Left("cuDNN logs what it does", "unset CUDNN_LOGLEVEL_DBG", "note"),
    "NVIDIA_TF32_OVERRIDE": _Left(
        "TF32 is forced on or off for every library, whatever the script and --precision say",
        "unset NVIDIA_TF32_OVERRIDE, and choose with --precision fp32 or tf32",
        values=_values("0", "1"),
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": _Left(
        "fp32 matrix products are computed in TF32, whatever the script says",
        "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and choose with --precision",
    ),
    "TORCH_CUDNN_V8_API_DISABLED": _Left(
        "torch uses cuDNN's old interface, which lacks faster convolutions", "unset TORCH_CUDNN_V8_API_DISABLED", "note"
    ),
    "PYTHONASYNCIODEBUG": _Left("Python checks asyncio in debug mode", "unset PYTHONASYNCIODEBUG", "note"),
    "PYTHONDEVMODE": _Left(
        "Python runs in development mode, which checks memory at each allocation", "unset PYTHONDEVMODE", "note"
    ),
    "PYTORCH_NVML_BASED_CUDA_CHECK": _Left(
        "torch asks NVML whether there are cards, and may then not notice that CUDA can't start",
        "unset PYTORCH_NVML_BASED_CUDA_CHECK unless the script forks after looking for cards",
        "note",
    ),
}


def probe(facts: Facts) -> list[Finding]:
    """Find variables that were left on."""
    findings = []
    for name, left in _LEFT_ON.items():
        value = facts.environment.get(name)
        if value is None or not _counts(value, left):
            continue
        findings.append(Finding(left.cause, f"{name}={value}", left.fix, left.severity))
    return findings


def _counts(value: str, left: _Left) -> bool:
    value = value.strip().lower()
    return value not in _OFF if left.values is None else value in left.values
