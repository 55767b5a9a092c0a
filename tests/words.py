"""Comments whose sentences have no subject that a reader can look up: tests/lint.sh lint.

Counts comment lines that hold "who", "what" and the like, by room. Fails above a ceiling; the words
are fine where they are an object with a clear meaning. `python tests/words.py ROOM` lists them."""

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
CEILING = 0.03  # of all comment lines; to be lowered when it is reached


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
    riddles: Counter[str] = Counter()
    for name in listed.stdout.split():
        if (
            Path(name).suffix not in (".cc", ".h", ".cu", ".cuh", ".py")
            or not (ROOT / name).exists()
        ):
            continue
        room = "/".join(name.split("/")[: 2 if name.startswith("csrc/") else 1])
        for number, text in comments(ROOT / name):
            lines[room] += 1
            if RIDDLE.search(text):
                riddles[room] += 1
                if any(name.startswith(wanted) for wanted in sys.argv[1:]):
                    print(f"{name}:{number}: {text}")
    share = riddles.total() / lines.total()
    if share <= CEILING:
        return 0
    for room in sorted(lines, key=lambda room: -riddles[room]):
        print(f"{room:20} {riddles[room]:5} of {lines[room]:5} lines")
    print(
        f"{share:.1%} of the comment lines have a subject that nobody can look up, above the"
        f" ceiling of {CEILING:.0%}: name the rank, the sender, the owner of the region"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
