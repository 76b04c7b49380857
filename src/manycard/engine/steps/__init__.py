"""A train step: forward and backward passes, losses and updates."""
