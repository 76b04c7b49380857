"""What drives the cards: a thread a card, and what goes with its work."""
