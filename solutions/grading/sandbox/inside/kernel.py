"""Starts the kernel of a graded notebook: the copy of the course, and nothing of the original.

Run by path, in the sandbox: `python kernel.py CONNECTION_FILE COURSE`.
"""

import sys
from importlib import import_module


def main() -> None:
    """Take the original course off the import path, put the copy there, and become a kernel."""
    connection, course = sys.argv[1:]
    # A course installed with `pip install -e` would find the original, with its solutions.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f).lower()]
    sys.path[:] = [course, *(entry for entry in sys.path[1:] if entry)]
    sys.argv[1:] = [
        f"--f={connection}",
        "--HistoryManager.enabled=False",
        "--InlineBackend.close_figures=True",
        "--IPKernelApp.quiet=True",
    ]
    from ipykernel.iostream import OutStream
    from ipykernel.kernelapp import launch_new_instance

    import_module("printed").PRINTED.count_on(OutStream)
    launch_new_instance()


if __name__ == "__main__":
    main()
