"""Which keys act, which are refused, and which are accepted without effect."""
