"""What lessons/first_lines.md shows of the plain scripts: the first, and the others' changes of it.

    python -m shared.book.first_lines

puts them into the page again; a test holds the page to the files.
"""

import difflib
import re
from pathlib import Path

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
PAGE = LESSONS / "first_lines.md"
FIRST = "lesson06_ddp"
OTHERS = {
    "lesson10_zero": "DeepSpeed",
    "lesson13_fsdp": "FSDP2",
    "lesson14_tensor_parallel": "tensor parallelism",
    "lesson15_pipeline_parallel": "a pipeline",
    "lesson22_ecosystem": "Accelerate",
}
RESUMED = "lesson08_fault_tolerance"  # its plain_resume.py


def script_of(folder: str, name: str = "plain.py") -> str:
    """The text of a plain script."""
    return (LESSONS / folder / name).read_text(encoding="utf-8")


def as_change(folder: str, title: str, name: str = "plain.py") -> str:
    """A script as a change of the first, with two lines around each change, folded."""
    ddp, other = script_of(FIRST).splitlines(), script_of(folder, name).splitlines()
    changes = list(difflib.unified_diff(ddp, other, n=2, lineterm=""))[2:]
    body = "\n".join(re.sub(r"^@@.*", "@@", line).rstrip() for line in changes)
    title = f"<summary><b>{title}</b>: {folder}/{name}</summary>"
    return f"<details>{title}\n\n```diff\n{body}\n```\n\n</details>"


def filled(page: str) -> str:
    """The page, what stands between its marks taken from the scripts again."""
    first = f"```python\n{script_of(FIRST).strip()}\n```"
    others = "\n\n".join(as_change(folder, title) for folder, title in OTHERS.items())
    resumed = as_change(RESUMED, "Evaluation and resume", "plain_resume.py")
    for name, text in {"first": first, "others": others, "resumed": resumed}.items():
        begin, end = f"<!-- from the scripts: {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
