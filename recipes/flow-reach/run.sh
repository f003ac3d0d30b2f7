#!/bin/sh
# bash recipes/flow-reach/run.sh pi0|pi05 SEED [KEY=VALUE]...: demonstrations, imitation, PPO; needs lerobot, so:
#   tether setup lerobot && PATH="$PWD/.venv-lerobot/bin:$PATH" bash recipes/flow-reach/run.sh pi0 1
# The same command again goes on where it was.
set -e
kind=$1 seed=$2
shift 2
recipe=recipes/flow-reach
expert=recipes/vla-reach/reach.py:expert
out=runs/flow-reach/$kind-$seed
keys="$recipe/run.yaml policy.model_type=$kind trainer.seed=$seed trainer.default_local_dir=$out"
if [ ! -d "$out/cloned" ]; then
    rm -rf "$out/demos"
    tether collect $keys --from $expert --out "$out/demos" --episodes 60 --seed "${seed}000"
    tether bc $keys --data "$out/demos" --out "$out/cloned" --epochs 100 --lr 1e-3
fi
tether train $keys actor_rollout_ref.model.path="$out/cloned" "$@"
