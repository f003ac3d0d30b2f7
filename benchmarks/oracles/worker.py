"""Runs the checks of one peer, in the peers' environment: python -m benchmarks.oracles.worker PEER.

The last line of the output is the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from importlib.metadata import version

import torch

from benchmarks.oracles.compare import run_checks

if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = sys.argv[1]
    checks = importlib.import_module(f"benchmarks.oracles.peers.{peer}").CHECKS
    found = [asdict(difference) for difference in run_checks(peer, checks)]
    print()  # whatever a peer printed stays on lines of its own
    print(json.dumps({"version": version(peer), "torch": torch.__version__, "differences": found}))
