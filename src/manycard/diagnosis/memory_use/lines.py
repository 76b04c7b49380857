"""The line of a script that keeps something: where a list, dict, attribute or variable gets more in each step.

Read from the source, by name: ``kept.append(x)``, ``self.kept[key] = x``, ``total += loss``, ``total = total + loss``.
Of several such lines, one in a loop or function comes first. Where none is found, nothing is said.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator

__all__ = ["keeping_line"]

_ADDING = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "put"})
_MOST_BYTES = 2_000_000


def keeping_line(file: str, name: str) -> str:
    """``train.py:12: losses.append(loss)``; empty where no line is found.

    Args:
        file: the script's path.
        name: of the variable or attribute.
    """
    try:
        if os.path.getsize(file) > _MOST_BYTES:
            return ""
        with open(file, encoding="utf-8") as opened:
            source = opened.read()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return ""
    found = sorted(_keeping(tree, name, 0), key=lambda pair: (-pair[0], pair[1]))
    if not found:
        return ""
    number = found[0][1]
    return f"{os.path.basename(file)}:{number}: {source.splitlines()[number - 1].strip()}"


def _keeping(node: ast.AST, name: str, depth: int) -> Iterator[tuple[int, int]]:
    """How deep in loops and functions, and on which line, something is added to `name`."""
    if _adds(node, name):
        yield depth, node.lineno  # type: ignore[attr-defined]
    inner = depth + isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _keeping(child, name, inner)


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        held = node.func.value
        held = held.value if isinstance(held, ast.Subscript) else held  # a list for each key
        return node.func.attr in _ADDING and _is(held, name)
    if isinstance(node, ast.AugAssign):
        return _is(node.target, name)
    if isinstance(node, ast.Assign):
        items = (target for target in node.targets if isinstance(target, ast.Subscript))
        if any(_is(item.value, name) for item in items):
            return True
        return any(_is(target, name) for target in node.targets) and any(
            _is(part, name) for part in ast.walk(node.value)
        )
    return False


def _is(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
