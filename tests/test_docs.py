"""What the documents and the include lines promise, checked against the code.

`python tests/test_docs.py` writes the table of native variables into docs/environment.md.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
ENVIRONMENT = ROOT / "docs/environment.md"
FOLDERS = (".ci", "benchmarks", "csrc", "docs", "ep", "kernels", "mooncake_backend", "tests")

# A room and what it may include, itself apart (docs/architecture.md).
ROOMS: dict[str, set[str]] = {
    "base": set(),
    "device": {"base", "kernels"},
    "engine": {"base", "device"},
    "wires": {"base", "device", "engine"},
    "transfer": {"base", "device", "engine", "wires"},
    "proxy": {"base", "device", "engine", "kernels"},
    "membership": {"base", "engine"},
    "group": {"base", "engine", "membership"},
    "collectives": {"base", "device", "engine", "membership", "group", "kernels"},
    "ep": {"base", "engine", "membership", "group", "kernels"},
    "peers": {"base", "device", "engine", "group", "collectives", "kernels", "proxy"},
    "backend": {"base", "device", "engine", "membership", "group", "collectives", "ep", "peers"},
    "bindings": {
        "base",
        "device",
        "engine",
        "wires",
        "transfer",
        "membership",
        "group",
        "collectives",
        "ep",
        "backend",
    },
    "kernels": set(),  # beside csrc
}
# Folders of backend/, and those of its files that may include them beside their own: a door makes
# the other half, and knows nothing else of it.
BACKEND: dict[str, set[str]] = {
    "backend/device": {"backend/experts"},
    "backend/experts": set(),
}
DOORS = {("backend/mooncake_backend.cc", "backend/device")}
DRIVERS = ("membership", "admission", "candidacy", "roster")  # in membership/
KERNELS_KNOW = {
    "cmath",
    "cstddef",
    "cstdint",
    "cstring",
    "type_traits",
}  # nvcc compiles kernels/common for both sides
EMULATED = ("kernels/device.h", "tests/simt/builtins.h")  # where no nvcc compiles it
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
PYTHON = re.compile(r"pybind11/|Python\.h|torch/csrc/utils/pybind\.h|torch/extension\.h")
ONE_WIRE = re.compile(r"wires/(inproc|shm|tcp|fabric|sim)/")


def files(*suffixes: str) -> list[Path]:
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(path for path in found if path.suffix in suffixes)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


DOCUMENTS = files(".md")


# ---- arrows


def wrong_includes(path: str, text: str) -> Iterator[str]:
    """`path` is relative to csrc, or starts with kernels/."""
    room = path.split("/")[0]
    if room not in ROOMS:
        yield f"{path}: {room} is no room; if it is one, it needs a line in ROOMS"
        return
    for bracket, included in INCLUDE.findall(text):
        if (path, included) == EMULATED:
            continue
        there = f"{path} includes {included}"
        other = included.split("/")[0]
        if bracket == '"' and not ((ROOT if other == "kernels" else CSRC) / included).exists():
            yield f"{there}: own headers are named from csrc/ or as kernels/, others in <>"
        if path.startswith("kernels/common/") and bracket == "<" and included not in KERNELS_KNOW:
            yield f"{there}: not known to every compiler for GPUs"
        if bracket == '"' and other != room and other not in ROOMS[room]:
            yield f"{there}: {room} must not know {other}"
        ours, theirs = (name.rpartition("/")[0] for name in (path, included))
        is_known = theirs not in BACKEND or ours in {theirs} | BACKEND[theirs]
        if room == "backend" and not is_known and (path, theirs) not in DOORS:
            yield f"{there}: {theirs} must not be known here, the doors are in DOORS"
        if TORCH.match(included) and room not in ("backend", "bindings"):
            yield f"{there}: torch belongs to backend and bindings"
        if PYTHON.match(included) and room != "bindings":
            yield f"{there}: Python belongs to bindings"
        drives = Path(path).stem in DRIVERS or included == "engine/contract/engine_id.h"
        if room == "membership" and other == "engine" and not drives:
            yield f"{there}: what decides is pure, only {', '.join(DRIVERS)} drive an engine"
        wire = ONE_WIRE.match(included)
        home = wire and path.startswith(wire.group())
        if wire and not home and path != "wires/registry.cc":
            yield f"{there}: only the wire itself and registry.cc know {wire.group(1)}"


def test_includes_follow_the_arrows():
    sources = [(path, CSRC) for path in files(".h", ".cc") if path.is_relative_to(CSRC)]
    assert len(sources) > 50
    sources += [
        (path, ROOT) for path in files(".h", ".cu", ".cuh") if path.is_relative_to(ROOT / "kernels")
    ]
    wrong = [
        line
        for path, start in sources
        for line in wrong_includes(str(path.relative_to(start)), path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("base/log.cc", '#include "engine/engine.h"'),
        ("engine/engine.cc", '#include "group/group.h"'),
        ("engine/engine.cc", '#include "transfer/batch.h"'),
        ("transfer/link.cc", '#include "membership/view.h"'),
        ("engine/engine.cc", '#include "wires/local/local_channel.h"'),
        ("wires/sim/sim_transport.cc", '#include "wires/fabric/libfabric_transport.h"'),
        ("wires/shm/shm_transport.cc", '#include "wires/tcp/socket.h"'),
        ("wires/local/local_channel.cc", '#include "wires/shm/cross_memory.h"'),
        ("membership/view.h", '#include "engine/contract/evidence.h"'),
        ("group/group.cc", "#include <ATen/ATen.h>"),
        ("group/group.cc", '#include "wires/tcp/socket.h"'),
        ("backend/tensors.cc", "#include <pybind11/stl.h>"),
        ("backend/leaving.cc", '#include "backend/device/recorded_calls.h"'),
        ("backend/calls/copies.cc", '#include "backend/device/staging.h"'),
        ("backend/mooncake_backend.cc", '#include "backend/experts/ep_buffer.h"'),
        ("backend/device/device_calls.cc", '#include "backend/experts/ep_buffer.h"'),
        ("base/log.cc", '#include "log.h"'),
        ("utilities/log.cc", '#include "base/log.h"'),
        ("group/group.cc", '#include "kernels/common/bf16.h"'),
        ("kernels/common/bf16.h", '#include "base/bytes.h"'),
        ("kernels/common/bf16.h", "#include <vector>"),
    ],
)
def test_a_wrong_include_is_found(path, line):
    assert list(wrong_includes(path, line))


# ---- the length of classes

MOST_LINES, MOST_FUNCTIONS, MOST_FILES = 600, 40, 3
SLACK = 1.1  # for lines
# Most functions of the first two override functions of an interface. The other two are state
# machines with a short function for each message or step.
MANY_FUNCTIONS = {
    "FabricChannel",
    "FakeAccelerator",
    "FlushMachine",
    "Operation",
}
DEFINED = re.compile(r"^[\w:<>,&*\[\] ]*?\b(\w+)::(~?\w+)\(")


def definitions(text: str) -> Iterator[tuple[str, str, int]]:
    """Class, function and number of lines of each member function that is defined in a file."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if not line or line[0] in " }{#/" or line.startswith(("using", "namespace", "template")):
            continue
        found = DEFINED.match(line) or DEFINED.match(f"{line} {lines[i + 1].strip()}")
        if not found:
            continue
        end = next(
            (
                n
                for n in range(i, len(lines))
                if lines[n].endswith((";", "}")) and (lines[n][0] == "}" or n == i)
            ),
            len(lines) - 1,
        )
        yield found[1], found[2], end - i + 1


@functools.cache
def classes() -> dict[str, tuple[int, set[str], set[str]]]:
    """Of each class: lines, functions and files of its definitions outside of its header."""
    found: dict[str, tuple[int, set[str], set[str]]] = {}
    headers = "\n".join(path.read_text("utf-8") for path in files(".h"))
    named = set(re.findall(r"^(?:  )*(?:class|struct) (\w+)", headers, re.MULTILINE))
    for path in files(".cc"):
        if not path.is_relative_to(CSRC):
            continue
        for owner, function, length in definitions(path.read_text(encoding="utf-8")):
            if owner in named:
                before, functions, places = found.get(owner, (0, set(), set()))
                found[owner] = (before + length, functions | {function}, places | {name(path)})
    return found


def test_classes_are_short():
    assert len(classes()) > 200
    for owner, (length, functions, places) in classes().items():
        assert length <= MOST_LINES * SLACK, f"{owner} has {length} lines"
        own = functions - {owner, f"~{owner}"}
        is_long = len(own) > MOST_FUNCTIONS
        assert is_long == (owner in MANY_FUNCTIONS), f"{owner} has {len(own)} functions"
        assert len(places) <= MOST_FILES, f"{owner}: {places}"


def test_a_long_class_is_found():
    text = "Result<int> Long::of(int a,\n                     int b) {\n  return a;\n}\n"
    assert list(definitions(text)) == [("Long", "of", 4)]
    assert list(definitions("int Short::of() { return 1; }\n")) == [("Short", "of", 1)]


def test_a_collective_is_in_six_files():
    """On all three ways to carry it out. MOONCAKE_PEER_TABLE need not know it."""
    named = re.compile(r"\b(scatter|kScatter|scatterCall)\b")
    comment = re.compile(r"//.*")
    touched = {
        name(path).removeprefix("csrc/")
        for path in files(".h", ".cc", ".cuh")
        if path.is_relative_to(CSRC) or path.is_relative_to(ROOT / "kernels")
        if named.search(comment.sub("", path.read_text(encoding="utf-8")))
    }
    assert touched - {"peers/peer_table.cc"} == {
        "backend/c10d_verbs.h",
        "backend/calls/collective_calls.h",
        "backend/calls/copies.cc",
        "collectives/collectives.h",
        "collectives/scatter.cc",
        "group/call.h",
    }


# ---- environment variables


def rows_of_tables(text: str) -> list[tuple[str, str, str]]:
    """Name, default and meaning of the variables in a source file's tables of EnvEntry."""
    literal = r'"(?:[^"\\]|\\.)*"'
    rows = []
    for table in re.findall(r"^constexpr EnvEntry<\w+> \w+\[\] = \{\n(.*?)^\};", text, re.M | re.S):
        entries = re.findall(
            rf"^    \{{\{{({literal}),\s*({literal}),\s*((?:{literal}\s*)+)\}}", table, re.M
        )
        assert len(entries) == len(re.findall(r"^    \{", table, re.M)), table
        rows += [
            tuple("".join(re.findall(r'"(.*?)"', part)) for part in entry) for entry in entries
        ]
    return rows


def native_tables() -> dict[str, list[tuple[str, str, str]]]:
    """The variables that the rooms of csrc read, by the file of their table."""
    return {
        name(path): rows
        for room in ROOMS
        for path in sorted((CSRC / room).rglob("*.cc"))
        if (rows := rows_of_tables(path.read_text(encoding="utf-8")))
    }


def native_rows() -> str:
    table = [row for rows in native_tables().values() for row in rows]
    rows = [f"| `{name}` | {value} | {meaning} |" for name, value, meaning in table]
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows])


def written_native_rows() -> re.Match[str]:
    found = re.search(
        r"(<!-- native: .*?-->\n)(.*?)(<!-- end -->)", ENVIRONMENT.read_text("utf-8"), re.DOTALL
    )
    assert found, "docs/environment.md has lost its marks"
    return found


READS = {
    ".py": r"""(?:environ(?:\.get\(|\[)|getenv\(|_flag\()\s*["'](\w+)["']""",
    ".sh": r"\$\{([A-Z][A-Z0-9_]+):?[-?=+]",
    ".cc": r'getenv\("(\w+)"\)',
    ".h": r'getenv\("(\w+)"\)',
    "": r"\$\{([A-Z][A-Z0-9_]+):?[-?=+]",  # .ci/run
}


def variables_read() -> dict[str, str]:
    """Every variable that a file of ours reads, and one file that does."""
    found = {variable: file for file, rows in native_tables().items() for variable, _, _ in rows}
    for path in files(*READS):
        if path == Path(__file__).resolve() or path.name == "LICENSE":
            continue
        for variable in re.findall(READS[path.suffix], path.read_text(encoding="utf-8")):
            found.setdefault(variable, name(path))
    return found


def test_native_variables_are_listed_as_they_are():
    assert len(native_tables()) >= 7
    assert written_native_rows().group(2).strip() == native_rows(), "run: python tests/test_docs.py"


def test_every_variable_is_listed_and_every_listed_one_is_read():
    rows = re.findall(r"^\| (`[A-Z].*?) \|", ENVIRONMENT.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {variable for row in rows for variable in re.findall(r"`(\w+)`", row)}
    read = variables_read()
    missing = {f"{variable} ({read[variable]})" for variable in read.keys() - listed}
    assert not missing, "docs/environment.md does not list them"
    assert not listed - read.keys(), "nobody reads them any more"


def test_the_core_reads_the_environment_through_tables_only():
    for path in files(".h", ".cc"):
        if path.is_relative_to(CSRC) and path.with_suffix("") != CSRC / "base/env":
            text = path.read_text(encoding="utf-8")
            assert not re.search("getenv|envValue", text), name(path)
            assert bool(rows_of_tables(text)) == ("EnvEntry" in text), name(path)


# ---- steps of the models

MODELS = sorted((ROOT / "docs/models").glob("*.pml"))
MEMBERSHIP = ROOT / "docs/membership.md"
NOWHERE = ("the world", "nowhere: see below")


def steps_of(model: str) -> set[str]:
    """Those it says when it is simulated, and those that its comments name at the end of a step."""
    said = re.findall(r"\bSAY(?:MORE)?\(([a-z][\w-]*),", model)
    said += re.findall(r"\bSEE\(([a-z][\w-]*), [A-Z]", model)
    comments = re.findall(r"/\*.*?\*/", model, re.DOTALL)
    named = re.findall(r"(?<= )\[([a-z][a-z-]+)\]", "\n".join(comments))
    return {step for step in (*said, *named) if step != "step"}


def step_table() -> list[tuple[list[str], str]]:
    """The rows of section 8: steps, where the code takes them."""
    section = MEMBERSHIP.read_text(encoding="utf-8").split("## 8. Steps")[1]
    rows = re.findall(r"^\| (`[a-z][^|]*) \| ([^|]*) \|", section, re.MULTILINE)
    return [(re.findall(r"`([\w-]+)`", steps), where) for steps, where in rows]


def body_of(function: str) -> str:
    found = []
    for path in files(".cc"):
        text = path.read_text(encoding="utf-8")
        for line in re.finditer(rf"^\S.*\b{re.escape(function)}\(.*$", text, re.MULTILINE):
            end = line.end() if "}" in line.group() else text.index("\n}\n", line.end())
            found.append(text[line.start() : end])
    assert len(found) == 1, f"{len(found)} definitions of {function}"
    return found[0]


def marks(code: str) -> set[str]:
    """Of lines that end with a comment in brackets: // [park]"""
    lines = re.findall(r"//((?: \[[a-z][a-z-]+\])+)$", code, re.MULTILINE)
    return set(re.findall(r"[a-z][a-z-]+", " ".join(lines)))


def test_every_step_of_the_models_is_in_the_table():
    steps = {step for model in MODELS for step in steps_of(model.read_text(encoding="utf-8"))}
    assert len(MODELS) >= 3
    assert len(steps) > 30
    assert steps == {step for names, _ in step_table() for step in names}


@pytest.mark.parametrize(("steps", "where"), step_table(), ids=lambda value: str(value)[:40])
def test_the_code_names_the_step_where_it_takes_it(steps, where):
    functions = re.findall(r"`(\w+::\w+)`", where)
    assert bool(functions) != (where.strip() in NOWHERE), where
    for function in functions:
        body = body_of(function)
        failpoints = set(re.findall(r'failpoint\("([\w-]+)"\)', body))
        assert set(steps) <= marks(body) | failpoints, function


def test_what_the_code_calls_a_step_is_one():
    steps = {step for names, _ in step_table() for step in names}
    for path in files(".cc", ".h"):
        if path.is_relative_to(CSRC):
            assert marks(path.read_text(encoding="utf-8")) <= steps, name(path)


# ---- wire formats, threads, transports, sizes


def versions_of_the_code() -> dict[tuple[str, str], str]:
    return {
        (str(path.relative_to(CSRC)), constant): number
        for path in files(".h", ".cc")
        if path.is_relative_to(CSRC)
        for constant, number in re.findall(
            r"\b(k\w*Version) = (\d+);", path.read_text(encoding="utf-8")
        )
    }


def test_wire_versions_are_listed_as_they_are():
    page = (ROOT / "docs/wire-formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*?\| `([\w./]+)`, `(k\w*Version)` = (\d+) \|", page, re.MULTILINE)
    assert len(rows) >= 12
    assert {(path, constant): number for path, constant, number in rows} == versions_of_the_code()


def test_threads_are_listed_by_their_names():
    named = re.compile(
        r'\b(?:startThread|EventLoop::start|pthread_setname_np)\([^";]*"(mooncake-[a-z]+)"'
    )
    given = {
        thread
        for path in files(".cc", ".h")
        if path.is_relative_to(CSRC)
        for thread in named.findall(path.read_text(encoding="utf-8"))
    }
    page = (ROOT / "docs/threads.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(mooncake-[a-z]+)` \|", page.split("## Threads\n")[1], re.MULTILINE)
    assert len(given) >= 10
    assert sorted(rows) == sorted(given)


def test_transports_are_listed_as_in_the_registry():
    registry = (CSRC / "wires/registry.cc").read_text(encoding="utf-8")
    names = re.findall(r'^ +\{"(\w+)",', registry, re.MULTILINE)
    assert len(names) >= 4
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"`wires/\{(.*?)\}/`", architecture) == [",".join(names)]
    item = ENVIRONMENT.read_text("utf-8").split("- `MOONCAKE_TRANSPORTS`: names are")[1]
    assert re.findall(r"`([a-z]+)`", item.split("\n- ")[0]) == names


@pytest.mark.parametrize(
    ("page", "most"),
    [("docs/architecture.md", 250), ("docs/benchmarks.md", 150), ("CHANGELOG.md", 40)],
)
def test_pages_are_short(page, most):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_lines_fit_a_window():
    """Rows of tables aside, a line is at most 120 columns wide; in threads.md also a row."""
    for document in DOCUMENTS:
        if document.parent != ROOT / "docs":
            continue
        lines = document.read_text(encoding="utf-8").splitlines()
        is_code = False
        for number, line in enumerate(lines, 1):
            is_code ^= line.startswith("```")
            is_row = line.lstrip().startswith("|") and document.name != "threads.md"
            assert is_code or is_row or len(line) <= 120, f"{name(document)}:{number}"


# ---- what documents point at


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """GitHub's names of a document's headings."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{name(document)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(document)} links to {link}: no such heading"


def test_pages_that_the_code_names_exist():
    """docs/PAGE.md, also with #heading, in comments, messages and tests."""
    for path in files(".cc", ".h", ".cu", ".cuh", ".py", ".pyi", ".sh", ".md", ".toml", ".txt"):
        text = path.read_text(encoding="utf-8")
        for page, heading in re.findall(r"\bdocs/([a-z-]+\.md)(?:#([\w-]+))?", text):
            target = ROOT / "docs" / page
            assert target.exists(), f"{name(path)} names docs/{page}"
            if heading:
                assert heading in anchors(target), f"{name(path)} names docs/{page}#{heading}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_files_exist(document):
    """Files that are named with their folder, in backticks; from the root, csrc or the document."""
    text = document.read_text(encoding="utf-8")
    text = re.sub(r"`([\w.\-/]+)\.\{h,cc\}`", r"`\1.h` `\1.cc`", text)
    for path in re.findall(r"`([\w.\-/]+/[\w.\-]+\.(?:cc|h|cu|cuh|py|pyi|sh|md|pml|txt))`", text):
        places = [folder / path for folder in (ROOT, CSRC, document.parent)]
        built = path.startswith((".venv/", "build/")) or "VERB" in path
        assert built or any(map(Path.exists, places)), f"{name(document)} names {path}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_functions_exist(document):
    """`Class::function` and, in the pages about the code, `Class::member_`."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in files(".h", ".cc"))
    words = set(re.findall(r"\w+", code))
    for named in re.findall(r"`(\w+(?:::\w+)+)(?:\(\))?`", document.read_text(encoding="utf-8")):
        unknown = set(named.split("::")) - words
        assert not unknown, f"{name(document)} names {named}"


# What is not ours: other programs and their options, the kernel's and torch's names, placeholders.
_ELSEWHERE = """
    CMakeLists PID SYS_PTRACE TrainingArguments VERB ZeroRedundancyOptimizer accelerate cap cpython
    cuFlushGPUDirectRDMAWrites MC_SLICE_TIMEOUT
    GLOO dmesg efa gdb gnu implemented lots
    membarrier PET_ON_DEATH ptrace_scope rand spy srun use_cpu x86_64
    --cap-add --kill --log-dir --max-restarts --no-kill --pid --redirects
"""
_OF_SLURM_AND_KUBERNETES = """
    KillOnBadExit OnFailure TORCHELASTIC_ WaitTime backoffLimitPerIndex failurePolicy maxRestarts
    replicatedJobs restartPolicy singleProcessOOMKill successPolicy terminationGracePeriodSeconds
    --kill-on-bad-exit --oom-kill-step --signal --signals-to-handle --wait
"""
_OF_LIBFABRIC = """
    FI_EFA_TX_SIZE FI_LOG_LEVEL FI_LOG_PROV FI_PROVIDER LD_PRELOAD efadv_query_qp_wqs
    libfabric1 memlock ofi_copy_to_mr_iov uverbs0 --device --ulimit
"""
ELSEWHERE = {
    *_ELSEWHERE.split(),
    *_OF_SLURM_AND_KUBERNETES.split(),
    *_OF_LIBFABRIC.split(),
}
WORD = re.compile(r"(?<![\w-])(?:--[a-z][a-z-]+|[A-Za-z_]\w{2,})")


@functools.cache
def words_of_the_code() -> set[str]:
    """Those of all that is no document, and the names of its files."""
    found = set()
    for path in files(".h", ".cc", ".cu", ".py", ".pyi", ".sh", ".pml", ".toml", ".txt", ""):
        found |= {path.name, path.stem}
        if path != Path(__file__).resolve() and path.name != "LICENSE":
            found |= set(WORD.findall(path.read_text(encoding="utf-8")))
    return found


def unknown_words(text: str) -> set[str]:
    """Of what stands in backticks outside of blocks."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    words = {word for span in spans for word in WORD.findall(span)}
    return words - words_of_the_code() - ELSEWHERE


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_what_stands_in_backticks_exists(document):
    unknown = unknown_words(document.read_text(encoding="utf-8"))
    if document.name == "conformance.md":  # names torch's tests
        unknown = {word for word in unknown if not re.match("test_|_gloo|_wait_all_ranks", word)}
    assert not unknown, "nothing is called so any more; if it is not ours, it goes into ELSEWHERE"


def test_a_wrong_word_in_backticks_is_found():
    assert unknown_words("calls `Operation::noSuchStage`, `run.sh --no-such-flag`") == {
        "noSuchStage",
        "--no-such-flag",
    }


def test_the_example_of_a_collective_is_compiled():
    section = (ROOT / "docs/extending.md").read_text("utf-8").split("## Add a collective")[1]
    (example,) = re.findall(r"```cpp\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    compiled = (ROOT / "tests/cpp/collectives/add_collective_test.cc").read_text(encoding="utf-8")
    between = re.search(r"// ---- in docs/extending.md\n(.*?)// ---- end\n", compiled, re.DOTALL)
    assert between
    assert example == between.group(1)


if __name__ == "__main__":
    page, found = ENVIRONMENT.read_text(encoding="utf-8"), written_native_rows()
    table = f"{found.group(1)}{native_rows()}\n{found.group(3)}"
    ENVIRONMENT.write_text(page.replace(found.group(), table), encoding="utf-8")
