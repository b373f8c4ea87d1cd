"""Lesson 04, the instructor's side: training a translator and translating with it.

All answers are used by later lessons, so they live in `shared/` and are re-exported here under
their exercise names. The lesson's one idea: training and translating are the same model used in two
ways, all positions at once because the answer is known, or one at a time because it is not.
Teacher forcing (04.1) and the cache (04.4) are the two sides of that.

Points are the difficulty at the exercise (16 in all). The sentence to ask for afterwards: "over
what is this a mean?" It separates those who have understood 04.2 from those whose numbers agree,
and it comes back with every engine from lesson 06 on.
"""

from shared.data.batching import collate as collate
from shared.training.decoding import beam_search as beam_search
from shared.training.decoding import greedy_decode as greedy_decode
from shared.training.loss import label_smoothed_loss as label_smoothed_loss
from shared.training.schedules import cosine_schedule as cosine_schedule
from shared.training.schedules import warmup_schedule as warmup_schedule

__all__ = [
    "beam_search",
    "collate",
    "cosine_schedule",
    "greedy_decode",
    "label_smoothed_loss",
    "warmup_schedule",
]

NOTES = {
    "04.1": """
collate: 2 points, 20 minutes.
Look for: three lists built before anything is padded, so that bos and eos never meet padding; each
side padded to its own longest row; num_tokens from the lengths, on the CPU.
Weigh it: the shift is the exercise. The masks were lesson 02.
Common mistakes: building bos + target + eos, padding it, and slicing [:, :-1] and [:, 1:]. For the
longest row that is right; shorter rows keep their eos in tgt_in, and the model is asked what comes
after the end (here the answer is padding, so the loss ignores it: the harm is small, and the code
is in many tutorials). row.append(eos), which changes the data set: from the second epoch on
sentences end twice. tgt_out equal to tgt_in: the loss falls to almost 0 within minutes, and the
translations are empty; the quickest way to see what the shift is for.
""",
    "04.2": """
label_smoothed_loss: 3 points, 20 minutes.
Look for: log_softmax, never log(softmax); a mean over real tokens; the uniform part over all V
tokens, the right one included.
Weigh it: half for the two terms, half for what the mean is taken over.
Common mistakes: the mean over the padded table; smoothing / (V - 1) for the wrong tokens alone,
which is another definition in use and differs by a factor on the loss of 1e-4 at V = 1000 (accept
the argument, not the answer: it fails the proof); 0 / 0 for a shard without tokens, which does
happen to the last rank of the last batch and then poisons all ranks through the all-reduce.
Ask: what is the smallest value this loss can take? It is not 0: the entropy of the smoothed target.
""",
    "04.3a": """
warmup_schedule: 1 point, 5 minutes.
Look for: one line. The two terms cross at step = warmup_steps, where the peak is
(d_model * warmup_steps)^-0.5.
Common mistakes: max for min; step 0, which a LambdaLR starts with, and which divides by zero.
""",
    "04.3b": """
cosine_schedule: 2 points, 10 minutes.
Look for: progress measured from the end of the warm-up, and held at 1 after the last step.
Common mistakes: step / total_steps as progress, so that the rate jumps down where the warm-up
ends; no clamp, so that a run continued for longer climbs back up the cosine.
""",
    "04.4": """
greedy_decode: 3 points, 25 minutes.
Look for: encode and start_cache once; the loop feeds one token a row; ended rows give padding.
Weigh it: right tokens without the cache are worth one point. The check counts positions, because
a translation that is right and quadratic is what most first versions are.
Common mistakes: ended rows that go on talking (their text is right up to the first eos, and the
score is not); the loop that stops with the first sentence that ends; no torch.no_grad(), which
keeps every step's activations and is noticed when the memory is full.
""",
    "04.5": """
beam_search: 5 points, 50 minutes.
Look for: sums of logarithms, one beam per sentence, the cache reordered with the prefixes, finished
translations kept apart from living prefixes.
Weigh it: a beam that is right for one sentence at a time is worth three points. There is more than
one sound rule for when to stop, and the checks accept all that find the best when the beam is wide
enough, equal greedy at 1, and come to an end.
Common mistakes: k equal prefixes at the start, so that the beam is k times greedy; finished ones
compared with living ones by their plain sums; forgetting to reorder the cache, which costs a few
BLEU and raises nothing: the most frequent silent error here; n ** penalty for ((5 + n) / 6) **
penalty, both of which are in use (fairseq has the first), so that a penalty means nothing without
its formula.
""",
}
