#!/usr/bin/env bash
# Reads models of every kind that a run saves with transformers 4, in a minute. Installs it into a folder of its own first,
# where it is not there (150 MB). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export TETHER_TEST_TRANSFORMERS_4="${TETHER_TEST_TRANSFORMERS_4:-$PWD/.venv-transformers-4}"
if [ ! -e "$TETHER_TEST_TRANSFORMERS_4/ready" ]; then
  (
    . scripts/setup.sh test
    python -m pip install --quiet --no-warn-conflicts --target "$TETHER_TEST_TRANSFORMERS_4" 'transformers==4.57.*'
  )
  touch "$TETHER_TEST_TRANSFORMERS_4/ready"
fi
exec bash scripts/test.sh -n 0 tests/text/models/test_save.py "$@"
