#!/usr/bin/env bash
# One of several machines without a scheduler. Give it on each, with that machine's number:
#
#     lessons/lesson21_clusters/start/torchrun.sh 0 2 10.0.0.1 SCRIPT [FLAG...]
#     lessons/lesson21_clusters/start/torchrun.sh 1 2 10.0.0.1 SCRIPT [FLAG...]
#
# The address is that of machine 0, as the others reach it. NPROC=gpu (ranks a machine), PORT=29500.
set -euo pipefail

if [[ $# -lt 4 || ! $1 =~ ^[0-9]+$ || ! $2 =~ ^[0-9]+$ || $1 -ge $2 ]]; then
    echo "usage: $0 NODE NODES ADDRESS SCRIPT [FLAG...], NODE from 0 to NODES - 1" >&2
    exit 2
fi
node=$1 nodes=$2 address=$3
shift 3
exec torchrun --nnodes="$nodes" --node-rank="$node" --nproc-per-node="${NPROC:-gpu}" \
    --rdzv-backend=static --master-addr="$address" --master-port="${PORT:-29500}" "$@"
