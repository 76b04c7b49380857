"""Unmodified scripts with one process a card."""
