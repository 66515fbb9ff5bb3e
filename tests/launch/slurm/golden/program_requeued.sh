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

# A job that Slurm has requeued continues from its newest checkpoint.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    echo "restart $SLURM_RESTART_COUNT on $SLURM_JOB_NODELIST"
    (cd "$converge_run_folder" && rm -rf ended.json inductor)
fi

(cd "$converge_run_folder" && mkdir -p output checkpoint)

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
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Where ranks meet. Jobs that run at the same time have nearby ids, so other ports.
converge_head_node=${CONVERGE_HEAD_NODE:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}
converge_meeting_port=$((10000 + SLURM_JOB_ID % 20000))
converge_meeting_place=$converge_head_node:$converge_meeting_port

cd '/home/me/it'"'"'s $HOME'

# The program goes on from its newest complete checkpoint. Others are set aside.
converge_checkpoint=
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
    converge_checkpoint=$(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --relative=0 --cpu-bind=none --export=ALL run image '/env s/bin/python' -m converge_harness.rank.start.newest /store/runs/run-0123456789ab/job.json)
    [[ "$converge_checkpoint" == *"converge: the newest complete checkpoint is "* ]] || { echo "no newest checkpoint was named" >&2; exit 1; }
    converge_checkpoint=${converge_checkpoint##*"converge: the newest complete checkpoint is "}
    converge_checkpoint=${converge_checkpoint%%$'\n'*}
    echo "goes on from ${converge_checkpoint:-the start: no checkpoint is complete}"
fi

srun --nodes=2 --ntasks=2 --ntasks-per-node=1 \
    --cpus-per-task=32 --cpu-bind=none --export=ALL --kill-on-bad-exit=1 \
    run image \
    env FROM="$converge_checkpoint" '/env s/bin/python' -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 1 -- \
    --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$converge_meeting_place" --max-restarts=0 --redirects=3 \
    train.py --from="$converge_checkpoint" --every=4 /store/runs/run-0123456789ab/checkpoint
