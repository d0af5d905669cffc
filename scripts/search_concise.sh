#!/usr/bin/env bash
# Short answers that a reward model likes, searched as scripts/sweep.sh says:
#   GPUS=0,1,2 TRIALS=10 bash scripts/search_concise.sh
# The paper's reward model brings code of its own: task.scorer.trust_remote_code=true lets it run.
# It runs experiment=paper. The original's script of this name ran other flags (docs/pso.md); nearest to them is
#   bash scripts/search_concise.sh experiment=reference_code optimizer.particles=20 optimizer.restart_patience=0.67
exec bash "$(dirname "$0")/sweep.sh" rm_concise rm "$@"
