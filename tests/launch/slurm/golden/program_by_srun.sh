#!/bin/bash
# mine (test) of the experiment experiments/llama3_8b.toml: 16 ranks on 2 nodes of 8.
# Written by converge. To submit it by hand:
#   sbatch /store/runs/run-0123456789ab/job.sh

#SBATCH --job-name=cv-mine-0123456789ab
#SBATCH --chdir="/store/runs/run-0123456789ab"
#SBATCH --output=slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
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
    (cd "$converge_run_folder" && rm -rf ended.json inductor metrics.jsonl metrics.jsonl.part tensors in_force.json checkpoint datasets streaming output passes faults torn logs)
fi

# A job that Slurm has requeued starts over.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$converge_run_folder" && rm -rf ended.json inductor metrics.jsonl metrics.jsonl.part tensors in_force.json checkpoint datasets streaming output)
fi

(cd "$converge_run_folder" && mkdir -p output)

export CONVERGE_JOB=/store/runs/run-0123456789ab/job.json
export MKL_NUM_THREADS=1
export NAME=ib0
export OMP_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
export PATH='/env s/bin'${PATH:+:$PATH}
export PYTHONHASHSEED=0
export PYTHONUNBUFFERED=1
export TEXT='of the site'
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_AUTOGRAD_CACHE=0
export TORCHINDUCTOR_CACHE_DIR=/store/runs/run-0123456789ab/inductor
export TORCHINDUCTOR_COMPILE_THREADS=1
export TORCHINDUCTOR_FX_GRAPH_CACHE=0

# Where ranks meet. Jobs that run at the same time have nearby ids, so other ports.
converge_head_node=${CONVERGE_HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
converge_meeting_port=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR=$converge_head_node MASTER_PORT=$converge_meeting_port

cd '/home/me/it'"'"'s $HOME'

srun --nodes=2 --ntasks=16 --ntasks-per-node=8 \
    --cpus-per-task=4 --cpu-bind=none --export=ALL --kill-on-bad-exit=1 \
    bash -c '
set -eu
converge_call=$(($2 + ${SLURM_RESTART_COUNT:-0}))
converge_logs=$1/call-$(printf %02d "$converge_call")
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID LOCAL_WORLD_SIZE=${SLURM_STEP_TASKS_PER_NODE%%[(,]*}
shift 2
converge_own=$converge_logs/srun/attempt_0/$RANK
mkdir -p "$converge_own"
trap : TERM  # SIGTERM reaches the program too; bash has to outlive it and note how it ended
converge_code=0
"$@" > "$converge_own/stdout.log" 2> "$converge_own/stderr.log" || converge_code=$?
echo "$converge_code $(date +%s.%N)" > "$converge_own/ended"
exit "$converge_code"
' converge /store/runs/run-0123456789ab/logs 1 env STEPS=3 'TEXT=$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned' \
    '/env s/bin/python' train.py --text '$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned' --steps=3 --out=/store/runs/run-0123456789ab/output
