"""placeholder: written next."""
