"""Control policies: networks that map observations to distributions over actions, and the actors that sample them.

A `PolicySpec` (`spec`) describes a policy; `make_policy`, `save_policy` and `load_policy` (`mlp_policy`) create, save
and load it.
"""
