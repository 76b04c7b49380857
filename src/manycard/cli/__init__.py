"""The command line: one file a command, which parses, calls and renders."""

from manycard.cli.app import main

__all__ = ["main"]
