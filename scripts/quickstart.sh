#!/usr/bin/env bash
# The main job on this machine, set-up included: installs the project into .venv, fetches the base
# model, and searches nine small experts for the best mixture on a task of small graphs.
# Under ten minutes on two CPU cores; a second run skips what is done. Arguments go to the search.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
install
exec "${VENV:-.venv}/bin/python" -m swarm.search \
    task=nlgraph_mini experiment=quickstart name=quickstart "$@"
