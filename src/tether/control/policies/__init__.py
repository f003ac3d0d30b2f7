"""Control policies: networks that map observations to distributions over actions, and the actors that sample them.

A `PolicySpec` (`spec`) describes one; `make_policy`, `save_policy` and `load_policy` (`mlp_policy`) build, write and
read it.
"""
