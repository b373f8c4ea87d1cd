"""What `python -m solutions.grade` is made of; only what runs in a notebook's kernel loads torch.

Each line imports only what stands in it or above it (tests/grading/test_layers.py):

results, texts, verdicts    what the parts hand to one another
intake/                     files in: submissions, notebooks, cells, the course's own lessons
sandbox/                    running answers; sandbox/inside/ is what runs beside them, in the kernel
reports/                    results out: table, pages, picture, summary
store, corrections          what was graded before, and points by hand
answer_cells, classroom     the known answers as cells; a class from submissions to verdicts
selftest                    the grader tried on the known answers
"""
