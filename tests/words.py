"""Comments whose sentences have no noun that a reader can look up: tests/lint.sh lint.

Counts comment lines that hold "who", "what" and the like, and lines that hold "those", "others"
and the like, by room. Fails above a ceiling for either; the words are fine where their noun stands
right before. `python tests/words.py ROOM` lists them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("csrc", "kernels", "mooncake_backend", "ep")
RIDDLE = re.compile(r"\b(who|whom|whose|whoever|what|whatever)\b", re.IGNORECASE)
PRONOUN = re.compile(r"\b(those|others|that of|so many|the first two)\b", re.IGNORECASE)
# Kind, its pattern, its ceiling as a share of all comment lines (lowered when reached), the cure.
KINDS = (
    ("who/what", RIDDLE, 0.03, "name the rank, the sender, the owner of the region"),
    ("those/others", PRONOUN, 0.015, "say the noun"),
)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines that hold a comment or a part of a docstring."""
    is_python = path.suffix == ".py"
    is_inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not is_python:
            if found := re.search(r"//.*", line):
                yield number, found[0]
            continue
        quotes = line.count('"""')
        if is_inside or quotes or line.lstrip().startswith("#"):
            yield number, line.strip()
        if quotes % 2:
            is_inside = not is_inside


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines: Counter[str] = Counter()
    found = {kind: Counter[str]() for kind, *_ in KINDS}
    for name in listed.stdout.split():
        if (
            Path(name).suffix not in (".cc", ".h", ".cu", ".cuh", ".py")
            or not (ROOT / name).exists()
        ):
            continue
        room = "/".join(name.split("/")[: 2 if name.startswith("csrc/") else 1])
        for number, text in comments(ROOT / name):
            lines[room] += 1
            for kind, pattern, *_ in KINDS:
                if pattern.search(text):
                    found[kind][room] += 1
                    if any(name.startswith(wanted) for wanted in sys.argv[1:]):
                        print(f"{name}:{number}: {kind}: {text}")
    failed = False
    for kind, _, ceiling, cure in KINDS:
        share = found[kind].total() / lines.total()
        if share <= ceiling:
            continue
        failed = True
        for room in sorted(lines, key=lambda room: -found[kind][room]):
            print(f"{room:20} {found[kind][room]:5} of {lines[room]:5} lines")
        print(
            f"{share:.1%} of the comment lines hold {kind} and no noun that a reader can look up,"
            f" above the ceiling of {ceiling:.1%}: {cure}"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
