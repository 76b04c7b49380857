"""Whether a script is written for several processes, or for one."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

from manycard.launch import Script

__all__ = ["written_for_ranks"]

_LIBRARIES = {"manycard", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "horovod"}
_NAMES = {"init_process_group", "init_device_mesh", "DistributedDataParallel", "fully_shard", "DistributedSampler"}
_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "--local_rank", "--local-rank"}


def written_for_ranks(script: Script) -> bool:
    """Whether the script's own file uses manycard or another library that deals with ranks, or does so by itself.

    A script that can't be read, or in which Python finds a mistake, is not.
    """
    path = next(filter(os.path.isfile, _files(script)), None)
    if path is None:
        return False
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(map(_tells, ast.walk(tree)))


def _files(script: Script) -> Iterator[str]:
    if not script.is_module:
        yield script.name
        return
    place = script.name.replace(".", os.sep)
    yield f"{place}.py"
    yield os.path.join(place, "__main__.py")


def _tells(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in _LIBRARIES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in _LIBRARIES or any(alias.name in _NAMES for alias in node.names)
    if isinstance(node, ast.Attribute):
        return node.attr in _NAMES
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in _VARIABLES
    return False
