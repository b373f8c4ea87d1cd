#!/usr/bin/env bash
# A script in a container, on one of several machines with GPUs:
#
#     lessons/lesson21_clusters/start/container.sh IMAGE SCRIPT [FLAG...]
#
# NNODES=1 and ENDPOINT=localhost:29500 are torchrun's; on several machines give all of them the same.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "usage: $0 IMAGE SCRIPT [FLAG...], the folder that you are in is /workspace" >&2
    exit 2
fi
image=$1
shift
# DataLoader's workers and NCCL share memory, which Docker limits to 64 MB; InfiniBand locks pages.
cards=()
[[ ! -e /dev/infiniband ]] || cards=(--device=/dev/infiniband)
exec docker run --rm --gpus=all --ipc=host --ulimit memlock=-1 --network=host "${cards[@]}" \
    --volume="$PWD:/workspace" --workdir=/workspace "$image" \
    torchrun --nnodes="${NNODES:-1}" --nproc-per-node=gpu --rdzv-backend=c10d \
    --rdzv-endpoint="${ENDPOINT:-localhost:29500}" "$@"
