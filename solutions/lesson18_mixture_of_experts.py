"""Lesson 18, the instructor's side: who computes a token, and whose gradient is whose.

The lesson's one idea: a layer may have many networks if each token is computed by few of them.
Parameters and operations a token part ways, and three things follow. The choice is a discrete one,
so a count without a gradient has to be kept even by something that has one, or by a bias. The
numbers of rows are known at run time alone, so messages are uneven, and ranks with no rows still
take part. And an expert is on some of the ranks: backward has brought it the gradients of a whole
expert-parallel group, so the mean over all ranks' losses is not a mean over those that have it.

Points are the difficulty at the exercise (17 in all). What to ask behind a right answer: what would
the router learn from if k = 1 and the weight were 1; what a rank sends in backward; which messages
a rank with no rows may leave out (none); whose losses are in an expert's gradient after backward.
"""

from shared.mixture_of_experts.dispatch import Dispatcher, exchange
from shared.mixture_of_experts.layer import MoELayer
from shared.mixture_of_experts.parallel import average_gradients
from shared.mixture_of_experts.routing import balance_loss, top_k_router, within_capacity

__all__ = [
    "Dispatcher",
    "MoELayer",
    "average_gradients",
    "balance_loss",
    "exchange",
    "top_k_router",
    "within_capacity",
]

NOTES = {
    "18.1a": """
top_k_router: 2 points, 20 minutes. The weights for k = 1 1, the bias in the choice alone 1.
Ask what the gradient of the router is if the only weight is 1 by construction.
Common mistakes: softmax of the k chosen logits, whatever k is; the bias in the weights as well.
""",
    "18.1b": """
balance_loss: 2 points, 20 minutes. Counts of all ranks 1, the gradient through the probabilities 1.
Ask for the loss of a router that sends everything to one expert with certainty (E), and why the
mean of the ranks' own losses is not the batch's.
Common mistakes: counts of this rank alone; first choices alone; mean probabilities on both sides.
""",
    "18.2": """
MoELayer: 3 points, 35 minutes. Each expert once, with its own rows 1; weights at their rows 1; an
expert without rows 1. Ask how many operations the layer has for E = 8 and for E = 64.
Common mistakes: every expert computes all tokens and a mask throws most of it away; experts without
rows are skipped, so that some ranks have no gradient where others have one.
""",
    "18.3a": """
exchange: 2 points, 20 minutes. Both lists swapped in backward 1. Ask what the derivative of "row 3
went to rank 1" is. Common mistakes: all_to_all_single as it is, which has no gradient; rows padded
to the largest part.
""",
    "18.3b": """
Dispatcher: 3 points, 35 minutes. By own expert, not by rank 1, and back again 1. Ask for the order
on paper for two ranks and four experts before any code.
Common mistakes: the order on arrival is by rank; the way back forgets to undo the regrouping.
""",
    "18.4": """
within_capacity: 2 points, 20 minutes. The order of choices 1. Ask which tokens of a sequence are
dropped first (the last ones), and what becomes of a dropped token (the residual stream carries it).
Common mistakes: a count for each column, so that an expert takes k times its capacity.
""",
    "18.5": """
average_gradients: 3 points, 30 minutes. The divisor of the experts 1, the groups 1, gradients that
are None 1. Ask whose losses an expert's gradient has in it when backward ends.
Common mistakes: the mean over dp, too large by the size of ep, which AdamW hides and clipping does
not; an all-reduce over all ranks, which mixes different experts.
""",
}
