"""The random state of a process: Python's, NumPy's and PyTorch's on the CPU.

Behaviour:
    * What `global_rng_state` gives holds tensors and plain values only, so that a checkpoint can keep it.
    * After `load_global_rng_state` the three give the numbers that they would have given next.
    * The cards' states are their strategy's, and draws of data loading are the loader's (`manycard.data.draws`).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from manycard.errors import CheckpointError

__all__ = ["global_rng_state", "load_global_rng_state"]


def global_rng_state() -> dict[str, Any]:
    """The states of ``random``, ``numpy.random`` and PyTorch's CPU generator.

    Raises:
        CheckpointError: the script has given ``numpy.random`` another generator than its Mersenne Twister.
    """
    version, words, gauss = random.getstate()
    numbers = np.random.get_state(legacy=False)
    if numbers["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy.random draws from a {numbers['bit_generator']}, whose state can't be kept",
            fix="leave numpy.random its own generator, and use numpy.random.default_rng where another is needed",
        )
    return {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": _plain_numpy(numbers),
        "torch": torch.get_rng_state(),
    }


def _plain_numpy(numbers: Any) -> dict[str, Any]:
    inner = numbers["state"]
    return {
        "key": torch.from_numpy(np.asarray(inner["key"]).astype(np.int64)),
        "pos": int(inner["pos"]),
        "has_gauss": int(numbers["has_gauss"]),
        "gauss": float(numbers["gauss"]),
    }


def load_global_rng_state(state: dict[str, Any]) -> None:
    """Put back what `global_rng_state` gave.

    Raises:
        CheckpointError: `state` is something else; nothing was changed.
    """
    try:
        python = state["python"]
        words = (int(python["version"]), tuple(python["words"].tolist()), python["gauss"])
        kept = state["numpy"]
        numbers = ("MT19937", kept["key"].numpy().astype(np.uint32), kept["pos"], kept["has_gauss"], kept["gauss"])
        generator = state["torch"].clone()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"this is not a random state ({type(error).__name__}: {error})", fix="give what global_rng_state() returned"
        ) from error
    random.setstate(words)
    np.random.set_state(numbers)
    torch.set_rng_state(generator)
