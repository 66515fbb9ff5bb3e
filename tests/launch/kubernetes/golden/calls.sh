#!/bin/bash
# shrink and grow (test) of the experiment experiments/llama3_8b.toml: 16 ranks in 2 pods of 8.
# Written by converge, for the pods of jobset.json beside it.

set -euo pipefail

converge_run_folder=/store/runs/run-0123456789ab

# The step reads its place from these variables, as on a node of Slurm.
export SLURM_NODEID=${JOB_COMPLETION_INDEX:?is set by Kubernetes in the pods of an Indexed Job}
export SLURM_JOB_ID=1193046 SLURM_RESTART_COUNT=0

case ${1:?which of 3 calls} in
1)
converge_call=1
export SLURM_STEP_NUM_NODES=2
converge_pods=cv-shrink-and-grow-0123456789ab-call-1-0
;;
2)
converge_call=2
export SLURM_STEP_NUM_NODES=1
;;
3)
converge_call=3
export SLURM_STEP_NUM_NODES=2
converge_pods=cv-shrink-and-grow-0123456789ab-call-3-0
;;
esac

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
        { [ "$converge_code" -eq 0 ] && [ "$converge_call" -lt 3 ]; }; then
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

# Where ranks meet. A pod has a name in the JobSet's service once it has an address, which is before
# its image is pulled, and agents wait only a minute for the first: so all wait until all are ready.
converge_meeting_port=29500
if [ "$SLURM_STEP_NUM_NODES" -gt 1 ]; then
    touch "$converge_started-$SLURM_NODEID/ready"
    for ((converge_pod = 0; converge_pod < SLURM_STEP_NUM_NODES; converge_pod++)); do
        until [ -e "$converge_started-$converge_pod/ready" ] &&
            { [ -n "${CONVERGE_HEAD_NODE:-}" ] ||
            getent hosts "$converge_pods-$converge_pod.cv-shrink-and-grow-0123456789ab" > /dev/null; }; do
            if [ "$SECONDS" -gt 1800 ]; then
                echo "pod $converge_pod of $converge_pods: not ready after 1800 s" >&2
                exit 1
            fi
            sleep 2
        done
    done
    if [ -z "${CONVERGE_HEAD_NODE:-}" ]; then
        CONVERGE_HEAD_NODE=$converge_pods-0.cv-shrink-and-grow-0123456789ab
        export SLURMD_NODENAME=$converge_pods-$SLURM_NODEID.cv-shrink-and-grow-0123456789ab
    fi
fi
converge_meeting_place=${CONVERGE_HEAD_NODE:-}:$converge_meeting_port

case ${1:?which of 3 calls} in
1)
# Segment 1 of 3: steps 1 to 10, 16 ranks.
/tools/bin/python -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 1 -- \
    --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$converge_meeting_place" --max-restarts=0 --redirects=3 \
    -m converge_harness.rank /store/runs/run-0123456789ab/job.json --segment 0 &
;;
2)
# Segment 2 of 3: steps 11 to 20, 4 ranks.
/tools/bin/python -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 2 -- \
    --nnodes=1 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-conf=store_type=file --local-addr=127.0.0.1 --max-restarts=0 --redirects=3 \
    -m converge_harness.rank /store/runs/run-0123456789ab/job.json --segment 1 &
;;
3)
# Segment 3 of 3: steps 21 to 30, 16 ranks.
/tools/bin/python -m converge_harness.rank.start.node --logs /store/runs/run-0123456789ab/logs --call 3 -- \
    --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint="$converge_meeting_place" --max-restarts=0 --redirects=3 \
    -m converge_harness.rank /store/runs/run-0123456789ab/job.json --segment 2 &
;;
esac

converge_step=$!
wait "$converge_step"
