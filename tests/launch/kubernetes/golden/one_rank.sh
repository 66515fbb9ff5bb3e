#!/bin/bash
# seed (seed checkpoint) of the experiment experiments/llama3_8b.toml: 1 rank in 1 pod.
# Written by converge, for the pods of jobset.json beside it.

set -euo pipefail

converge_run_folder=/store/runs/run-0123456789ab

# The step reads its place from these variables, as on a node of Slurm.
export SLURM_NODEID=${JOB_COMPLETION_INDEX:?is set by Kubernetes in the pods of an Indexed Job}
export SLURM_JOB_ID=1193046 SLURM_RESTART_COUNT=0

converge_call=1
export SLURM_STEP_NUM_NODES=1

# A pod must not mix its evidence with that of an earlier one: only the first can make this folder.
converge_started=$converge_run_folder/started/call-$(printf %02d "$converge_call").pod
converge_token=$(< /proc/sys/kernel/random/uuid)
mkdir -p "$converge_run_folder/started"
converge_logs=$converge_run_folder/logs/call-$(printf %02d "$converge_call")
[ "$SLURM_NODEID" -eq 0 ] || converge_logs=$converge_logs.node-$SLURM_NODEID
if [ -e "$converge_logs" ] || [ -e "$converge_run_folder/ended.json" ] ||
    ! mkdir "$converge_started-$SLURM_NODEID"; then
    echo "$converge_run_folder: has files of an earlier start of pod $SLURM_NODEID in call" \
        "$converge_call; let converge submit this job again" >&2
    exit 1
fi
echo "$converge_token" > "$converge_started-$SLURM_NODEID"/token

# The first pod writes how the job ended. A call before the last is only an end if it fails.
finish() {
    converge_code=$?
    trap '' TERM
    if [ "$SLURM_NODEID" -ne 0 ] ||
        { [ "$converge_code" -eq 0 ] && [ "$converge_call" -lt 1 ]; }; then
        exit "$converge_code"
    fi
    if [ "$(cat "$converge_started-0/token" 2> /dev/null)" != "$converge_token" ]; then
        exit "$converge_code"  # this folder is of a later run by now
    fi
    printf '{"schema": 1, "returncode": %d, "restart": 0, "ran_s": %d}\n' \
        "$converge_code" "$SECONDS" > "$converge_run_folder/ended.json.part"
    mv "$converge_run_folder/ended.json.part" "$converge_run_folder/ended.json"
    exit "$converge_code"
}
stop() {
    trap '' TERM
    if [ -n "${converge_step:-}" ]; then
        kill -TERM "$converge_step" 2> /dev/null || true
        wait "$converge_step" || true
    fi
    exit 143
}
trap finish EXIT
trap stop TERM

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

/tools/bin/python -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 1 -- \
    --nnodes=1 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-conf=store_type=file --local-addr=127.0.0.1 --max-restarts=0 --redirects=3 \
    -m converge_harness.rank /store/runs/run-0123456789ab/job.json &

converge_step=$!
wait "$converge_step"
