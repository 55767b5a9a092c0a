"""Defects of the hosts' verdict about stopped kernels, for mutants.py: name, text, and its
replacement."""

from __future__ import annotations

FILE = "csrc/peers/peer_verdict.cc"
SWEPT = [
    (
        "an operation for which a rank was late comes next for it",
        "std::max(report.done, report.skipped) + 1",
        "report.done + 1",
    ),
    (
        "a skipped rank has ended no operation since",
        "report.done > report.skipped || report.skipped == 0 ?",
        "report.skipped == 0 ?",
    ),
    (
        "ranks that all were skipped wait for each other in that operation",
        "  while (all([&](const PeerReport& report) { return report.skipped > last; })) ++last;\n",
        "",
    ),
    (
        "a rank that was skipped takes part when the operation is redone",
        "report.skipped > last || (skips",
        "(skips",
    ),
    ("skipped ranks take part", "if (!isSkipped(report)) verdict.among", "verdict.among"),
    ("a later verdict forgets the skip", "last + 1 : own.skipped;", "last + 1 : 0;"),
    (
        "exchanges of operations that a rank skipped count for the others",
        "report.ended - (report.done - last)",
        "report.ended",
    ),
    (
        "ranks that all were skipped have no last exchange",
        "reports[r].ended + (last - reports[r].done)",
        "uint64_t(0)",
    ),
    (
        "a bank follows the data that all had before the skip",
        "hadAll && !hasSkipped",
        "hadAll",
    ),
    ("serial numbers of stopped exchanges come again", "std::max(taken, ended)", "ended"),
    (
        "the ranks' serial numbers are not level",
        "    verdict.serial += own.done - last;\n",
        "",
    ),
    (
        "a skipped rank takes the operation",
        "if (nextOf(own) <= last) {",
        "if (own.done < last) {",
    ),
]
# A sweep meets this once in hundreds of schedules.
BY_SUITE = {
    "ep": SWEPT,
    "peer_verdict": [
        (
            "a skipped rank has ended what it passed at once",
            "|| report.skipped == 0 ? report.done : report.skipped - 1;",
            "|| true ? report.done : 0;",
        ),
    ],
}
