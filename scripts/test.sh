#!/usr/bin/env bash
# Sets up and runs the tests. Further arguments go to pytest, for example:
#   scripts/test.sh tests/algorithms -x
#   scripts/test.sh -m slow       # the long ones, which are left out otherwise; -m '' for all
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
# Large pages: see src/tether/runtime/huge_pages.py.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 THP_MEM_ALLOC_ENABLE=1
# Several processes share the cores: threads that wait must not keep one busy.
export OMP_WAIT_POLICY=passive
# A file of tests stays in one process, which keeps what its fixtures made; tests/conftest.py says in which order. One
# process more than there are cores, as tests wait for servers, Ray, or what they killed.
workers=$(($(getconf _NPROCESSORS_ONLN) + 1))
exec python -m pytest -n "$workers" --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
