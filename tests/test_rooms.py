"""tests/rooms.py: which tests a change reaches."""

from __future__ import annotations

from collections import defaultdict

import pytest
import rooms

FOLDERS = ("csrc", "kernels", "ep", "mooncake_backend")
SOURCES = [
    file for folder in FOLDERS for file in rooms.below(folder, *rooms.SUFFIXES, ".py", ".pyi")
]
FILES = [file for file in rooms.git("ls-files") if file]
ALWAYS = {"test_docs.py", "test_rooms.py"}


def python_tests(*files: str) -> set[str]:
    """Names without the text around them."""
    return {name[len("test_") : -len(".py")] for name in rooms.python_tests(files) - ALWAYS}


def test_each_source_file_reaches_a_test():
    assert len(SOURCES) > 700
    for file in SOURCES:
        assert rooms.room_of(file), f"{file} has no room: see EXERCISES"
        reached = python_tests(file) or rooms.cpp_tests([file]) or rooms.reaches_kernels([file])
        assert reached, f"{file} reaches no test: see EXERCISES"


def test_each_test_is_reached_from_its_rooms():
    reached = {file: rooms.python_tests([file]) for file in FILES}
    files: dict[str | None, list[str]] = defaultdict(list)
    for file in FILES:
        files[rooms.room_of(file)].append(file)
    for test, exercised in rooms.rooms_of().items():
        name = test.split("/")[-1]
        assert name in reached.get(test, {name})
        used = rooms.reached([test], rooms.imports()) - {test}
        assert exercised or used & set(FILES), f"{test} reaches nothing: see EXERCISES"
        for room in exercised - {"."}:
            assert files[room], f"{room}, which {test} exercises, has no file"
            assert all(name in reached[file] for file in files[room]), (test, room)


def test_rooms_and_modules_exist():
    for room in rooms.all_rooms():
        assert any(rooms.room_of(file) == room for file in FILES), room
    for name in rooms.EXERCISES:
        assert "/" not in name or name in FILES, name


PEERS = {
    "fake_device", "graphs", "peer_all_to_all", "peer_hosts", "peer_kernels", "peer_table",
    "peer_two_shot", "peer_verbs", "staged_graphs", "symmetric_memory",
}  # fmt: skip
EP_KERNELS = {"ep_graphs", "ep_hosts", "ep_kernels", "ep_kernels_late", "ep_token_kernels"}


def test_the_guard_of_peers():
    chosen = python_tests("csrc/peers/peer_guard.cc")
    assert chosen >= PEERS | EP_KERNELS
    assert not chosen & {"collectives", "launcher", "transfer", "ep_normal"}
    assert not rooms.reaches_kernels(["csrc/peers/peer_guard.cc"])
    assert rooms.cpp_tests(["csrc/peers/peer_guard.cc"])  # by way of its header


def test_the_exchange_of_kernels():
    chosen = python_tests("kernels/exchange.cuh")
    assert chosen >= PEERS | EP_KERNELS | {"kernels"}
    assert not chosen & {"collectives", "launcher", "transfer", "ep_normal"}
    assert rooms.reaches_kernels(["kernels/exchange.cuh"])


def test_sources_reach_the_users_of_their_headers():
    """By implementations too: a verb has no header of its own, and a wire is not included."""
    assert "collectives_test" in rooms.cpp_tests(["csrc/collectives/gather.cc"])
    assert "engine_test" in rooms.cpp_tests(["csrc/wires/tcp/tcp_transport.cc"])
    assert "tcp_transport_test" in rooms.cpp_tests(["tests/cpp/transport_suite.h"])
    assert rooms.cpp_tests(["tests/cpp/ep/row_vectors.inc"]) == {"row_vectors_test"}
    assert rooms.cpp_tests(["docs/gpu.md"]) == set()
    every = {file.rsplit("/", 1)[1][:-3] for file in rooms.below("tests/cpp", ".cc")}
    assert rooms.cpp_tests(["csrc/CMakeLists.txt"]) == every


def test_names_of_a_package_lead_to_their_modules():
    assert python_tests("mooncake_backend/gradients.py") == {
        "checkpoint_docs", "ddp_after_loss", "deactivation", "demo", "missing_parts", "packaging",
        "readme", "rejoin", "return", "shrinking",
    }  # fmt: skip
    assert "ep_elastic" in python_tests("ep/elastic.py")
    assert "ep_late" not in python_tests("ep/elastic.py")
    assert python_tests("tests/test_graphs.py") == {"graphs", "peer_hosts", "staged_graphs"}


def test_a_program_inside_a_test_imports_too():
    assert "peer_ranks" in rooms.imports()["tests/test_ep_hosts.py"]
    assert "deep_ep" in rooms.imports()["tests/test_ep_deepep.py"]


@pytest.mark.parametrize("file", ["tests/conftest.py", "some/new/file", "csrc/new_room/file.cc"])
def test_a_file_that_is_not_known_chooses_every_python_test(file):
    assert len(python_tests(file) | ALWAYS) == len(rooms.rooms_of())


def test_what_differs_from_a_commit():
    assert rooms.changed_files("HEAD") == rooms.changed_files("@")
    assert rooms.changed_files("no-such-commit") == rooms.changed_files("HEAD")
