"""Whether programs can be confined here, for tests that do it."""

import shutil

import pytest

from tether.text.rewards.sandbox import bubblewrap

REASON = bubblewrap.confinement_advice()
confined = pytest.mark.skipif(REASON is not None, reason=f"programs cannot be confined here: {REASON}")
MISSING = [name for name in ("prlimit", "python3") if shutil.which(name, path=bubblewrap.PATH) is None]
needs_prlimit = pytest.mark.skipif(bool(MISSING), reason=f"plain runs need {MISSING} in {bubblewrap.PATH}")
