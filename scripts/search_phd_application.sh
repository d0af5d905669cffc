#!/usr/bin/env bash
# Advice on PhD applications, rated by a judge; see scripts/sweep.sh:
#   GPUS=0,1,2 TRIALS=10 bash scripts/search_phd_application.sh
# The judge: task.scorer.model.model=NAME, its key in $OPENAI_API_KEY (conf/scorer/judge.yaml has more).
# It runs experiment=paper. The original's script of this name uses other flags (docs/pso.md); closest to them is
#   bash scripts/search_phd_application.sh experiment=reference_code optimizer.particles=20 optimizer.restart_patience=0.67
exec bash "$(dirname "$0")/sweep.sh" human human_phd_application "$@"
