"""Outputs that stay on the cards that made them."""
