"""Checks the installation and the machine. Exit code 1: groups cannot be made here."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from mooncake_backend import __version__, distribution, extension

OK, NOTE, BROKEN = "ok", "note", "BROKEN"
TRIAL_SECONDS = 60
SPARE_DESCRIPTORS = 32  # as in csrc/base/descriptors.cc
LANES = 2  # MOONCAKE_TCP_CONNECTIONS
MANY_RANKS = 1024


class Finding(NamedTuple):
    state: str  # OK; NOTE: works, but worse; BROKEN
    name: str
    text: str


def examine(
    trial: bool = True, show: Callable[[str], object] = print, peer: str | None = None
) -> int:
    """Prints every finding; returns the exit code. `peer`: the session id of a transfer engine."""
    broken = False
    for finding in _findings(trial, peer):
        show(f"{finding.state:>6}  {finding.name:<20} {finding.text}")
        broken |= finding.state == BROKEN
    return 1 if broken else 0


def _findings(trial: bool, peer: str | None) -> Iterator[Finding]:
    yield Finding(OK, "mooncake-backend", f"{__version__}, Python {platform.python_version()}")
    built = yield from _torch_and_extension()
    yield _names()
    yield from _machine()
    yield _addresses()
    if built:
        yield from _accelerators()
        yield from _fabric()
    if trial and built:
        yield _trial()
    if built:
        yield from _transfer_engine(peer)


def _torch_and_extension() -> Generator[Finding, None, bool]:
    """Returns whether the extension can be used."""
    try:
        import torch
    except Exception as error:
        yield Finding(BROKEN, "torch", f"cannot be imported: {error}")
        return False
    cuda = f"{torch.cuda.device_count()} devices" if torch.cuda.is_available() else "not available"
    yield Finding(OK, "torch", torch.__version__)
    yield Finding(OK, "CUDA", cuda)
    try:
        info = extension.load().build_info()
    except Exception as error:
        yield Finding(BROKEN, "extension", str(error))
        return False
    where = extension.choose(torch.__version__).path
    yield Finding(OK, "extension", f"built for torch {info['torch']}, {where}")
    for name in sorted(info.keys() - {"torch", "version"}):
        value = info[name]
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        yield Finding(OK, name.replace("_", " "), text)
    from mooncake_backend.registration import BACKENDS

    missing = [name for name in BACKENDS if name.upper() not in torch.distributed.Backend._plugins]
    if missing:
        hint = "mooncake_backend.register() says why"
        yield Finding(NOTE, "registration", f"{', '.join(missing)} not registered: {hint}")
    else:
        yield Finding(OK, "registration", ", ".join(BACKENDS))
    return True


def _names() -> Finding:
    try:
        distribution.check()
    except distribution.DistributionConflictError as error:
        return Finding(BROKEN, "package mooncake", str(error))
    owners = distribution.other_owners()
    if distribution.leaves_the_name():
        owner = ", ".join(owners) or "others"
        text = f"left to {owner}: ours are mooncake_backend.ep, .engine and .pg"
        return Finding(OK, "package mooncake", text)
    if owners:
        text = f"ours, but {', '.join(owners)} has files there too; removing it would remove ours"
        return Finding(NOTE, "package mooncake", text)
    return Finding(OK, "package mooncake", "no other distribution uses the name")


def _machine() -> Iterator[Finding]:
    usable = len(os.sched_getaffinity(0))
    yield Finding(OK, "CPUs", f"{usable} of {os.cpu_count()}")
    yield _descriptors()
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    free = f"{shm.f_bavail * shm.f_frsize >> 20} MiB free" if shm else "absent"
    yield Finding(OK if shm else NOTE, "/dev/shm", free)
    probes: list[tuple[str, Callable[[], None], str]] = [
        ("memfd", _memfd, "ranks on this host go over TCP"),
        ("abstract sockets", _abstract_socket, "ranks on this host go over TCP"),
        ("process_vm_readv", _read_own_memory, "large buffers are copied twice"),
    ]
    for name, probe, otherwise in probes:
        try:
            probe()
            yield Finding(OK, name, "works")
        except (OSError, AttributeError) as error:
            yield Finding(NOTE, name, f"{error}: {otherwise}")


def _descriptors() -> Finding:
    """Counts the ranks that the limit on open files allows. Making a group raises the soft limit to
    the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding(OK, "open files", "as many as there are ranks: there is no hard limit")
    ranks = max(0, hard - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS)
    limit = f"{soft}, raised to {hard}" if soft < hard else str(hard)
    text = f"{limit}: enough for {ranks} other ranks, "
    text += f"{ranks // (1 + LANES)} if much is fetched from each of them over TCP"
    if ranks >= MANY_RANKS:
        return Finding(OK, "open files", text)
    return Finding(NOTE, "open files", f"{text}; ulimit -n, LimitNOFILE= or --ulimit raises it")


def _memfd() -> None:
    os.close(os.memfd_create("mooncake-doctor", os.MFD_CLOEXEC))


def _abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.bind(f"\0mooncake-doctor-{os.getpid()}")


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_own_memory() -> None:
    """Reads this process's own memory, to see whether the kernel and its filters allow the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.create_string_buffer(b"mooncake"), ctypes.create_string_buffer(9)
    pieces = [_Piece(ctypes.addressof(buffer), 9) for buffer in (target, source)]
    size = libc.process_vm_readv(
        os.getpid(), ctypes.byref(pieces[0]), 1, ctypes.byref(pieces[1]), 1, ctypes.c_ulong(0)
    )
    if size != 9:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _addresses() -> Finding:
    try:
        found = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError as error:
        return Finding(NOTE, "host name", f"{socket.gethostname()} has no address ({error})")
    return Finding(OK, "host name", f"{socket.gethostname()}: {', '.join(sorted(map(str, found)))}")


def _protocol() -> str:
    """The protocol that MOONCAKE_TRANSPORTS implies: only `fabric` uses cards."""
    wires = os.environ.get("MOONCAKE_TRANSPORTS", "").split(",")
    return "fabric" if "fabric" in wires else "tcp"


def _transfer_engine(peer: str | None) -> Iterator[Finding]:
    """Makes an engine: its limits, and the live wire to a peer. The log says why it fails."""
    from mooncake_backend.engine import TransferEngine

    engine = TransferEngine()
    protocol = _protocol()
    if engine.initialize("", "P2PHANDSHAKE", protocol, "") != 0:
        text = f"cannot be initialized with protocol {protocol}: the log above says why"
        yield Finding(BROKEN, "transfer engine", text)
        return
    most = engine.get_limits()
    text = f"protocol {protocol}, port {engine.get_rpc_port()}; "
    text += f"{most['transfers']} transfers under way at a time, "
    text += f"{most['io_threads']} threads for TCP, {most['registrations']} registrations"
    yield Finding(OK, "transfer engine", text)
    if peer is None:
        return
    start = time.perf_counter()
    code = engine.send_probe(peer)
    took = (time.perf_counter() - start) * 1e3
    wire = engine.get_transport(peer) if code == 0 else ""
    if wire:
        yield Finding(OK, f"peer {peer}", f"over {wire}; answered in {took:.1f} ms")
    else:
        yield Finding(BROKEN, f"peer {peer}", f"cannot be reached ({code}): the log above says why")


def _fabric() -> Iterator[Finding]:
    """libfabric and network cards. Without them everything else works."""
    try:
        findings = extension.load().describe_fabric()
    except ValueError as error:
        yield Finding(BROKEN, "network cards", str(error))
        return
    for works, name, text in findings:
        yield Finding(OK if works else NOTE, name, text)


def _accelerators() -> Iterator[Finding]:
    """Drivers of devices. Without them everything else works."""
    findings = extension.load().describe_accelerators("cuda")
    for works, name, text in findings:
        yield Finding(OK if works else NOTE, name, text)
    if findings[0][0]:
        yield _connections()


def _connections() -> Finding:
    """The hardware queues that CUDA gives the streams of a process."""
    setting, wanted = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""), "32"
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if setting == wanted:
        return Finding(OK, "queues of streams", f"{name}={setting}")
    return Finding(
        NOTE,
        "queues of streams",
        f"{name}={setting or '8, the default'}: set it to {wanted}, so that fewer streams share a "
        "queue and more groups wait without the host (docs/gpu-deployment.md)",
    )


def _trial() -> Finding:
    """Runs an all_reduce on two ranks of this host."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        text = f"{error}: set TMPDIR to a folder that can be written"
        return Finding(NOTE, "two-rank trial", text)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mooncake-doctor-") as folder:
        ranks = [
            context.Process(target=_trial_rank, args=(rank, folder), daemon=True)
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(TRIAL_SECONDS)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        answers = [path.read_text() for path in sorted(Path(folder).glob("answer*"))]
    if answers == ["3.0", "3.0"]:
        return Finding(OK, "two-rank trial", "all_reduce gave the right sum")
    said = "; ".join(answers) or "no answer"
    return Finding(BROKEN, "two-rank trial", f"all_reduce of 1 and 2: {said}")


def _trial_rank(rank: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from mooncake_backend.registration import register

    try:
        register()
        dist.init_process_group(
            "mooncake",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=TRIAL_SECONDS / 2),
        )
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        dist.destroy_process_group()
        answer = str(value.item())
    except Exception as error:
        answer = repr(error)
    Path(folder, f"answer{rank}").write_text(answer)
