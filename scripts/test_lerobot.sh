#!/usr/bin/env bash
# Runs the tests of lerobot's pi0 and pi0.5, and of timm's vision transformers, in about a minute. Makes their environment
# first, where there is none (5 GB; see scripts/lerobot.sh). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/lerobot.sh
exec "${TETHER_LEROBOT:-.venv-lerobot}/bin/python" -m pytest -n 0 tests/models/flow tests/models/vla/test_vit.py \
  tests/trainer/test_flow_policies.py "$@"
