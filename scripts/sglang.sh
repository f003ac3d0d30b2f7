#!/usr/bin/env bash
# Makes .venv-sglang (TETHER_SGLANG: another folder) with SGLang, which needs other versions of packages than tether does.
# Training with actor_rollout_ref.rollout.name=sglang then starts servers of it by itself. With arguments, one is started
# by hand, for actor_rollout_ref.rollout.server_urls; further arguments go to SGLang, for example:
#   scripts/sglang.sh serve --model-path Qwen/Qwen2.5-0.5B-Instruct --port 30000
# It is for GPUs: SGLang for CPUs is built from source (its documentation tells how), into this folder too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_SGLANG:-.venv-sglang}"
package="${SGLANG:-sglang==0.5.23}"
if [ ! -e "$venv/ready" ]; then
  echo "installing $package into $venv ..."
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
  "$venv/bin/python" -c 'import sglang.srt.entrypoints.http_server' && touch "$venv/ready"
fi
[ "${1:-}" = serve ] || exit 0
exec "$venv/bin/python" -m sglang.launch_server --host 127.0.0.1 --skip-tokenizer-init --enable-deterministic-inference "${@:2}"
