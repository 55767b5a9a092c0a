"""The package as others meet it: installed, shadowed, broken, beside another `mooncake`."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import timedelta
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import mooncake_backend
from mooncake_backend import MooncakeBackendOptions, doctor, extension, group, membership
from mooncake_backend.options import TESTED_RANKS

ROOT = Path(__file__).resolve().parents[1]
DIRECTORIES = ("mooncake_backend", "ep", "tests", "benchmarks", "csrc")
LIBRARY = "_C" + EXTENSION_SUFFIXES[0]
OTHER = "mooncake-transfer-engine"
OTHER_FILES = {
    "mooncake/__init__.py": "",
    "mooncake/pg.py": "owner = 'other'\n",
    "mooncake/engine.py": "owner = 'other'\n",
}
MAKE_A_GROUP = """
import torch.distributed as dist
dist.init_process_group("mooncake", store=dist.HashStore(), rank=0, world_size=1)
"""


def run_python(code: str, *paths: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment, cwd=cwd, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def install_ours(
    site: Path, torch_version: str = torch.__version__, beside_upstream: bool = False
) -> None:
    """The files that our wheel would put into `site`, with a library that cannot be loaded."""
    skip = shutil.ignore_patterns("_C.*", "compat", "__pycache__")
    shutil.copytree(ROOT / "mooncake_backend", site / "mooncake_backend", ignore=skip)
    shutil.copytree(ROOT / "ep", site / "mooncake_backend/ep", ignore=skip)
    if not beside_upstream:
        shutil.copytree(ROOT / "mooncake_backend/compat", site / "mooncake", dirs_exist_ok=True)
    (site / "mooncake_backend" / LIBRARY).write_bytes(b"not a library")
    record = {"version": mooncake_backend.__version__, "torch": torch_version}
    (site / "mooncake_backend/_C.json").write_text(json.dumps(record))
    info = site / f"mooncake_backend-{mooncake_backend.__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: mooncake-backend\nVersion: {mooncake_backend.__version__}\n"
    )
    packages = ["mooncake_backend"] if beside_upstream else ["mooncake", "mooncake_backend"]
    (info / "top_level.txt").write_text("".join(f"{name}\n" for name in packages))
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nmooncake = mooncake_backend:register_at_import\n"
    )


def install_other(site: Path) -> None:
    for name, text in {**OTHER_FILES, **other_metadata()}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def other_metadata() -> dict[str, str]:
    info = f"{OTHER.replace('-', '_')}-0.3.0.dist-info"
    files = [*OTHER_FILES, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {OTHER}\nVersion: 0.3.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/top_level.txt": "mooncake\n",
        f"{info}/RECORD": "".join(f"{name},,\n" for name in files),
    }


class TestImport:
    def test_torch_alone_registers_both_names_and_loads_nothing(self, tmp_path):
        install_ours(tmp_path)
        result = run_python(
            "import sys, torch; b = torch.distributed.Backend;"
            "print(b.backend_capability['mooncake'], b.backend_capability['mooncake-cpu']);"
            "print(sorted(m for m in sys.modules if m.startswith('mooncake')))",
            tmp_path, cwd=tmp_path,
        )  # fmt: skip
        capability, modules = result.stdout.splitlines()
        assert capability == "['cpu', 'cuda'] ['cpu']", result.stderr
        assert modules == "['mooncake_backend', 'mooncake_backend.registration']"

    def test_registering_twice_changes_nothing(self):
        mooncake_backend.register()
        plugins = dict(dist.Backend._plugins)
        mooncake_backend.register()
        assert plugins == dist.Backend._plugins
        assert {"MOONCAKE", "MOONCAKE-CPU"} <= plugins.keys()

    @pytest.mark.parametrize("damage", ["raise OSError('disk')", "this is no Python", "del dist"])
    def test_a_broken_install_never_breaks_torch(self, tmp_path, damage):
        install_ours(tmp_path)
        (tmp_path / "mooncake_backend/registration.py").write_text(damage)
        result = run_python("import torch; print('alive')", tmp_path, cwd=tmp_path)
        assert result.stdout == "alive\n", result.stderr
        assert "not registered" in result.stderr

    def test_entry_point_is_installed(self):
        try:
            importlib.metadata.distribution("mooncake-backend")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("not installed: running from the sources")
        points = importlib.metadata.entry_points(group="torch.backends", name="mooncake")
        assert {point.value for point in points} == {"mooncake_backend:register_at_import"}

    def test_all_names_exist(self):
        for name in mooncake_backend.__all__:
            assert getattr(mooncake_backend, name) is not None
        with pytest.raises(AttributeError):
            _ = mooncake_backend.no_such_name

    def test_nothing_imports_a_top_level_ep_or_kernels(self):
        for file in [
            *ROOT.glob("*.py"),
            *(f for d in DIRECTORIES for f in (ROOT / d).rglob("*.py")),
        ]:
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module]
                assert not {name.split(".")[0] for name in names} & {"ep", "kernels"}, file


class TestExtension:
    def test_another_torch_is_named_before_anything_is_loaded(self, tmp_path):
        install_ours(tmp_path, torch_version="2.1.0")
        # Else the one that is installed where the tests run would be taken.
        only_this = (
            "from mooncake_backend import extension as e;"
            "this = next(e.builds()); e.builds = lambda: iter([this])"
        )
        result = run_python(only_this + MAKE_A_GROUP, tmp_path, cwd=tmp_path)
        last = result.stderr.splitlines()[-1]
        assert last.startswith("ImportError"), result.stderr
        assert "built for torch 2.1," in last
        assert f"torch {torch.__version__} is running" in last
        assert "--no-build-isolation" in last

    def test_a_source_folder_uses_the_installed_extension(self, tmp_path):
        clone, site = tmp_path / "clone", tmp_path / "site"
        install_ours(site)
        shutil.copytree(site / "mooncake_backend", clone / "mooncake_backend")
        (clone / "mooncake_backend" / LIBRARY).unlink()
        result = run_python(
            "import torch; from mooncake_backend import extension as e;"
            "print(e.__file__); print(e.choose(torch.__version__).path)",
            site, cwd=clone,
        )  # fmt: skip
        python_file, library = result.stdout.splitlines()
        assert python_file == str(clone / "mooncake_backend/extension.py")
        assert library == str(site / "mooncake_backend" / LIBRARY)

    def test_a_fitting_build_is_taken_before_one_that_does_not_fit(self, tmp_path):
        clone, site = tmp_path / "clone", tmp_path / "site"
        install_ours(clone, torch_version="2.1.0")
        install_ours(site)
        shutil.rmtree(next(clone.glob("*.dist-info")))
        result = run_python(
            "import torch; from mooncake_backend import extension as e;"
            "print(e.choose(torch.__version__).path)",
            site, cwd=clone,
        )  # fmt: skip
        assert result.stdout.strip() == str(site / "mooncake_backend" / LIBRARY), result.stderr

    def test_without_an_extension_the_error_says_what_to_do(self, monkeypatch):
        monkeypatch.setattr(extension, "builds", lambda: iter(()))
        with pytest.raises(ImportError, match=r"not built.*pip install"):
            extension.choose("2.11.0")

    def test_python_files_of_another_version_are_named(self):
        build = extension.Build(Path("x"), "0.0.1", "2.11.0")
        assert "0.0.1" in build.mismatch("2.11.3+cu130")

    def test_stubs_declare_what_the_extension_has(self):
        try:
            native = extension.load()
        except ImportError as error:
            pytest.skip(str(error))
        stubs = ast.parse((ROOT / "mooncake_backend/_C.pyi").read_text())
        for node in stubs.body:
            if isinstance(node, ast.FunctionDef):
                text = getattr(native, node.name).__doc__
                for argument in node.args.args:
                    assert re.search(rf"\b{argument.arg}\b", text), f"{node.name}: {argument.arg}"
            elif isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef):
                        assert hasattr(getattr(native, node.name), member.name)
        info = native.build_info()
        assert info["version"] == mooncake_backend.__version__
        assert torch.__version__.startswith(info["torch"].rsplit(".", 1)[0])


class TestOtherOwner:
    """`mooncake` may belong to another distribution; whichever came last wins, file by file."""

    def test_installed_after_ours(self, tmp_path):
        install_ours(tmp_path)
        install_other(tmp_path)
        for code in ("import mooncake.ep", MAKE_A_GROUP):
            self.assert_conflict(run_python(code, tmp_path, cwd=tmp_path))

    def test_installed_before_ours(self, tmp_path):
        install_other(tmp_path)
        install_ours(tmp_path)
        result = run_python(
            "import mooncake.ep, mooncake.pg as pg; print(pg.get_active_ranks);"
            "from mooncake_backend import distribution as d; print(d.other_owners())",
            tmp_path, cwd=tmp_path,
        )  # fmt: skip
        assert OTHER in result.stdout, result.stderr

    def test_found_first_beside_an_editable_install(self, tmp_path):
        install_other(tmp_path)
        register = "import mooncake_backend; mooncake_backend.register()"
        self.assert_conflict(run_python(register + MAKE_A_GROUP, tmp_path, ROOT, cwd=tmp_path))

    def test_doctor_says_so(self, tmp_path):
        install_ours(tmp_path)
        install_other(tmp_path)
        code = "from mooncake_backend.doctor import examine; raise SystemExit(examine(trial=False))"
        result = run_python(code, tmp_path, cwd=tmp_path)
        assert result.returncode == 1
        assert re.search(rf"BROKEN +package mooncake .*{OTHER}", result.stdout)

    def test_works_without_the_package_mooncake(self, tmp_path):
        install_ours(tmp_path)
        shutil.rmtree(tmp_path / "mooncake")
        code = (
            "import sys; f = sys.meta_path; f[:] = [x for x in f if 'editable' not in repr(x)];"
            "from mooncake_backend import distribution as d; d.check(); print('fine')"
        )
        assert run_python(code, tmp_path, cwd=tmp_path).stdout == "fine\n"

    def assert_conflict(self, result):
        last = result.stderr.splitlines()[-1]
        assert "DistributionConflictError" in last, result.stderr
        assert OTHER in last
        assert "pip uninstall" in last


class TestBesideUpstream:
    """Built with MOONCAKE_BUILD_BESIDE_UPSTREAM=1: the package `mooncake` is another wheel's."""

    def test_each_has_its_names(self, tmp_path):
        install_ours(tmp_path, beside_upstream=True)
        install_other(tmp_path)
        result = run_python(
            "import mooncake.pg, mooncake.engine; print(mooncake.pg.owner, mooncake.engine.owner);"
            "from mooncake_backend import ep, pg; print(ep.Buffer.__name__, pg.get_active_ranks)",
            tmp_path, cwd=tmp_path,
        )  # fmt: skip
        others, ours = result.stdout.splitlines()
        assert others == "other other", result.stderr
        assert ours.startswith("Buffer ")

    def test_making_a_group_is_no_conflict(self, tmp_path):
        install_ours(tmp_path, torch_version="2.1.0", beside_upstream=True)
        install_other(tmp_path)
        last = run_python(MAKE_A_GROUP, tmp_path, cwd=tmp_path).stderr.splitlines()[-1]
        assert last.startswith("ImportError"), last
        assert "DistributionConflict" not in last

    def test_doctor_says_so(self, tmp_path):
        install_ours(tmp_path, beside_upstream=True)
        install_other(tmp_path)
        code = "from mooncake_backend.doctor import examine; examine(trial=False)"
        shown = run_python(code, tmp_path, cwd=tmp_path).stdout
        assert re.search(rf" ok +package mooncake +left to {OTHER}", shown), shown

    def test_modules_have_one_identity_under_both_names(self, tmp_path):
        install_ours(tmp_path)
        result = run_python(
            "import mooncake.ep.events, mooncake_backend.ep as ep;"
            "import mooncake.ep.mooncake_buffer as one, mooncake_backend.ep.mooncake_buffer as two;"
            "from mooncake.mooncake_ep_buffer import Buffer; import mooncake;"
            "assert one is two and Buffer is one.Buffer and mooncake.ep is ep;"
            "assert mooncake.ep.events.EventOverlap is ep.EventOverlap; print('fine')",
            tmp_path, cwd=tmp_path,
        )  # fmt: skip
        assert result.stdout == "fine\n", result.stderr


class TestOptions:
    def test_every_form_that_callers_use(self):
        ranks = torch.zeros(4, dtype=torch.int32)
        for options in (
            MooncakeBackendOptions(ranks, False, 8),
            MooncakeBackendOptions(ranks, is_extension=False, max_world_size=8),
            MooncakeBackendOptions(active_ranks=ranks, is_extension=False, max_group_size=8),
        ):
            assert options.active_ranks is ranks
            assert not options.is_extension
            assert options.max_group_size == 8
        by_size = MooncakeBackendOptions(8, False, True, True)
        assert (by_size.max_group_size, by_size.auto_sync_on_failure) == (8, True)
        assert MooncakeBackendOptions(max_group_size=-1).max_group_size is None
        assert MooncakeBackendOptions(failure_timeout=timedelta(seconds=2)).failure_timeout == 2
        assert MooncakeBackendOptions(transports=["tcp"]).transports == ("tcp",)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"active_ranks": torch.ones(4)}, "int32"),
            ({"active_ranks": [1, 1]}, "tensor"),
            ({"active_ranks": torch.ones(2, 2, dtype=torch.int32)}, "one dimension"),
            ({"is_extension": 1}, "True or False"),
            ({"max_group_size": 0}, "positive"),
            ({"max_group_size": 4, "max_world_size": 4}, "same thing"),
            ({"transports": "tcp"}, "tuple"),
            ({"failure_timeout": 0}, "at least 0.01 and at most 86400"),
            ({"failure_timeout": -1.0}, "at least 0.01"),
            ({"failure_timeout": float("nan")}, "failure_timeout is nan seconds"),
            ({"failure_timeout": float("inf")}, "failure_timeout is inf seconds"),
            ({"failure_timeout": 1e10}, "at most 86400, a day"),
            ({"failure_timeout": timedelta.max}, "at most 86400"),
            ({"failure_timeout": "3"}, "seconds or a timedelta"),
            ({"time_out": 3}, "has no 'time_out'"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, arguments, message):
        with pytest.raises((TypeError, ValueError), match=message):
            MooncakeBackendOptions(**arguments)

    def test_sizes_are_checked_against_the_group(self):
        small = MooncakeBackendOptions(torch.ones(2, dtype=torch.int32))
        with pytest.raises(ValueError, match="2 elements"):
            small.for_group(4)
        with pytest.raises(ValueError, match="max_group_size is 2"):
            MooncakeBackendOptions(2).for_group(4)

    def test_a_size_beyond_what_was_tested_is_refused(self):
        assert MooncakeBackendOptions(TESTED_RANKS).for_group(4)["max_group_size"] == TESTED_RANKS
        with pytest.raises(ValueError, match=f"max_group_size is 1024, .* {TESTED_RANKS} ranks"):
            MooncakeBackendOptions(1024).for_group(4)
        # A group that is so large does not grow.
        assert MooncakeBackendOptions(1024).for_group(1024)["max_group_size"] == 1024
        tested = Path(__file__).parent / "cpp/collectives/large_group_test.cc"
        assert f"constexpr int kRanks = {TESTED_RANKS};" in tested.read_text(encoding="utf-8")

    def test_environment_is_read_when_no_options_are_given(self, monkeypatch):
        monkeypatch.setenv("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE", "0")
        options = MooncakeBackendOptions.from_environment()
        assert options == MooncakeBackendOptions(auto_sync_on_failure=False)
        assert options.for_group(2)["lost_ranks_stay_until"] == "synced"
        monkeypatch.setenv("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE", "0")
        stays = MooncakeBackendOptions.from_environment().for_group(2)["lost_ranks_stay_until"]
        assert stays == "deactivated"
        monkeypatch.delenv("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE")
        monkeypatch.setenv("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE", "yes")
        assert MooncakeBackendOptions.from_environment() == MooncakeBackendOptions()
        monkeypatch.setenv("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE", "maybe")
        with pytest.raises(ValueError, match="MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"):
            MooncakeBackendOptions.from_environment()


class TestGroup:
    @pytest.fixture
    def native(self, monkeypatch):
        """A stand-in for the extension, which keeps what it is called with."""

        class MooncakeBackend:
            def __init__(self, *arguments):
                self.arguments = arguments
                self.active_ranks = arguments[7]["active_ranks"]

            def note_losses_read(self):
                pass

        module = ModuleType(extension.NAME)
        module.MooncakeBackend = MooncakeBackend
        module.create_backend = MooncakeBackend
        monkeypatch.setitem(sys.modules, extension.NAME, module)
        return module

    @staticmethod
    def create(options=None):
        asked = SimpleNamespace(
            store="store", group_rank=1, group_size=4, global_ranks_in_group=[3, 5, 7, 9],
            group_id="g", timeout=timedelta(seconds=9),
        )  # fmt: skip
        return group.create_backend("mooncake", asked, options)

    def test_the_extension_gets_everything(self, native):
        mooncake_backend.set_host_ip("127.0.0.2")
        try:
            *given, options, world = self.create(MooncakeBackendOptions(8)).arguments
        finally:
            mooncake_backend.options._settings.update(host_ip=None)
        assert given == ["store", 1, 4, [3, 5, 7, 9], "g", timedelta(seconds=9), "mooncake"]
        assert options["host_ip"] == "127.0.0.2"
        assert options["active_ranks"].tolist() == [1] * 4 + [0] * 4
        assert world is None

    def test_the_callers_tensor_is_kept(self, native):
        ranks = torch.zeros(4, dtype=torch.int32)
        backend = self.create(MooncakeBackendOptions(ranks))
        assert membership.get_active_ranks(backend) is ranks

    def test_options_of_another_backend_are_no_error(self, native):
        """torch hands NCCL's options to every backend of "cpu:mooncake-cpu,cuda:nccl"."""
        foreign = torch._C._distributed_c10d.Backend.Options("nccl", timedelta(seconds=1))
        assert self.create(foreign).active_ranks.tolist() == [1] * 4
        with pytest.raises(TypeError, match="MooncakeBackendOptions"):
            self.create({"transports": ["tcp"]})

    def test_a_group_of_another_backend_is_refused(self, native):
        with pytest.raises(ValueError, match="neither a mooncake group"):
            membership.get_active_ranks(object())


class TestLater:
    def test_compat_modules_have_upstreams_names(self, tmp_path):
        install_ours(tmp_path)
        result = run_python(
            """
from mooncake import ep, pg
from mooncake.mooncake_ep_buffer import Buffer, EventOverlap
for name in ('MooncakeBackendOptions set_device_filter set_host_ip get_active_ranks get_peer_state'
             ' recover_ranks deactivate_ranks join_group get_num_synced_ranks'
             ' extend_group_size_to').split():
    assert getattr(pg, name) is getattr(ep, name), name
assert ep.get_ep_buffer_size_hint is Buffer.get_ep_buffer_size_hint
assert EventOverlap is ep.EventOverlap
for name in 'dispatch combine connect update_ep_member get_next_combine_buffer'.split():
    assert callable(getattr(Buffer, name)), name
for name in 'Buffer Config ElasticBuffer EPHandle EventHandle EventOverlap'.split():
    assert callable(getattr(ep, name)), name
from mooncake.allocator import BarexAllocator, NVLinkAllocator
from mooncake.mooncake_elastic_buffer import ElasticBuffer, EPHandle, EventOverlap
for name in 'dispatch combine update_ep_member destroy barrier get_buffer_size_hint'.split():
    assert callable(getattr(ElasticBuffer, name)), name
print('fine')
""",
            tmp_path, cwd=tmp_path,
        )  # fmt: skip
        assert result.stdout == "fine\n", result.stderr


class TestDoctor:
    def test_without_a_temporary_folder_it_makes_no_trial(self, monkeypatch):
        def nowhere() -> str:
            raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

        monkeypatch.setattr(doctor.tempfile, "gettempdir", nowhere)
        found = doctor._trial()
        assert (found.state, found.name) == (doctor.NOTE, "two-rank trial")
        assert "set TMPDIR to a folder that can be written" in found.text

    def test_it_tells_what_there_is_of_a_fabric(self, monkeypatch):
        def found() -> dict[str, str]:
            lines: list[str] = []
            doctor.examine(trial=False, show=lines.append)
            return {line[8:28].strip(): line for line in lines}

        native = extension.load()
        monkeypatch.setenv("MOONCAKE_FABRIC_REQUIRE", "efa")
        if not native.describe_fabric()[0][0]:
            assert "note" in found()["libfabric"]
            pytest.skip("no libfabric here")
        if not native.describe_fabric()[1][0]:
            assert "MOONCAKE_FABRIC_REQUIRE" in found()["network cards"]
        monkeypatch.setenv("MOONCAKE_FABRIC_REQUIRE", "tcp;ofi_rxm")
        monkeypatch.setenv("MC_TE_FILTERS", "127.0.0.1")
        lines = found()
        assert "libfabric.so" in lines["libfabric"]
        assert "  ok" in lines["network cards"]
        assert "127.0.0.1" in lines["cards for cpu:0"]
        monkeypatch.setenv("MC_EFA_NIC_SELECTION", "some")
        assert "BROKEN" in found()["network cards"]

    def test_it_tells_what_drives_devices(self):
        lines: list[str] = []
        doctor.examine(trial=False, show=lines.append)
        described = extension.load().describe_accelerators("cuda")
        found = [line for line in lines if line[8:28].startswith("cuda device")]
        assert [line.split()[0] for line in found] == [
            "ok" if works else "note" for works, _, _ in described
        ]
        if not described[0][0]:
            assert len(found) == 1
            assert "driver" in found[0]

    def test_doctor_names_the_queues_of_streams(self, monkeypatch):
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        for setting, state, text in [
            (None, doctor.NOTE, "8, the default"),
            ("1", doctor.NOTE, f"{name}=1: set it to 32"),
            ("32", doctor.OK, f"{name}=32"),
        ]:
            monkeypatch.delenv(name, raising=False)
            if setting is not None:
                monkeypatch.setenv(name, setting)
            finding = doctor._connections()
            assert finding.state == state
            assert text in finding.text

    def test_it_tells_the_ways_between_devices(self):
        native = extension.load()
        if not hasattr(native, "fake_devices"):
            pytest.skip("a build without fake devices")
        (works, name, text), *devices = native.describe_accelerators("fake")
        assert (works, name, text) == (True, "fake devices", "2, fake driver")
        has_kernels = not native.build_info()["kernels"].startswith("none")
        way = "peer access" if has_kernels else "the engine"
        assert devices == [
            (
                True,
                f"fake device {i}",
                f"fake device; between processes: {way} to 0, 1; "
                "network cards: kernels see their writes in order",
            )
            for i in range(2)
        ]

    def test_a_missing_extension_is_broken(self, monkeypatch):
        monkeypatch.setattr(extension, "builds", lambda: iter(()))
        monkeypatch.delitem(sys.modules, extension.NAME, raising=False)
        lines = []
        assert doctor.examine(trial=False, show=lines.append) == 1
        assert [line for line in lines if "BROKEN" in line and "not built" in line]
        assert [line for line in lines if "process_vm_readv" in line]

    @pytest.mark.parametrize(
        ("limits", "found"),
        [
            ((300, 300), r"note  open files +300: enough for (\d+) other ranks, (\d+) if"),
            ((300, 5000), r"  ok  open files +300, raised to 5000: .* (\d+) other ranks, (\d+)"),
        ],
    )  # fmt: skip
    def test_for_how_many_ranks_the_descriptors_suffice(self, monkeypatch, limits, found):
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: limits)
        lines = []
        doctor.examine(trial=False, show=lines.append)
        (said,) = [match for line in lines if (match := re.search(found, line))]
        ranks, much = map(int, said.groups())
        assert limits[1] - 200 < ranks < limits[1]
        assert much == ranks // 3


@pytest.mark.slow
class TestInstall:
    """Real installs into fresh environments that see this one's torch."""

    @pytest.fixture
    def python(self, tmp_path):
        """A fresh environment's interpreter; torch is linked, as installing it takes minutes."""
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
        python = tmp_path / "env/bin/python"
        site = self.output(python, "import sysconfig; print(sysconfig.get_path('purelib'))")
        # In a folder of their own: pip must not think that it may uninstall them.
        links = tmp_path / "links"
        links.mkdir()
        for entry in Path(torch.__file__).parents[1].iterdir():
            if not entry.name.startswith(("mooncake", "__editable__", "distutils-precedence")):
                (links / entry.name).symlink_to(entry)
        Path(site, "links.pth").write_text(f"{links}\n")
        return python

    @staticmethod
    def output(python, code, cwd="/"):
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    @staticmethod
    def pip(python, *arguments):
        done = subprocess.run(
            [python, "-m", "pip", "install", "--no-deps", *arguments],
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.fixture
    def clone(self, tmp_path):
        skip = shutil.ignore_patterns(
            ".git", ".venv", "build", "dist", "*.egg-info", "_C.*.so", "_C.json", "__pycache__"
        )
        return shutil.copytree(ROOT, tmp_path / "clone", ignore=skip)

    LOADED = "from mooncake_backend import extension as e; e.load(); print(e.__file__)"

    def test_isolated(self, python, clone):
        self.pip(python, clone)
        assert "site-packages" in self.output(python, self.LOADED)
        # The clone's own folder shadows the package there, and has no library.
        assert str(clone) in self.output(python, self.LOADED, cwd=clone)

    def test_without_isolation(self, python, clone):
        self.pip(python, "setuptools<82", "wheel", "cmake", "ninja")
        self.pip(python, "--no-build-isolation", clone)
        self.output(python, self.LOADED)

    def test_editable_and_the_other_owner_beside(self, python, clone, tmp_path):
        self.pip(python, "-e", clone)
        assert str(clone) in self.output(python, self.LOADED)
        assert str(clone) in self.output(python, "import mooncake.ep as m; print(m.__file__)")
        wheel = tmp_path / f"{OTHER.replace('-', '_')}-0.3.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in {**OTHER_FILES, **other_metadata()}.items():
                archive.writestr(name, text)
        self.pip(python, wheel)
        for code in ("import mooncake.ep", MAKE_A_GROUP):
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
            TestOtherOwner().assert_conflict(done)

    def test_beside_upstreams_wheel(self, python, clone, monkeypatch):
        """The wheel without CUDA, from PyPI: its store must work as before."""
        upstream = f"{OTHER}-non-cuda==0.3.13.post1"
        self.pip(python, upstream)
        store = "import mooncake.store as s; print(s.MooncakeDistributedStore, s.__file__)"
        alone = self.output(python, store)
        monkeypatch.setenv("MOONCAKE_BUILD_BESIDE_UPSTREAM", "1")
        self.pip(python, clone)
        self.output(python, self.LOADED)
        assert self.output(python, store) == alone
        for program in ("import mooncake.engine", "import mooncake_backend.engine"):
            engine = f"{program} as e; print(e.TransferEngine)"
            assert "TransferEngine" in self.output(python, engine)
        shown = subprocess.run(
            [python, "-m", "mooncake_backend", "doctor"],
            capture_output=True, text=True, cwd="/", timeout=300,
        )  # fmt: skip
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert re.search(rf" ok +package mooncake +left to {OTHER}", shown.stdout)
        bench = python.parent / "transfer_engine_bench"
        assert "mooncake_backend" not in bench.read_text()

    def test_wheel_by_build(self, python, clone):
        self.pip(python, "build", "pyproject_hooks", "packaging")
        # Called by its bare name, not activated: only the caller's PATH tells whose torch counts.
        environment = dict(os.environ)
        environment["PATH"] = os.pathsep.join([str(python.parent), environment["PATH"]])
        environment.pop("VIRTUAL_ENV", None)
        subprocess.run(
            ["python", "-m", "build"], cwd=clone, env=environment, check=True, timeout=900
        )
        (wheel,) = (clone / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            library = f"mooncake_backend/{LIBRARY}"
            assert str(clone).encode() not in archive.read(library)
            for name in (b"SimTransport", b"FakeDevices"):
                assert name not in archive.read(library), f"{name} is for tests only"
            c_library = "mooncake_backend/lib/libtransfer_engine.so"
            assert str(clone).encode() not in archive.read(c_library)
        for name in (
            library,
            "mooncake_backend/_C.json",
            "mooncake_backend/py.typed",
            "mooncake_backend/include/transfer_engine_c.h",
            "mooncake/pg.py",
            "mooncake/ep.py",
            "mooncake_backend/ep/buffer.py",
            "mooncake_backend/ep/on_path/deep_ep/buffers/legacy.py",
            "mooncake_backend/ep/on_path/deep_ep/utils/math.py",
        ):
            assert name in names
        assert not [
            name for name in names if name.startswith(("ep/", "tests/", "csrc/", "kernels/"))
        ]
        self.pip(python, wheel)
        self.output(python, self.LOADED)
