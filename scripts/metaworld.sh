#!/usr/bin/env bash
# Makes .venv-metaworld with MetaWorld v3 and gymnasium-robotics, whose versions of mujoco are not that of the other
# simulators, and trains for a moment in each. Further arguments go to the training in MetaWorld, for example:
#   scripts/metaworld.sh env.train.id=MT10 trainer.total_env_steps=1000000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_VENV:-.venv-metaworld}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
grep -v '^mujoco==' constraints.txt > "$venv/constraints.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$venv/constraints.txt" -e '.[metaworld,robotics]'
short="env.train.max_episode_steps=50 trainer.total_env_steps=4096 trainer.save_freq=1 env.eval.num_episodes=8"
"$venv/bin/tether" train env.train.env_type=metaworld env.train.id=reach-v3 $short "$@"
fetch=gymnasium_robotics:FetchReach-v4
"$venv/bin/tether" train env.train.id=$fetch $short
"$venv/bin/tether" eval "checkpoints/control/$fetch" env.eval.num_episodes=8
