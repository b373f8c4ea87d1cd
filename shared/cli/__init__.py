"""The command line: everything behind run_all.sh.

command.py understands the arguments and starts one of these programs: runner.py (the lessons'
scripts, then report.py), todo.py, notebooks.py, doctor.py, or pytest with proven.py (changed.py
selects what it runs).
setup.py makes .venv before any of them: both need nothing but the standard library.
"""
