#!/usr/bin/env bash
# Tries what people do first with the newest, the pinned and the lowest versions, each on another Python, and prints the
# results as a table for docs/reference/versions.md. It takes about an hour on two cores. torch is the version that
# constraints.txt pins: on Linux set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, else pip takes the CUDA build of
# several gigabytes for each. Usage:
#   scripts/matrix.sh                  # all three
#   scripts/matrix.sh lowest=3.11      # one of them, or another pair: TETHER_VERSIONS of scripts/setup.sh and a Python
# Environments, runs and logs are in build/matrix (TETHER_MATRIX: another folder).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -gt 0 ] || set -- newest=3.13 pinned=3.12 lowest=3.11
root="$(realpath -m "${TETHER_MATRIX:-build/matrix}")"
extras=quickstart,lora,mujoco,dev
packages=(torch transformers tokenizers peft tensordict numba numpy pydantic typer datasets jinja2 gymnasium matplotlib)
steps=(--help doctor pull quickstart LoRA CartPole plot generate tests)
two_steps="trainer.total_training_steps=2"
text="$two_steps data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=2 data.val_max_samples=8"

step() {  # runs in the environment, in the folder of its runs
  local clone="$1" here="$2"
  case "$3" in
    --help) tether --help ;;
    doctor) tether doctor ;;
    pull) tether model pull smollm2-135m ;;
    quickstart) tether train "$clone/recipes/quickstart/run.yaml" $text trainer.default_local_dir="$here/quickstart" ;;
    LoRA) tether train "$clone/recipes/quickstart/run.yaml" $text trainer.default_local_dir="$here/lora" \
      actor_rollout_ref.model.lora_rank=8 ;;
    CartPole) tether train "$clone/recipes/cartpole/run.yaml" $two_steps trainer.default_local_dir="$here/cartpole" ;;
    plot) tether plot "$here/quickstart" --out curves.png ;;
    generate) tether generate "$here/quickstart" "What is 17 + 25?" ;;
    tests) cd "$clone" && python -m pytest -n 2 -p no:cacheprovider tests/text/models/test_lora.py tests/text/models/test_load.py \
      tests/text/models/test_rotary_attention.py tests/text/models/test_save.py tests/kernels tests/text/sampling/test_kv_cache.py \
      tests/text/sampling/test_native.py tests/config/test_load.py tests/test_batch.py ;;
  esac
}

declare -A result
for row in "$@"; do
  folder="$root/${row/=/-}"
  rm -rf "$folder/runs" "$folder/cache" && mkdir -p "$folder/runs"
  echo "== $row: $folder" >&2
  (
    export TETHER_VERSIONS="${row%=*}" PYTHON="python${row#*=}" TETHER_VENV="$folder/venv" TETHER_CACHE="$folder/cache"
    . scripts/setup.sh "$extras"
    python - "${packages[@]}" <<'PYTHON'
import platform, sys
from importlib.metadata import version
print("Python", platform.python_version())
print(*(f"{name} {version(name)}" for name in sys.argv[1:]), sep="\n")
PYTHON
  ) > "$folder/versions.txt" 2> "$folder/setup.log" || { echo "not installed, see $folder/setup.log" >&2; continue; }
  for step in "${steps[@]}"; do
    begin=$SECONDS
    (
      export TETHER_CACHE="$folder/cache" HF_HUB_OFFLINE=1 PATH="$folder/venv/bin:$PATH" clone="$PWD"
      cd "$folder/runs" && step "$clone" "$folder/runs" "$step"
    ) > "$folder/$step.log" 2>&1 && outcome=passed || outcome="**failed**"
    result["$row $step"]="$outcome, $((SECONDS - begin)) s"
    echo "$step: ${result["$row $step"]}" >&2
  done
done

printf '| |'; printf ' %s |' "${@/=/ on }"; printf '\n|---|'; printf -- '---|%.0s' "$@"; echo
for step in "${steps[@]}"; do
  printf '| %s |' "$step"
  for row in "$@"; do printf ' %s |' "${result["$row $step"]:-not run}"; done
  echo
done
for name in Python "${packages[@]}"; do
  printf '| %s |' "$name"
  for row in "$@"; do printf ' %s |' "$(sed -n "s/^$name \([^ ]*\)$/\1/p" "$root/${row/=/-}/versions.txt")"; done
  echo
done
for row in "$@"; do
  for step in "${steps[@]}"; do [[ "${result["$row $step"]:-}" == passed* ]] || exit 1; done
done
