"""One file a peer; each is imported in the peers' environment only."""

PEERS = ("verl", "trl", "openrlhf", "torchrl", "rlinf")
