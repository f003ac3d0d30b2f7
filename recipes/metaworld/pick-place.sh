#!/bin/sh
# bash recipes/metaworld/pick-place.sh SEED [KEY=VALUE]...: demonstrations by MetaWorld's scripted policy, imitation, PPO.
# The same command again goes on where it was.
set -e
seed=$1
shift
out=runs/metaworld-pick-place/seed_$seed
keys="recipes/metaworld/run.yaml env.train.id=pick-place-v3 policy.init_logstd=-1.6 trainer.seed=$seed
    trainer.default_local_dir=$out trainer.experiment_name=metaworld-pick-place"
if [ ! -d "$out/cloned" ]; then
    rm -rf "$out/demos"
    tether collect $keys --from scripted --out "$out/demos" --episodes 8 --seed "${seed}000"
    tether bc $keys --data "$out/demos" --out "$out/cloned" --epochs 40
fi
tether train $keys actor_rollout_ref.model.path="$out/cloned" env.train.total_num_envs=16 \
    actor_rollout_ref.actor.ppo_mini_batch_size=400 actor_rollout_ref.actor.optim.lr=2.0e-4 \
    actor_rollout_ref.actor.target_kl=0.02 critic.optim.lr=1.0e-3 trainer.critic_warmup=6 \
    trainer.total_env_steps=320000 "$@"
