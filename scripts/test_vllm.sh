#!/usr/bin/env bash
# Runs the tests of the real vLLM, one after the other, in about half an hour. Makes its environment first, where there is
# none (3.4 GB). Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
( . scripts/setup.sh test && tether setup vllm )
exec bash scripts/test.sh -n 0 -m slow -k "vllm and not stand-in" \
  tests/conformance/test_rollout_engines.py tests/text/sampling tests/runs/test_servers.py \
  tests/runs/test_served_reward_model.py tests/test_verl_recipes.py "$@"
