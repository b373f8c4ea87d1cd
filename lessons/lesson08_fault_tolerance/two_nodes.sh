#!/usr/bin/env bash
# Starts train.py on one of several machines. Give it on each of them, with that machine's number:
#
#     lessons/lesson08_fault_tolerance/two_nodes.sh 0 2 10.0.0.1:29500 --checkpoints DIR
#     lessons/lesson08_fault_tolerance/two_nodes.sh 1 2 10.0.0.1:29500 --checkpoints DIR
#
# ADDRESS is that of machine 0, as the others reach it. DIR must be on a disk that all of them see:
# rank 0, which writes, is on the machine whose address sorts first, and not always on number 0.
# What follows ADDRESS goes to train.py. When one has died, torchrun starts all again.
set -euo pipefail

usage() {
    echo "usage: $0 NODE NODES ADDRESS[:PORT] [FLAG...], NODE from 0 to NODES - 1" >&2
    echo "from the environment, with what they are without: SCRIPT=train.py beside this file" >&2
    echo "  NPROC=gpu (ranks a machine)  MAX_RESTARTS=3  LOGS=runs/lesson08_fault_tolerance/logs" >&2
    echo "  RUN_ID=two_nodes (another one for each run)  LOCAL_ADDR= (where others reach this one)" >&2
    exit 2
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# -ge 3 && $1 =~ ^[0-9]+$ && $2 =~ ^[0-9]+$ && $1 -lt $2 ]] || usage
node=$1 nodes=$2 address=$3
shift 3
[[ $address == *:* ]] || address=$address:29500
is_host=$((node == 0))
local_addr=${LOCAL_ADDR:-}
if [[ -z $local_addr && $node -eq 0 ]]; then local_addr=${address%:*}; fi

# Without it gloo may find dead ranks' addresses after a restart (pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# NCCL, where it finds the wrong network, or for a first look at a hang (lessons/when_something_does_not_work.md):
# export NCCL_SOCKET_IFNAME=eth0
# export NCCL_DEBUG=INFO
# export TORCH_FR_BUFFER_SIZE=20000

# Each rank's output goes to LOGS/nodeN/RUN_ID_*/attempt_*/LOCAL_RANK/ and to this terminal (tee).
# shellcheck disable=SC2086  # an empty local_addr is no argument
exec torchrun \
    --nnodes="$nodes" --nproc-per-node="${NPROC:-gpu}" --max-restarts="${MAX_RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-endpoint="$address" --rdzv-id="${RUN_ID:-two_nodes}" \
    --rdzv-conf="is_host=$is_host" ${local_addr:+--local-addr=$local_addr} \
    --shutdown-timeout=100 \
    --log-dir="${LOGS:-runs/lesson08_fault_tolerance/logs}/node$node" --redirects=3 --tee=3 \
    "${SCRIPT:-$here/train.py}" "$@"
