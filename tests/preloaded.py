"""All that forked processes of tests use, imported once; see `tests.forks`."""

# ruff: noqa: E402, F401

import gc

gc.disable()  # while all is imported

from importlib import import_module
from importlib.util import find_spec

import tests.runs.loops
import tests.text.learning.test_fsdp
import tether.control.ranks
import tether.text.roles
from tests.installed import HAS_MEGATRON

if find_spec("peft") is not None:
    import_module("tether.text.models.lora")
if HAS_MEGATRON:
    import_module("tests.text.learning.megatron_ranks")

gc.freeze()  # the collector of a forked process, which runs at its end at the latest, has nothing of this to look at
gc.enable()
