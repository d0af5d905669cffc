#!/usr/bin/env bash
#SBATCH --job-name=model-swarms
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
# A search on all GPUs of a SLURM job: sbatch scripts/search_slurm.sh name=first task=nlgraph
# Without name= a requeued job would start again; with it, the search resumes. PYTHON=... sets another python.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
[[ " $* " == *" name="* ]] || { echo "error: name=... is missing" >&2; exit 2; }
python=${PYTHON:-python}
ray=("$python" -m ray.scripts.scripts start --disable-usage-stats --block)
head=$(hostname)
address=$(hostname --ip-address | awk '{print $1}'):$((20000 + SLURM_JOB_ID % 20000))
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" "${ray[@]}" --head \
    --node-ip-address="${address%:*}" --port="${address#*:}" --include-dashboard=false >ray_head.log 2>&1 &
until (exec 3<>"/dev/tcp/${address%:*}/${address#*:}") 2>/dev/null; do sleep 1; done
if ((SLURM_JOB_NUM_NODES > 1)); then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" "${ray[@]}" \
        --address="$address" >ray_nodes.log 2>&1 &
fi

# All workers are requested, so that the search waits for nodes that are still joining.
"$python" -m swarm.search executor=ray executor.address="$address" executor.gpus_per_worker=1 \
    executor.workers=$((SLURM_JOB_NUM_NODES * SLURM_GPUS_ON_NODE)) executor.wait_s=300 "$@"
