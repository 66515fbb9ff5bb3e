#!/bin/bash
# seed (seed checkpoint) of the experiment experiments/llama3_8b.toml: 1 rank on 1 node.
# Written by converge. To submit it by hand:
#   sbatch /store/runs/run-0123456789ab/job.sh

#SBATCH --job-name=cv-seed-0123456789ab
#SBATCH --chdir="/store/runs/run-0123456789ab"
#SBATCH --output=slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
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

export CUDA_VISIBLE_DEVICES=''
export MKL_NUM_THREADS=1
export OMP_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
export PYTHONHASHSEED=0
export PYTHONUNBUFFERED=1
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_AUTOGRAD_CACHE=0
export TORCHINDUCTOR_CACHE_DIR=/store/runs/run-0123456789ab/inductor
export TORCHINDUCTOR_COMPILE_THREADS=1
export TORCHINDUCTOR_FX_GRAPH_CACHE=0

srun --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --cpu-bind=none --export=ALL --kill-on-bad-exit=1 \
    /tools/bin/python -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 1 -- \
    --nnodes=1 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-conf=store_type=file --local-addr=127.0.0.1 --max-restarts=0 --redirects=3 \
    -m converge_harness.rank /store/runs/run-0123456789ab/job.json
