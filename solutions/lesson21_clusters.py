"""Lesson 21, the instructor's side: three questions to all ranks, and what answers them.

The lesson's one idea: on a cluster the rank that raises is seldom the rank at fault, and no rank
alone knows. Each tool brings together what every rank saw and looks for the one that differs: in
links, in seconds before the collective, in the calls that were made. The comparison is with the
others, never with a limit from elsewhere.

Points are the difficulty at the exercise (7 in all). What to ask behind a right answer: what the
tool says when two of three ranks are bad; what it cannot see (a link inside a node, a hang inside
a call that all have made); why a threshold in milliseconds would be of no use.
"""

from shared.clusters.hangs import explain_hang
from shared.clusters.odd import find_odd
from shared.clusters.stragglers import find_straggler
from shared.clusters.verdicts import Hang, Odd, Straggler

__all__ = ["Hang", "Odd", "Straggler", "explain_hang", "find_odd", "find_straggler"]

NOTES = {
    "21.1": """
find_odd: 2 points, 15 minutes. Compared with links among the others 1, both directions 1. Ask why
the fastest link and not the mean: in a table of three ranks every healthy one has a link to the bad
one. Ask what a whole slow node looks like (nobody is odd: run one rank a node).
Common mistakes: the diagonal's zeros as a rank's fastest link; a median over all links, the rank's
own among them; rows alone, so that a rank that receives slowly is not seen.
""",
    "21.2": """
find_straggler: 2 points, 15 minutes. Most steps 1, what it cost 1. Ask which times they would
collect in their own training (before the first bucket's all-reduce, not around the step).
Common mistakes: means, which one long pause decides; the median of all ranks with its own in it;
the slowest rank where nobody is late.
""",
    "21.3": """
explain_hang: 3 points, 25 minutes. Missing 1, odd 1, windows and groups 1. Ask what the recording
of a rank that died is (none), and why a majority is needed to call a rank odd.
Common mistakes: calls compared by their place in the list, which a full buffer shifts; rank 0 as
the one that is right; ranks that are not in a group counted as missing from it; a healthy rank
accused because its buffer, one for all groups, is full of another group's calls.
""",
}
