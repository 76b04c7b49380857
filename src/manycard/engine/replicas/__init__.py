"""Copies of a module and of its optimizer on every card, kept alike."""
