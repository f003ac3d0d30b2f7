"""The checker of shapes and types in tests: an int is a float, as it is for every type checker."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
