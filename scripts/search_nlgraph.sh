#!/usr/bin/env bash
# NLGraph, a single task; see scripts/sweep.sh:
#   GPUS=0,1,2 TRIALS=10 bash scripts/search_nlgraph.sh
# It runs experiment=paper. The original's script of this name uses other flags (docs/pso.md); closest to them is
#   bash scripts/search_nlgraph.sh experiment=reference_code optimizer.particles=20 optimizer.restart_patience=0.67
exec bash "$(dirname "$0")/sweep.sh" nlgraph nlgraph "$@"
