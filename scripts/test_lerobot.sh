#!/usr/bin/env bash
# Runs the tests of lerobot's pi0 and pi0.5, and of timm's vision transformers, in about a minute. Makes their environment
# first, where there is none (5 GB; PYTHON: a Python of 3.12 or later). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_LEROBOT:-.venv-lerobot}"
if [ ! -e "$venv/ready" ]; then
  # The command that makes it runs from the environment itself, as tether's own one may be of an older Python.
  TETHER_VENV="$venv" PYTHON="${PYTHON:-python3.12}" . scripts/setup.sh dev
  tether setup lerobot
fi
exec "$venv/bin/python" -m pytest -n 0 tests/integrations/robots/flow tests/integrations/robots/vla/test_vit.py \
  tests/runs/test_flow_policies.py "$@"
