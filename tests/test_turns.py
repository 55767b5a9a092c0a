"""tests/turns.py: the parts of `tests/run.sh --ci` at a commit."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys

import pytest
import rooms
import turns

MINUTES = 22
DOCS = ["docs/gpu.md"]
KERNELS = ["kernels/exchange.cuh"]
TURNS = [part.name for part in turns.parts() if part.takes_turns]


def chosen(changes, count, minutes=MINUTES):
    return [row.part.name for row in turns.plan(changes, count, minutes) if row.chosen]


@pytest.mark.parametrize("minutes", [0, 9, MINUTES])
@pytest.mark.parametrize("files", [DOCS, KERNELS, ["csrc/base/wait.cc"]])
def test_every_part_has_its_turn(files, minutes):
    found = [chosen([files], count, minutes) for count in range(700, 700 + len(TURNS))]
    assert {name for names in found for name in names} >= set(TURNS)


def test_a_part_that_a_change_broke_is_red_at_the_next_commits():
    for later in range(turns.RECENT):
        found = chosen([DOCS] * later + [KERNELS], 700 + later)
        assert {"kernels", "kernels-address"} <= set(found), later
    on_time = [chosen([DOCS, KERNELS], count) for count in range(len(TURNS))]
    # Beside the longest part it has no time.
    assert sum("kernels-thread" in names for names in on_time) >= len(TURNS) - 1


def test_the_newest_change_comes_first():
    torch = ["mooncake_backend/registration.py"]
    rows = turns.plan([torch, KERNELS], 700, 40)
    ages = [row.age for row in rows if row.chosen and row.age is not None]
    assert ages == sorted(ages)
    assert set(ages) == {0, 1}
    assert {row.part.name: row.age for row in rows}["kernels"] == 1


@pytest.mark.parametrize("files", [DOCS, KERNELS, ["csrc/base/wait.cc"]])
def test_the_parts_fit_their_time(files):
    for count in range(len(TURNS)):
        rows = [row for row in turns.plan([files], count, MINUTES) if row.chosen]
        assert MINUTES - 3 <= sum(row.part.minutes for row in rows) <= MINUTES


def test_all_cpp_tests_come_round_under_sanitizers():
    first, second = turns.halves()
    every = {file.rsplit("/", 1)[1][:-3] for file in rooms.below("tests/cpp", ".cc")}
    assert first | second == every
    assert first & second == {"sanitizer_options"}


def test_all_mutants_of_kernels_come_round():
    turn, turns_of_all = TURNS.index("mutants"), len(TURNS)
    ahead = range(700 * turns_of_all + turn, 2**30, turns_of_all)[: turns.MUTANT_SHARES]
    assert len({count % turns.MUTANT_SHARES for count in ahead}) == turns.MUTANT_SHARES
    sys.path.insert(0, str(rooms.ROOT / "tests/simt"))
    import mutants

    assert len(mutants.MUTANTS) <= 10 * turns.MUTANT_SHARES


def test_run_sh_knows_every_part():
    text = rooms.text_of("tests/run.sh")
    body = text[text.index("part() {") : text.index("*) echo")]
    patterns = re.findall(r"^    ([\w?*-]+)\)", body, re.MULTILINE)
    for part in turns.parts():
        assert any(fnmatch.fnmatch(part.name, p) for p in patterns), part.name


def test_the_table_and_the_names():
    count = int(rooms.git("rev-list", "--count", "HEAD")[0])
    run = subprocess.run(
        [sys.executable, "tests/turns.py"],
        cwd=rooms.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = run.stdout.split()
    assert names
    assert set(names) <= {part.name for part in turns.parts()}
    assert TURNS[count % len(TURNS)] in names
    for part in turns.parts():
        assert re.search(rf"^{part.name} .*{re.escape(part.what)}", run.stderr, re.MULTILINE), (
            part.name
        )
