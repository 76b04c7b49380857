"""How batches are cut for the cards, and outputs joined."""
