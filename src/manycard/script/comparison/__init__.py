"""Whether a call can be cut, found out by comparing with one card."""
