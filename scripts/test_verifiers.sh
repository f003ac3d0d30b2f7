#!/usr/bin/env bash
# Runs the tests of environments of verifiers 0.4, and of one published on PyPI, in two minutes. Makes their environment
# first, where there is none (2 GB), since the library pins packages that others do not. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_VERIFIERS:-.venv-verifiers}"
if [ ! -e "$venv/ready" ]; then
  TETHER_VENV="$venv" . scripts/setup.sh test
  "$venv/bin/python" -m pip install --quiet 'verifiers>=0.4,<0.5' marble-v1
  touch "$venv/ready"
fi
exec "$venv/bin/python" -m pytest -n 0 -m '' tests/text/turns/endpoint/test_verifiers_tasks.py "$@"
