"""Lesson 22, the instructor's side: other people's loops, and what they decide for you.

The lesson's one idea: a framework is a set of defaults. Its curve is the reference curve once every
default that matters has been named, and each of them can be found by changing one thing at a time.
The first exercise is that search; the other two write one configuration in two other languages, and
are right when numbers and bytes are the same.

Points are the difficulty at the exercise (7 in all). What to ask behind a right answer: which
settings cannot be seen in the curve at all; why one setting at a time is not enough; what the
Trainer does on a CPU with `fsdp=True`, and how anybody would notice; which of DeepSpeed's defaults
is a number that no TrainingArguments has.
"""

from shared.ecosystem.explain import explain_difference
from shared.ecosystem.translate import deepspeed_config, shard_as_trainer

__all__ = ["deepspeed_config", "explain_difference", "shard_as_trainer"]

NOTES = {
    "22.1": """
explain_difference: 2 points, 15 minutes. The smallest set 1, runs counted 1. Ask for
two settings that hide each other, and for two that cancel.
Common mistakes: every setting that has an effect alone is listed; the last loss is compared, not
the curve; the same settings are run twice.
""",
    "22.2": """
deepspeed_config: 3 points, 20 minutes. Batch and optimizer 1, clipping 1, what is cut 1. Ask which
keys DeepSpeed would have filled with numbers of its own (clipping 1.0, a bucket of 2 GB).
Common mistakes: `auto` left standing; the persistence threshold left at 100,000; a scheduler, which
is a step behind; the defaults of torch's AdamW in place of the Trainer's.
""",
    "22.3": """
shard_as_trainer: 2 points, 15 minutes. Units 1, precision and options 1. Ask when the optimizer may
be made, and in which dtype the weights are that it updates.
Common mistakes: the root alone; the weights cast to bf16; the root before its blocks; reduction in
float32 where Accelerate reduces in bf16.
""",
}
