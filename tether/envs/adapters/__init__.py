"""One file per simulator library; each is imported only when a configuration names it."""
