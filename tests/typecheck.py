"""The checker of shapes and types in tests: an int is a float, as it is for every type checker."""

import random

from beartype import BeartypeConf, beartype
from beartype._check.code import codemain

# Which item of a sequence beartype looks at is drawn; from the global generator, a run in a test would not resume
# where the checked run had left it.
assert hasattr(codemain, "getrandbits")
codemain.getrandbits = random.Random(0).getrandbits

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
