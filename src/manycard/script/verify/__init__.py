"""Proving that many cards compute what one card computes."""
