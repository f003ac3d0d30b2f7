#!/usr/bin/env bash
# Sets up and runs all tests. Further arguments go to pytest, for example: scripts/test.sh tests/algorithms -x
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" dev,quickstart,lora,tensorboard,wandb,mlflow
exec python -m pytest "$@"
