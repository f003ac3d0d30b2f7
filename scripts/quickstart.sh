#!/usr/bin/env bash
# The main job: PPO with actor, critic, reference and GAE teaches SmolLM2-135M-Instruct to answer from a text, on a CPU.
# Further arguments are overrides, for example: scripts/quickstart.sh trainer.seed=2
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" quickstart
TETHER_HUGE_PAGES=1 tether train recipes/quickstart/run.yaml "$@"
echo "the commands above need the environment: source $venv/bin/activate"
