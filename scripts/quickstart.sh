#!/usr/bin/env bash
# The main job on this machine, set-up included: installs the project into .venv, fetches the base
# model, and searches nine small experts of one skill each for one model that has all nine.
# The search took five and a half minutes on one thread of a processor that multiplies bfloat16;
# in float32 it took twelve. A second run skips finished steps. Arguments go to the search.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
install
python="${VENV:-.venv}/bin/python"
# Several times quicker where the processor multiplies bfloat16.
fast='import torch; c = torch.cpu; print(c._is_amx_tile_supported() or c._is_avx512_bf16_supported())'
if [[ $("$python" -c "$fast" 2>/dev/null) == True ]]; then
    set -- model.dtype=bfloat16 "$@"
fi
echo "searching: about five minutes where the processor multiplies bfloat16, twelve elsewhere ..."
exec "$python" -m swarm.search task=skills experiment=quickstart name=quickstart "$@"
