"""One call of a module, spread over the cards as one node of the script's graph."""
