"""pytest options of the benchmarks. ``pytest benchmarks -m perf`` prints results and checks them;
with ``--gate`` it also checks ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).resolve().parent)
)  # the scripts here import each other by plain names


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gate", action="store_true", help="benchmarks: a broken limit of speed or memory fails"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "perf: measures speed or memory; prints tables")


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> bool:
    """Whether a broken limit fails the test."""
    return request.config.getoption("--gate")
