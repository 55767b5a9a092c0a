"""Writes copies of sources that hold all mutants: each function that a mutant changes begins with a
choice between its bodies. For mutants.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HEADER = "tests/simt/mutant.h"
# Comments, literals, and lines of the preprocessor hold no braces that count.
SKIPPED = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\w)'(?:\\.|[^'\\\n])+'|^#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
SCOPE = re.compile(
    r"\s*(template\s*<[^{]*>\s*)?(inline\s+)?(namespace|struct|class|union|enum|extern)\b"
)


@dataclass(frozen=True)
class Change:
    number: int
    begin: int
    end: int  # in the original text
    new: str


def common(a: str, b: str) -> int:
    """How many letters both begin with."""
    both = zip(a, b, strict=False)
    return next((i for i, (one, other) in enumerate(both) if one != other), min(len(a), len(b)))


def change_of(number: int, text: str, old: str, new: str) -> Change:
    """Without what `old` and `new` begin and end with both: that may be outside of a function."""
    front = common(old, new)
    begin = text.index(old) + front
    old, new = old[front:], new[front:]
    back = common(old[::-1], new[::-1])
    return Change(number, begin, begin + len(old) - back, new[: len(new) - back])


def bodies(text: str) -> Iterator[tuple[int, int]]:
    """Where each outermost function's text begins and ends between its braces."""
    blank = SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    head, depth, begin = 0, 0, 0  # depth: of braces within a function
    for at, letter in enumerate(blank):
        if depth:
            depth += (letter == "{") - (letter == "}")
            if depth == 0:
                yield begin, at
        elif letter == "{" and ")" in blank[head:at] and not SCOPE.match(blank[head:at]):
            begin, depth = at + 1, 1
        if not depth and letter in ";{}":
            head = at + 1


def with_all(name: str, text: str, changes: Sequence[Change]) -> str:
    """`text` of the file `name`, in which the changes can be chosen."""

    def line(at: int) -> str:
        return f'\n#line {text.count(chr(10), 0, at) + 1} "{name}"\n'

    left = {change.number: change for change in changes}
    parts, done = [f'#include "{HEADER}"{line(0)}'], 0
    for begin, end in bodies(text):
        own = [c for c in changes if begin <= c.begin and c.end <= end]
        if not own:
            continue
        parts.append(text[done:begin])
        for c in own:
            body = text[begin : c.begin] + c.new + text[c.end : end]
            parts.append(
                f"\nif (mooncake::simt::isMutant({c.number})) {{{line(begin)}{body}}} else"
            )
            del left[c.number]
        parts.append(f" {{{line(begin)}{text[begin:end]}}}{line(end)}")
        done = end
    if left:
        raise ValueError(f"{name}: mutants {sorted(left)} are outside of functions")
    return "".join([*parts, text[done:]])
