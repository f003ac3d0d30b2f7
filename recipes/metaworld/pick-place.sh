#!/bin/sh
# bash recipes/metaworld/pick-place.sh SEED [KEY=VALUE]...: demonstrations by MetaWorld's scripted policy, imitation, PPO.
# The same command again goes on where it was.
set -e
seed=$1
shift
out=runs/metaworld-pick-place/seed_$seed
keys="recipes/metaworld/run.yaml env.train.id=pick-place-v3 policy.init_logstd=-2.3 trainer.seed=$seed
    trainer.default_local_dir=$out trainer.experiment_name=metaworld-pick-place"
if [ ! -d "$out/cloned" ]; then
    rm -rf "$out/demos"
    tether collect $keys --from scripted --out "$out/demos" --episodes 10 --seed "${seed}000"
    tether bc $keys --data "$out/demos" --out "$out/cloned" --epochs 30
fi
tether train $keys actor_rollout_ref.model.path="$out/cloned" actor_rollout_ref.actor.optim.lr=1.0e-4 \
    actor_rollout_ref.actor.target_kl=0.01 critic.optim.lr=1.0e-3 trainer.critic_warmup=10 \
    trainer.total_env_steps=200000 "$@"
