#!/bin/bash
# mine (test) of the experiment experiments/llama3_8b.toml: 16 ranks on 2 nodes of 8.
# Written by converge. To submit it by hand:
#   sbatch /store/runs/run-0123456789ab/job.sh

#SBATCH --job-name=cv-mine-0123456789ab
#SBATCH --chdir="/store/runs/run-0123456789ab"
#SBATCH --output=slurm.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --requeue
#SBATCH --kill-on-invalid-dep=yes

set -euo pipefail

run_folder=/store/runs/run-0123456789ab

# Written however this script ends, for when Slurm has forgotten the job.
finish() {
    code=$?
    trap '' TERM
    printf '{"schema": 1, "returncode": %d, "restart": %d}\n' \
        "$code" "${SLURM_RESTART_COUNT:-0}" > "$run_folder/ended.json.part"
    mv "$run_folder/ended.json.part" "$run_folder/ended.json"
    exit "$code"
}
trap finish EXIT
trap 'exit 143' TERM

# A job that starts must not use files of an earlier one.
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then
    (cd "$run_folder" && rm -rf ended.json inductor metrics.jsonl metrics.jsonl.part tensors in_force.json checkpoint datasets streaming output passes faults torn logs)
fi

# A job that Slurm has requeued starts over.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$run_folder" && rm -rf ended.json inductor metrics.jsonl metrics.jsonl.part tensors in_force.json checkpoint datasets streaming output)
fi

(cd "$run_folder" && mkdir -p output)

export MKL_NUM_THREADS=1
export NAME=ib0
export OMP_NUM_THREADS=1
export OPENBLAS_NUM_THREADS=1
export PATH='/env s/bin'${PATH:+:$PATH}
export PYTHONHASHSEED=0
export PYTHONUNBUFFERED=1
export STEPS=3
export TEXT='$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned'
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_AUTOGRAD_CACHE=0
export TORCHINDUCTOR_CACHE_DIR=/store/runs/run-0123456789ab/inductor
export TORCHINDUCTOR_COMPILE_THREADS=1
export TORCHINDUCTOR_FX_GRAPH_CACHE=0

# Where ranks meet. Jobs that run at the same time have nearby ids, so other ports.
head_node=${CONVERGE_HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
meeting_port=$((10000 + SLURM_JOB_ID % 20000))
meeting_place=$head_node:$meeting_port

cd '/home/me/it'"'"'s $HOME'

srun --nodes=2 --ntasks=2 --ntasks-per-node=1 \
    --cpus-per-task=32 --cpu-bind=none --export=ALL --kill-on-bad-exit=1 \
    bash -c '
set -eu
call=$(($2 + ${SLURM_RESTART_COUNT:-0}))
logs=$1/call-$(printf %02d "$call")
[ "$SLURM_NODEID" -eq 0 ] || logs=$logs.node-$SLURM_NODEID
mkdir -p "$logs"
python=$3
shift 3
exec "$python" -m torch.distributed.run "--rdzv-id=$SLURM_JOB_ID.$call" "--log-dir=$logs" \
    "--rdzv-conf=is_host=$((SLURM_NODEID == 0))" "$@" > "$logs/torchrun.log" 2>&1
' converge /store/runs/run-0123456789ab/logs 1 '/env s/bin/python' \
    --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$meeting_place" --max-restarts=0 --redirects=3 \
    train.py --text '$(touch pwned)`touch pwned`'"'"'"; touch pwned #
#SBATCH --array=0-9
touch pwned' --steps=3 --out=/store/runs/run-0123456789ab/output
