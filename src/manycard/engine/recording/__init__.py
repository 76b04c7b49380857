"""Recording what a card does as CUDA graphs."""
