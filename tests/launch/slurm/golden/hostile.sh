#!/bin/bash
# x touch pwned (test) of the experiment $(touch pwned)`touch pwned`'"; touch pwned # #SBATCH --array=0-9 touch pwned: 16 ranks on 2 nodes of 8.
# $(touch pwned)`touch pwned`'"; touch pwned # #SBATCH --array=0-9 touch pwned
# Written by converge. To submit it by hand:
#   sbatch /store/runs/run-0123456789ab/job.sh

#SBATCH --job-name=cv-x-touch-pwned-0123456789ab
#SBATCH --chdir="/store/runs/run-0123456789ab"
#SBATCH --output=slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes

set -euo pipefail

converge_run_folder=/store/runs/run-0123456789ab

# Written however this script ends, for when Slurm has forgotten the job.
finish() {
    converge_code=$?
    trap '' TERM
    printf '{"schema": 1, "returncode": %d, "restart": %d}\n' \
        "$converge_code" "${SLURM_RESTART_COUNT:-0}" > "$converge_run_folder/ended.json.part"
    mv "$converge_run_folder/ended.json.part" "$converge_run_folder/ended.json"
    exit "$converge_code"
}
trap finish EXIT
trap 'exit 143' TERM

# A job that starts must not use files of an earlier one.
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then
    (cd "$converge_run_folder" && rm -rf ended.json inductor metrics.jsonl metrics.jsonl.part tensors in_force.json checkpoint datasets streaming passes faults torn logs)
fi

# A job that Slurm has requeued starts over.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$converge_run_folder" && rm -rf ended.json inductor metrics.jsonl metrics.jsonl.part tensors in_force.json checkpoint datasets streaming)
fi

set +u  # modules and the like read variables that are not set
type module > /dev/null 2>&1 || source /etc/profile
module load '$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned'
export CUDA_VISIBLE_DEVICES=''
export MKL_NUM_THREADS=1
export OMP_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
export PYTHONHASHSEED=0
export PYTHONUNBUFFERED=1
export TEXT='$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned'
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_AUTOGRAD_CACHE=0
export TORCHINDUCTOR_CACHE_DIR=/store/runs/run-0123456789ab/inductor
export TORCHINDUCTOR_COMPILE_THREADS=1
export TORCHINDUCTOR_FX_GRAPH_CACHE=0
set -u

# Where ranks meet. Jobs that run at the same time have nearby ids, so other ports.
converge_head_node=${CONVERGE_HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
converge_meeting_port=$((10000 + SLURM_JOB_ID % 20000))
converge_meeting_place=$converge_head_node:$converge_meeting_port

srun --nodes=2 --ntasks=2 --ntasks-per-node=1 \
    --cpu-bind=none --export=ALL --kill-on-bad-exit=1 \
    '$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned' \
    exec '$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned' \
    /tools/bin/python -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 1 -- \
    --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$converge_meeting_place" --max-restarts=0 --redirects=3 \
    -m converge_harness.rank /store/runs/run-0123456789ab/job.json
