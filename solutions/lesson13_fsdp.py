"""Lesson 13, the instructor's side: full sharding by hand, and what torch's fully_shard adds to it.

The lesson's one idea: ZeRO's stage 3 is a rule (whole only while it computes); FSDP is its
schedule: which tensors are one message, when the next one is fetched, what is thrown away. The
classes live in shared/fsdp, since later lessons train with them: flat_unit.py has one flat tensor
and its shard, fully_shard.py the hooks around forward and backward, prefetch.py the order of a
step, hybrid.py the mesh of two axes. checkpoint.py gives the parameters out by rows, as DTensors.

Points are the difficulty at the exercise (16 in all). What to ask behind a right answer: why are
the two units at the worst moment one of parameters and one of gradients; why is a larger unit
cheaper in messages and dearer in bytes; which of the two gathers could be left out, and what that
costs; why may nothing be fetched ahead across optimizer.step(); what crosses the slow link in a
hybrid, and how many bytes of it.
"""

from shared.fsdp.flat_unit import FlatUnit
from shared.fsdp.fully_shard import FullyShard
from shared.fsdp.hybrid import HybridShard, hybrid_shard
from shared.fsdp.prefetch import PrefetchingShard

__all__ = ["FlatUnit", "FullyShard", "HybridShard", "PrefetchingShard", "hybrid_shard"]

NOTES = {
    "13.1": """
FlatUnit: 3 points, 35 minutes. The shard and its numbers 1, memory given back 1, gradients 1.
Look for: resize_(0) on the storage and not `flat = None` (what autograd saved would keep it);
the float32 master rounded at gather(), never written back; group_src, not src, in a broadcast of
a group. Ask for the bytes of each message, and what happens to a gradient that is None.
Common mistakes: gather() that waits; the mean over the world in place of the group; a shard that
is a view of the whole tensor, which then is never freed; float32 messages for 16-bit parameters.
""",
    "13.2": """
FullyShard: 5 points, 70 minutes. One process's weights 2, two units 1, messages 1, 16 bits 1.
Look for: four moments in two hooks; a count of users for a module that is called twice; what is
sent when a gradient never comes; full_state_dict() from the shards and not from rounded copies.
Common mistakes: everything gathered at the module's start (right numbers, nothing saved); kept
whole from forward to backward; all gradients sent in finish_gradient_sync(); gradients freed
before they are reduced; parameters() of the inner module handed to the optimizer.
""",
    "13.3": """
PrefetchingShard: 4 points, 30 minutes. On its way in forward 1, in backward 1, at most two 1, and
right where the order changes 1. Look for: the order recorded, not taken from the list of units;
a start without a wait; nothing across the end of a step. Ask what stays exposed: the first
gather, the one at the turn, and the reduce-scatters.
""",
    "13.4": """
hybrid_shard: 4 points, 30 minutes. Groups 1, values 1, bytes across nodes 1, refusals 1.
Look for: every rank makes every group; the gradient of a shard, not of a unit, crosses nodes;
rank 0's numbers in every node. Ask for the bytes across the slow link: 2 (r-1)/r of S/s.
Common mistakes: rows and columns exchanged (right numbers: only the link feels it); the mean over
one of the axes; replicas that start with different numbers.
""",
}
