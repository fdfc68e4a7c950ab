"""The public surface of the releases 0.1.5 to 0.1.11, recorded, and what of it is here."""
