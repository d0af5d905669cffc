#!/usr/bin/env bash
# Short answers with high reward; see scripts/sweep.sh:
#   GPUS=0,1,2 TRIALS=10 bash scripts/search_concise.sh
# The paper's reward model has custom code: task.scorer.trust_remote_code=true allows it.
# It runs experiment=paper. The original's script of this name uses other flags (docs/pso.md); closest to them is
#   bash scripts/search_concise.sh experiment=reference_code optimizer.particles=20 optimizer.restart_patience=0.67
exec bash "$(dirname "$0")/sweep.sh" rm_concise rm "$@"
