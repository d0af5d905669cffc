#!/usr/bin/env bash
# The main job on this machine, set-up included: installs the project into .venv, fetches the base
# model, and searches one adapter for questions about graphs among the mixtures of nine small experts,
# none of which was trained on such questions. A second run skips finished steps.
# Arguments go to the search.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
install
venv=${VENV:-.venv}
# Measured once: the type is part of the search, and must be the same when it is resumed.
quicker="$venv/.quicker_dtype"
if [ ! -s "$quicker" ]; then
    "$venv/bin/python" scripts/quicker_dtype.py >"$quicker"
fi
if [[ $(<"$quicker") == bfloat16 ]]; then
    set -- model.dtype=bfloat16 "$@"
fi
echo "searching: 2 to 5 minutes on two cores, up to 10 on older ones ..."
exec "$venv/bin/python" -m swarm.search experiment=quickstart name=quickstart "$@"
