#!/bin/sh
# sh recipes/reward-model/run.sh SEED [KEY=VALUE]...: policy and pairs, reward model, PPO.
# What is made already is not made again.
set -e
seed=$1
shift
recipe=recipes/reward-model
out=runs/reward-model/$seed
[ -f "$out/test.jsonl" ] || python $recipe/make.py --out "$out" --seed "$seed"
[ -d "$out/rm" ] || tether rm train "$out/pairs.jsonl" --model "$out/policy" --out "$out/rm" \
    --lr 1e-3 --batch-size 16 --epochs 5 --seed "$seed" --device cpu
tether train $recipe/run.yaml trainer.seed="$seed" "$@"
