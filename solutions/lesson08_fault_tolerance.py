"""Lesson 08, the instructor's side: a run that may be killed at any moment.

Every later script can be stopped and resumed, so all answers live in `shared/` and are re-exported
here under their exercise names: `write_atomically` in shared/training/checkpoint_files.py,
`random_states` in shared/fault_tolerance/random_states.py, the rest in checkpoints.py beside it,
which is the module to read. In the same folder: background.py (the writing left to a thread),
elastic.py (torch.distributed.checkpoint, for another number of ranks), kills.py (a death at a
chosen moment).

The lesson's one idea: a run is its next step. What the next step depends on is what a checkpoint
has to hold; how to write it follows from asking at every line "and if it dies here?"

Points are the difficulty at the exercise (13 in all). The sentence to ask for afterwards: "between
which two lines may the process die, and what is then on the disk?"
"""

from shared.fault_tolerance.checkpoints import load_checkpoint as load_checkpoint
from shared.fault_tolerance.checkpoints import resume_training as resume_training
from shared.fault_tolerance.checkpoints import save_checkpoint as save_checkpoint
from shared.fault_tolerance.random_states import random_states as random_states
from shared.training.checkpoint_files import write_atomically as write_atomically

__all__ = [
    "load_checkpoint",
    "random_states",
    "resume_training",
    "save_checkpoint",
    "write_atomically",
]

NOTES = {
    "08.1a": """
write_atomically: 2 points, 20 minutes.
Look for: the five steps in their order (aside, flush, fsync, rename, fsync of the folder), and the
half file removed on every way out but a kill.
Weigh it: aside and renamed is the exercise; the two flushes matter only in a power cut or a kernel
panic, not for kill -9, and no test without a power switch can show them: the check therefore looks
at the calls. Say so when somebody asks why it passed all kills without fsync.
Common mistakes: a temporary file in /tmp, which may be another file system, so that the move
copies; unlink before rename ("because rename fails when the file exists", which is so on Windows
and with os.rename there; os.replace overwrites everywhere); fsync of a file whose last bytes still
lie in Python's buffer. torch.save flushes the file it is given, so flush() is redundant here and
right anyway.
""",
    "08.1b": """
random_states: 1 point, 10 minutes.
Look for: states and not seeds; numpy's array as a tensor.
Common mistakes: torch.initial_seed(); leaving numpy out because "we only use torch", until an
augmentation does not. Generators of one's own (np.random.default_rng, torch.Generator in a
DataLoader) are not covered by this function: ask where those would have to go.
Ask: why is cuda in it only once CUDA is in use? Asking for it would start CUDA, on every rank and
in every forked process, which a fork does not survive.
""",
    "08.1c": """
save_checkpoint: 3 points, 30 minutes.
Look for: three parts, all / rank 0 / all; no collective inside the branch; the outcome broadcast.
Weigh it: a right file from one rank is worth one point, the random states of all ranks the second,
the failure that reaches everybody the third.
Common mistakes: the barrier inside `if rank == 0`; the gather inside it, which hangs as well;
random states taken on rank 0 alone, so that after a restart all ranks draw the same dropout: the
run is then reproducible, and another one. Deleting before writing. A try around everything that
prints and continues: the run has no checkpoints for a week, and somebody notices in the second.
Accept: any way to name the file aside; keeping more than asked is not accepted, because disks fill.
""",
    "08.2": """
load_checkpoint: 4 points, 35 minutes.
Look for: rank 0 reads for all; every rank asks whether it fits, and all hear of it, before the
first load_state_dict; random states last.
Weigh it: the way back on one rank is two points; torn files and the two ranks are one each.
Common mistakes: `except: start from scratch`, which turns a damaged disk into a lost month;
`strict=False`, which turns another model into a silent half; every rank globbing for itself, which
works until a network file system shows one of them the new file a second later.
Sending the whole content is fine to some GB. Beyond that ranks read their own part
(torch.distributed.checkpoint), and what must be agreed on is only the name.
""",
    "08.3": """
resume_training: 3 points, 25 minutes.
Look for: one loop for both cases; the order loss, schedule, step, save; epochs announced.
Weigh it: the position in the middle of an epoch is the exercise.
Common mistakes: `for epoch in range(state.sampler.epoch + 1, ...)`, which gives the rest of an
epoch up at each restart (with many restarts the end of the order is hardly ever seen);
`for step in range(state.step, num_steps)` around a fresh iterator, which repeats the beginning;
saving before step + 1.
Ask: which of these would a test find that compares the loss of the first step after a restart?
None of the last two.
""",
}
