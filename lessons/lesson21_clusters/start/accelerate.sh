#!/usr/bin/env bash
# Accelerate's launcher on one of several machines. Give it on each, with that machine's number:
#
#     lessons/lesson21_clusters/start/accelerate.sh 0 2 8 10.0.0.1 SCRIPT [FLAG...]
#
# NODE NODES RANKS_A_NODE ADDRESS: it counts the ranks of all machines (--num_processes), torchrun
# those of one. What the flags do not say comes from ~/.cache/huggingface/accelerate, if that is there.
set -euo pipefail

if [[ $# -lt 5 || ! $1 =~ ^[0-9]+$ || ! $2 =~ ^[0-9]+$ || ! $3 =~ ^[0-9]+$ || $1 -ge $2 ]]; then
    echo "usage: $0 NODE NODES RANKS_A_NODE ADDRESS SCRIPT [FLAG...]" >&2
    exit 2
fi
node=$1 nodes=$2 ranks=$3 address=$4
shift 4
exec accelerate launch --multi_gpu --num_machines="$nodes" --machine_rank="$node" \
    --num_processes="$((nodes * ranks))" --main_process_ip="$address" \
    --main_process_port="${PORT:-29500}" --mixed_precision=no --dynamo_backend=no "$@"
