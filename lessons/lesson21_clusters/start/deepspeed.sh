#!/usr/bin/env bash
# DeepSpeed's launcher: over ssh to every machine of a hostfile, one rank a slot.
#
#     lessons/lesson21_clusters/start/deepspeed.sh HOSTFILE SCRIPT [FLAG...]
#
# Every machine needs the course in the same place and ssh without a password, and this one pdsh,
# by which the launcher calls the others. It copies few variables to them (those of NCCL, PYTHON and
# some more); put the rest into ~/.deepspeed_env, a NAME=VALUE a line. --no_local_rank: scripts read
# LOCAL_RANK, and argparse would refuse the --local_rank=N that the launcher adds otherwise.
set -euo pipefail

if [[ $# -lt 2 || ! -r $1 ]]; then
    echo "usage: $0 HOSTFILE SCRIPT [FLAG...], HOSTFILE with a line \"host slots=8\" a machine" >&2
    exit 2
fi
hostfile=$1
shift
exec deepspeed --hostfile="$hostfile" --master_port="${PORT:-29500}" --no_local_rank "$@"
