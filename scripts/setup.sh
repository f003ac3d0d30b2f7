# Makes the virtual environment .venv with tether and the given extras; sourced by the other scripts.
# Usage: . scripts/setup.sh EXTRAS   (TETHER_VENV: another folder; PYTHON: another interpreter)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${TETHER_VENV:-.venv}"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
echo "installing tether[$1] into $venv ..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]"
export PATH="$(cd "$venv" && pwd)/bin:$PATH"
