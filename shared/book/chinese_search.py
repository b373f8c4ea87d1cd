"""Search in the Chinese pages: every two characters that stand together are a word."""

import re

from sphinx.search.zh import SearchChinese

CHINESE = "\u4e00-\u9fff"


class Pairs(SearchChinese):
    """Needs no dictionary: Sphinx's own finds no Chinese word without the package jieba."""

    # The stemmer's class: Sphinx 9.0.4 takes its own language's, which is not there (issue 14229).
    language_name = "English"
    js_splitter_code = f"""
var splitQuery = (query) =>
  (query.match(/[{CHINESE}]+|[^\\p{{Z}}\\p{{P}}{CHINESE}]+/gu) ?? []).flatMap((part) =>
    /[{CHINESE}]/.test(part) && part.length > 2
      ? Array.from({{ length: part.length - 1 }}, (_, at) => part.slice(at, at + 2))
      : [part]);
"""

    def split(self, input: str) -> list[str]:
        """Pairs of Chinese characters, and words of Latin letters and digits."""
        runs = re.findall(f"[{CHINESE}]+", input)
        pairs = [run[at : at + 2] for run in runs for at in range(max(1, len(run) - 1))]
        return pairs + super().split(input)
