"""What `python -m solutions.grade` is made of; only what runs in the sandbox loads torch.

Each line imports only what stands in it or above it, by a contract in pyproject.toml:

results, texts, verdicts    what the parts hand to one another
intake/                     files in: submissions, cells, the course's lessons and known answers
sandbox/, roster            answers run in bubblewrap, sandbox/inside/ within; who is in the class
reports/                    results out: table, pages, picture, summary
store, corrections, alike   what was graded before, points by hand, who handed in the same
classroom                   a class from submissions to verdicts
selftest                    the grader tried on the known answers
"""
