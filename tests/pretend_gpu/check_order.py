"""Read what PRETEND_NCCL_LOG has recorded: would NCCL match these calls?

python check_order.py LOG...   (LOG as given in PRETEND_NCCL_LOG; the ranks' files are LOG.PID)

Collectives: the ranks of a group make the same ones in the same order. Messages that are not in a
batch: between two ranks of a group the n-th call of one is the other end of the n-th call of the
other, since NCCL runs them on one stream in their order and ignores tags. Both sending first is
told as well: it works for messages that fit NCCL's buffers, and hangs beyond.
"""

import glob
import json
import pathlib
import sys
from collections import Counter, defaultdict

P2P = {"send", "recv"}


def check(log: str) -> tuple[Counter, list[str]]:
    collectives = defaultdict(lambda: defaultdict(list))  # by group and rank
    messages = defaultdict(lambda: defaultdict(list))  # by group and pair, and rank
    counts: Counter = Counter()
    for file in glob.glob(glob.escape(log) + ".*"):
        for line in pathlib.Path(file).read_text().splitlines():
            call = json.loads(line)
            counts[call["op"]] += 1
            group, rank, op = call["group"], call["rank"], call["op"]
            if op not in P2P:
                collectives[group][rank].append(op)
            elif call["batch"] < 0:
                pair = tuple(sorted((rank, call["peer"])))
                messages[group, pair][rank].append((op, call["bytes"]))
    found = []
    for group, by_rank in collectives.items():
        if len({tuple(ops) for ops in by_rank.values()}) > 1:
            sizes = {rank: len(ops) for rank, ops in by_rank.items()}
            found.append(f"group {group}: the ranks' collectives differ {sizes}")
    for (group, pair), by_rank in messages.items():
        one, other = (by_rank.get(rank, []) for rank in pair)
        if len(one) != len(other):
            found.append(f"group {group}, ranks {pair}: {len(one)} and {len(other)} messages")
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            if a[0] == b[0]:
                found.append(f"group {group}, ranks {pair}: both {a[0]} in message {number}")
                break
            if a[1] != b[1]:
                found.append(f"group {group}, ranks {pair}: {a} meets {b} in message {number}")
                break
    return counts, found


if __name__ == "__main__":
    for log in sys.argv[1:]:
        counts, found = check(log)
        print(f"{log}: {dict(counts)}" + ("" if counts else " no calls"))
        print(*(f"    {each}" for each in found), sep="\n", end="\n" if found else "")
