"""Rules between keys that text and control runs share, and the factories of common rules (`shapes`).

A rule refuses a contradiction before a model is loaded. Those of a part are in the `config_rules` beside it;
`tether.config.contradictions` lists all of them.
"""

__all__ = ["megatron", "shapes", "shared"]
