"""Files of a script that runs in every rank."""
