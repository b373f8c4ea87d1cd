"""README.zh-CN.md says of which text of README.md it is the translation; what changed is named."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
SEEN = re.compile(r"^<!-- of README\.md, (?P<section>.+): (?P<digest>[0-9a-f]{12}) -->$", re.M)


def sections(text: str) -> dict[str, str]:
    """Heading to the digest of what stands below it, up to the next; "the beginning" first."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    named = zip(["the beginning", *parts[1::2]], parts[0::2], strict=True)
    return {name: hashlib.sha256(body.encode()).hexdigest()[:12] for name, body in named}


def test_the_chinese_readme_is_of_the_english_one_as_it_is():
    now = sections(ENGLISH.read_text(encoding="utf-8"))
    then = dict(SEEN.findall(CHINESE.read_text(encoding="utf-8")))
    changed = {name: digest for name, digest in now.items() if then.get(name) != digest}
    lines = "\n".join(
        f"<!-- of README.md, {name}: {digest} -->" for name, digest in changed.items()
    )
    assert not changed, f"translate what changed, then put into README.zh-CN.md:\n{lines}"
    assert then.keys() == now.keys()


def test_both_name_the_same_lessons_and_commands():
    english, chinese = (each.read_text(encoding="utf-8") for each in (ENGLISH, CHINESE))
    for pattern in (r"^\| \[[^]]+\]\((lessons/[^)]+)\)", r"^\| `(\./run_all\.sh [^`]+)` \|"):
        assert re.findall(pattern, chinese, re.M) == re.findall(pattern, english, re.M)


def test_the_chinese_readme_leaves_out_no_name_link_or_number():
    english, chinese = (
        re.sub(r"```.*?```|<!--.*?-->|\s+", " ", each.read_text(encoding="utf-8"), flags=re.S)
        for each in (ENGLISH, CHINESE)
    )
    for pattern in (r"`[^`]+`", r"\]\((?!README)[^)]+\)", r"\d(?:[\d.,]*\d)?"):
        left_out = set(re.findall(pattern, english)) - set(re.findall(pattern, chinese))
        assert not left_out, f"README.zh-CN.md has none of {sorted(left_out)}"
