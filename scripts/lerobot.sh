#!/usr/bin/env bash
# Makes .venv-lerobot (TETHER_LEROBOT: another folder) with tether and lerobot, whose pi0 and pi0.5 need Python 3.12
# (PYTHON: the interpreter). Arguments go to tether there, for example:
#   scripts/lerobot.sh train env.train.id=Pendulum-v1 policy.model_type=pi0
# lerobot 0.6.1 asks for older versions of torch and transformers than tether, so it is installed without its
# requirements, and what its policies import beside them by name. PyPI's torch is for CUDA, about 5 GB with its
# libraries; another one that is in the environment already is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_LEROBOT:-.venv-lerobot}"
if [ ! -e "$venv/ready" ]; then
  python="${PYTHON:-python3.12}"
  [ -x "$venv/bin/python" ] || "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null || {
    echo "$python is no Python 3.12 or newer, which lerobot needs: name one by PYTHON=..., for example" >&2
    echo '  PYTHON="$(pyenv prefix 3.12)/bin/python" scripts/lerobot.sh    # after pyenv install 3.12' >&2
    exit 1
  }
  echo "installing lerobot into $venv ..."
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mujoco,vla,dev]' \
    torchvision==0.28.0 timm==1.0.31 einops draccus==0.11.6 opencv-python-headless termcolor 'av<16' 'pandas<3' jsonlines deepdiff requests
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps lerobot==0.6.1
  "$venv/bin/python" -c 'import lerobot.policies.pi0.modeling_pi0, lerobot.policies.pi05.modeling_pi05'
  touch "$venv/ready"
fi
[ $# -eq 0 ] || exec "$venv/bin/tether" "$@"
