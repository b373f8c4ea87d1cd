"""Running answers: the isolation, a folder for each run, pytest over the notebook, its report.

Everything here runs in the grader's own processes, except sandbox/inside/.
"""
