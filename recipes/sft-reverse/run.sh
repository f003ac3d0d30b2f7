#!/bin/sh
# sh recipes/sft-reverse/run.sh SEED [KEY=VALUE]...: model and data, fine-tuning, PPO.
# What is made already is not made again.
set -e
seed=$1
shift
recipe=recipes/sft-reverse
out=runs/sft-reverse/$seed
[ -f "$out/test.jsonl" ] || python $recipe/make.py --out "$out" --seed "$seed"
tether sft $recipe/run.yaml trainer.seed="$seed"
tether train $recipe/ppo.yaml trainer.seed="$seed" "$@"
