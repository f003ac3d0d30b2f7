"""The checkpoint store: whole or not at all, hashed, found again by step."""
