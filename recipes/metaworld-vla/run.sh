#!/bin/sh
# bash recipes/metaworld-vla/run.sh SEED [KEY=VALUE]...: demonstrations by MetaWorld's scripted policy, imitation, PPO.
# The same command again goes on where it was.
set -e
seed=$1
shift
export MUJOCO_GL="${MUJOCO_GL:-egl}"  # pictures without a display
out=runs/metaworld-vla/seed_$seed
keys="recipes/metaworld-vla/run.yaml trainer.seed=$seed trainer.default_local_dir=$out"
if [ ! -d "$out/cloned" ]; then
    rm -rf "$out/demos"
    # whole episodes: they also show how to stay at the ball
    tether collect $keys env.train.init_params.terminate_on_success=false \
        --from scripted --out "$out/demos" --episodes 50 --seed "${seed}000"
    tether bc $keys --data "$out/demos" --out "$out/cloned" --epochs 40
fi
tether train $keys actor_rollout_ref.model.path="$out/cloned" "$@"
