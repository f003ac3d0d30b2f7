#!/bin/sh
# sh recipes/distill-reverse/run.sh SEED [KEY=VALUE]...: models and data, the teacher's fine-tuning, distillation.
# What is made already is not made again.
set -e
seed=$1
shift
recipe=recipes/distill-reverse
make=recipes/sft-reverse/make.py
out=runs/distill-reverse/$seed
[ -f "$out/teacher/test.jsonl" ] || python $make --out "$out/teacher" --seed "$seed" --chats 448
[ -f "$out/test.jsonl" ] || python $make --out "$out" --seed "$seed" --width 32
tether sft $recipe/teacher.yaml trainer.seed="$seed"
tether train $recipe/run.yaml trainer.seed="$seed" "$@"
