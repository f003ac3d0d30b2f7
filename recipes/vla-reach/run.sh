#!/bin/sh
# bash recipes/vla-reach/run.sh openvla|openvla_oft SEED [KEY=VALUE]...: demonstrations, imitation, PPO.
# The same command again goes on where it was.
set -e
kind=$1 seed=$2
shift 2
recipe=recipes/vla-reach
out=runs/vla-reach/$kind-$seed
keys="$recipe/run.yaml policy.model_type=$kind trainer.seed=$seed trainer.default_local_dir=$out"
if [ ! -d "$out/cloned" ]; then
    rm -rf "$out/demos"
    tether collect $keys --from $recipe/reach.py:expert --out "$out/demos" --episodes 40 --seed "${seed}000"
    tether bc $keys --data "$out/demos" --out "$out/cloned" --epochs 40
fi
tether train $keys actor_rollout_ref.model.path="$out/cloned" "$@"
