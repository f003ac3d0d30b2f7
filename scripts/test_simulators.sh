#!/usr/bin/env bash
# Runs each command of docs/guides/simulators.md for one training step, in a minute or two. Makes an environment with all of
# their packages first, where there is none. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_SIMULATORS:-.venv-simulators}"
if [ ! -e "$venv/ready" ]; then
  (
    TETHER_VENV="$venv" . scripts/setup.sh dev,envpool,jax
    grep -v '^mujoco==' constraints.txt > "$venv/simulators.txt"  # dm_control is not made for mujoco 4
    python -m pip install --quiet -c "$venv/simulators.txt" 'gymnasium[jax]' brax panda-gym 'shimmy[dm-control]' 'mujoco<4'
  )
  touch "$venv/ready"
fi
exec "$venv/bin/python" -m pytest -n 0 -m '' tests/test_simulators.py "$@"
