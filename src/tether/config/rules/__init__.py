"""Rules between keys that text and control runs share, and factories of common rules (`shapes`).

A rule reports a contradiction before a model is loaded. Rules of a single package are in its `config_rules`;
`tether.config.contradictions` lists all of them.
"""

__all__ = ["megatron", "shapes", "shared"]
