"""Lesson 14, the instructor's side: one matrix over several ranks, and what has to be sent.

The lesson's one idea: a matrix product can be cut so that the ranks need nothing from each other
(by columns: each has some of the outputs) or so that they owe each other a sum (by rows: each has a
part of every output). Columns first and rows second cancel: what the first leaves in parts is what
the second takes in parts, so a pair of layers costs one all-reduce in forward and one in backward.
What is *not* cut (norms, dropout, the residual stream) has to be the same on all ranks, in numbers
and in random numbers; the classes live in shared/tensor_parallel, since lesson 16 trains with them.

Points are the difficulty at the exercise (16 in all). What to ask behind a right answer: where in
backward does the conjugate of this message come, and why; why a head is never cut; which parameters
see a whole gradient and which a part; what changes if two ranks drop different features of the
residual stream; what a step sends when the batch doubles, and what data parallelism sends then.
"""

from shared.tensor_parallel.blocks import parallel_block
from shared.tensor_parallel.conjugates import copy_to_ranks, sum_over_ranks
from shared.tensor_parallel.linears import ColumnParallelLinear, RowParallelLinear
from shared.tensor_parallel.vocabulary import vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "copy_to_ranks",
    "parallel_block",
    "sum_over_ranks",
    "vocab_parallel_cross_entropy",
]

NOTES = {
    "14.1a": """
copy_to_ranks: 2 points, 15 minutes. The sum in backward 1, into a tensor of its own 1.
Ask why forward may be free: what do the ranks do with the copy that makes their gradients parts?
Common mistakes: the gradient that comes in is all-reduced in place (autograd hands the same tensor
to other branches of an addition); a mean, by analogy with DDP.
""",
    "14.1b": """
sum_over_ranks: 2 points, 10 minutes. Ask for the derivative of y = x_0 + x_1 with respect to x_1 on
paper, and then why autograd's rule for a function of several processes would add the ranks'
upstream gradients up: each rank computes the *same* loss from y, not a part of it.
Common mistakes: torch.distributed.nn's all_reduce, whose backward sums again (t times too large).
""",
    "14.2": """
ColumnParallelLinear: 3 points, 20 minutes. Ask which dim of torch's weight the paper's "columns"
are, and what the sum of two ranks' outputs would mean (nothing: they are different features).
Common mistakes: weight[rank::t], fine alone and wrong beside heads that are consecutive; a chunk
that is a view, so that nothing is saved; each rank cuts a matrix of its own.
""",
    "14.3": """
RowParallelLinear: 3 points, 20 minutes. The bias after the sum 1.
Common mistakes: the bias on every rank before the sum (t times the bias), or a t-th of it on every
rank, which is right until the first step: each part then moves by the whole gradient.
""",
    "14.4": """
parallel_block: 3 points, 40 minutes. One copy for queries, keys and values 1, heads 1, random
numbers 1. Ask what happens to head_dim if num_heads is left as it was (nothing raises).
Common mistakes: three copies of one input, six messages in backward; a refusal that leaves the
block half cut.
""",
    "14.5": """
vocab_parallel_cross_entropy: 3 points, 40 minutes. Three numbers a position 1, the gradient 1, the
edges 1. Ask for the bytes of the row that is never whole: 4 V a position, here 3 x 4.
Common mistakes: each rank's own maximum subtracted, and the exponentials added up all the same; a
target that lies on another rank, clamped and counted.
""",
}
