# Makes a virtual environment with tether and the given extras; sourced by the other scripts.
# Usage: . scripts/setup.sh EXTRAS
#   TETHER_VERSIONS  pinned (constraints.txt, the default), newest (when the folder is made), or lowest (the lower
#                    bounds of pyproject.toml); torch is that of constraints.txt in each
#   PYTHON           another interpreter
#   TETHER_VENV      the folder; else .venv, with the names of the two above, such as .venv-newest-3.13
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # else each process compiles what it imports anew
cd "$(dirname "${BASH_SOURCE[0]}")/.."
versions="${TETHER_VERSIONS:-pinned}" interpreter="${PYTHON:-python3}"
pinned_torch="$(grep '^torch==' constraints.txt)"
case "$versions" in
  pinned) constraints="$(cat constraints.txt)" ;;
  newest) constraints="$pinned_torch" ;;
  lowest) constraints="$pinned_torch"$'\n'"$("$interpreter" scripts/lowest_versions.py "$1")" ;;
  *) echo "TETHER_VERSIONS=$versions: must be pinned, newest or lowest" >&2; exit 2 ;;
esac
venv=.venv
[ "$versions" = pinned ] || venv="$venv-$versions"
[ -z "${PYTHON:-}" ] || venv="$venv-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
venv="${TETHER_VENV:-$venv}"
[ -x "$venv/bin/python" ] || "$interpreter" -m venv "$venv"
made="$PWD [$1] $(echo "$constraints" | cat pyproject.toml - | cksum)"
# pip takes seconds to find that nothing is missing; whatever else installs or removes a package touches site-packages.
if [ "$(cat "$venv/made" 2> /dev/null)" != "$made" ] || [ -n "$(find "$venv"/lib/python*/site-packages -maxdepth 0 -newer "$venv/made")" ]; then
  echo "installing tether[$1] into $venv ..."
  # A torch that is there is kept, of whatever build, if it is new enough.
  oldest="$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)"
  torch="$("$venv/bin/python" scripts/installed_torch.py "$oldest")"
  if [ -z "$torch" ] && [ "$(uname)" = Linux ] && ! command -v nvidia-smi > /dev/null; then
    echo "torch comes with CUDA from the package index: about 5 GB with its libraries. Without a GPU, stop this (Ctrl-C) and"
    echo "take the build for CPUs, 200 MB: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu and start again"
  fi
  case "$1" in *quickstart* | *test*)
    command -v "${CC:-cc}" > /dev/null || echo "pycosat, a requirement of reasoning-gym, needs a C compiler: apt-get install gcc python3-dev" ;;
  esac
  echo "$constraints" | sed "s/^torch==.*/${torch:-&}/" > "$venv/constraints.txt"
  # pip would compile 29,000 files, which takes two minutes. Of those a tenth is used, and compiled by the first import,
  # which is here so that it makes the folders of compiled files before the time of the mark below; so are the kernels.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -c "$venv/constraints.txt" -e ".[$1]"
  "$venv/bin/python" -m tether.kernels.precompile
  "$venv/bin/python" -c 'import tether.text.build'
  echo "$made" > "$venv/made"
fi
export PATH="$(cd "$venv" && pwd)/bin:$PATH"
