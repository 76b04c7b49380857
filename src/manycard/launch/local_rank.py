"""Scripts that read their local rank from an argument.

The launcher of PyTorch 1 passed ``--local_rank=N`` to the script, PyTorch 2.0's passed ``--local-rank=N``, torchrun
sets LOCAL_RANK and passes nothing. Ranks here are told by LOCAL_RANK alone: an argument that a script doesn't
expect ends it. Where a script's argparse parser has such an option, and the option was not given, it takes the
value of LOCAL_RANK, whatever default the script wrote.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

__all__ = ["fill_local_rank"]

_OPTIONS = {"--local_rank", "--local-rank"}


def fill_local_rank(local_rank: str) -> None:
    """From now on, give the option ``--local_rank`` or ``--local-rank`` of any parser the default `local_rank`.

    A default that is a string goes through the option's ``type``, exactly as if it had been given.
    """
    container: Any = argparse._ActionsContainer  # parsers and their argument groups share it
    add_argument = container.add_argument

    @functools.wraps(add_argument)
    def add_and_fill(self: Any, *names: Any, **settings: Any) -> Any:
        action = add_argument(self, *names, **settings)
        if _OPTIONS.intersection(action.option_strings):
            action.default = local_rank
            action.required = False
        return action

    container.add_argument = add_and_fill
