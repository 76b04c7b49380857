"""What is raised where a call in parts is not what it is on one card."""

from __future__ import annotations

from manycard.script.comparison.layout import JoinRule

__all__ = ["DifferentError", "DifferentGradientError", "OpaqueError"]


class DifferentError(Exception):
    """A way of cutting gives another result."""


class OpaqueError(Exception):
    """Forward returns an object that holds tensors and is no nesting."""


class DifferentGradientError(DifferentError):
    """A way of cutting, or of joining what came out alike, gives other gradients.

    Attributes:
        other_rules: other ways of joining that fit the values, where they were looked for.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.other_rules: list[tuple[JoinRule, ...]] = []
