#!/usr/bin/env bash
# The main job on this machine, set-up included: installs the project into .venv, fetches the base
# model, and searches nine small experts of one skill each for one model that has all nine.
# On two cores that multiply bfloat16 a search for one adapter took 2 min 37 s; with AVX2 only, in
# float32, the search and its comparison on test took 15 min 16 s. A second run skips finished steps.
# Arguments go to the search.
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
# Two workers of one position each take less time than one worker with two threads, and four items
# of a gradient step each than eight on one of them.
if [[ " $* " != *" gpus="* && " $* " != *" executor"* && $(nproc 2>/dev/null || echo 2) -gt 1 ]]; then
    set -- executor=processes executor.workers=2 job.examples=4 "$@"
fi
echo "searching: on two cores about three minutes with bfloat16 instructions, ten with AVX-512, fifteen without ..."
exec "$python" -m swarm.search task=skills experiment=quickstart name=quickstart "$@"
