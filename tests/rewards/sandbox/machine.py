"""Whether programs can be confined here, for tests that do it."""

import shutil

import pytest

from tether.rewards.sandbox import bubblewrap

REASON = bubblewrap.why_not()
confined = pytest.mark.skipif(REASON is not None, reason=f"programs cannot be confined here: {REASON}")
no_prlimit = pytest.mark.skipif(shutil.which("prlimit") is None, reason="limits need prlimit (util-linux)")
