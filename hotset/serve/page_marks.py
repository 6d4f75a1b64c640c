"""The header with which a decode worker tells a router the hashes of some pages of a prompt.

KV events name pages by hashes of tokens, and a router has no tokenizer. With the header it can look up prompts that
begin alike in the KV events of all workers. A worker sends it only to a router that asks for it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hotset.tiers.prefix_cache import PageHasher, event_hash

PAGE_MARKS_HEADER = "x-hotset-pages"  # in a request: any value; in a response: the marks
MAX_MARKS = 64  # of one prompt: 1.5 KB
MARK_FORM = re.compile(r"(0\.[0-9]{6}|1\.000000):([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class PageMark:
    """The end of a full page of a prompt."""

    share_of_prompt: float  # of the tokens up to the end of the page: more than 0, at most 1
    block_hash: int  # as in KV events


def page_marks_header(tokens: Sequence[int], salt: str, hasher: PageHasher) -> str:
    """Returns the value of the header: marks at equal distances, the last one at the end of the last full page."""
    hashes: list[bytes] = []
    hasher.extend(hashes, tokens, salt)
    marked = min(len(hashes), MAX_MARKS)
    counts = [len(hashes) * number // marked for number in range(1, marked + 1)]
    shares = [count * hasher.page_rows / len(tokens) for count in counts]
    marks = zip(shares, counts, strict=True)
    return ",".join(f"{share:.6f}:{event_hash(hashes[count - 1]):016x}" for share, count in marks)


def parse_page_marks(header: str) -> list[PageMark]:
    """Returns the marks in order. Ignores everything that is not a mark."""
    matches = [MARK_FORM.fullmatch(text) for text in header.split(",", MAX_MARKS)[:MAX_MARKS]]
    marks = [PageMark(float(match[1]), int(match[2], 16)) for match in matches if match is not None]
    return sorted(marks, key=lambda mark: mark.share_of_prompt)
