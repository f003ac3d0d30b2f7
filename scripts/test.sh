#!/usr/bin/env bash
# Sets up and runs all tests. Further arguments go to pytest, for example: scripts/test.sh tests/algorithms -x
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" dev,quickstart,lora,tensorboard,wandb,mlflow,mujoco,envpool
# Large pages: see tether/runtime/huge_pages.py.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 THP_MEM_ALLOC_ENABLE=1
exec python -m pytest "$@"
