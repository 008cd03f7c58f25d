"""Memory, control groups and processors are read from the kernel's files; each test lays out files of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorkeep import machine
from tensorkeep.errors import NotFoundError
from tensorkeep.machine import available_bytes, memory_limit, physical_cores
from tensorkeep.testing.cases import case

MIB = 1024**2


def kernel(tmp_path: Path, cgroup: str, files: dict[str, str]) -> dict[str, Path]:
    for name, content in {
        "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:    2048 kB\n",
        "proc/self/cgroup": cgroup,
        **{f"groups/{name}": content for name, content in files.items()},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "groups").mkdir(exist_ok=True)
    return {"proc": tmp_path / "proc", "groups": tmp_path / "groups"}


def test_control_groups_limit_the_available_memory(tmp_path: Path) -> None:
    parent = {"a/memory.max": "1000000\n", "a/memory.current": "900000\n"}
    parent |= {"a/memory.stat": "anon 5\ninactive_file 50000\n"}
    parent |= {"a/b/memory.max": "max\n", "a/b/memory.current": "800000\n"}
    root = {"memory.max": "7000\n", "memory.current": "8000\n"}
    first = {"memory/x/memory.limit_in_bytes": "5000\n", "memory/x/memory.usage_in_bytes": "4000\n"}
    version_1 = "5:cpu:/x\n4:hugetlb,memory:/x\n"
    for label, cgroup, files, available in (
        ("no group: that of meminfo", "0::/\n", {}, 2 * MIB),
        ("a parent, whose page cache counts as free", "0::/a/b\n", parent, 150_000),
        ("a group that is mounted as the root", "0::/not/visible/here\n", root, 0),
        ("version 1", version_1, first, 1000),
    ):
        with case(label):
            assert available_bytes(**kernel(tmp_path / label, cgroup, files)) == available
    assert memory_limit(**kernel(tmp_path, version_1, first)) == 5000
    unlimited = {**first, "memory/x/memory.limit_in_bytes": "9223372036854771712\n"}
    assert list(machine._group_limits(**kernel(tmp_path, version_1, unlimited))) == []


def test_available_memory_of_this_machine_and_without_meminfo(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_bytes() < physical
    assert available_bytes(proc=tmp_path, groups=tmp_path) > 0  # free pages


def test_peak_memory_without_vmhwm_is_that_of_getrusage(tmp_path: Path) -> None:
    assert machine.peak_resident_bytes(proc=tmp_path) > MIB
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("VmRSS:\t1 kB\n")
    assert machine.peak_resident_bytes(proc=tmp_path) > MIB


def test_private_memory_of_this_process_and_of_one_that_ended() -> None:
    assert 0 < machine.private_bytes(os.getpid()) <= machine.resident_bytes()
    assert machine.private_bytes(2**30) == 0


@pytest.mark.integration
def test_processes_that_a_process_has_started_are_found() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **pipes) as process:
        process.stdout.readline()
        found = machine.family(os.getpid())
        assert process.pid in found and len(machine.family(process.pid)) == 2
        assert set(machine.family(process.pid)) < set(found)
        process.communicate(b"\n")
    assert machine.family(2**30) == [2**30]


def test_physical_cores_are_the_first_of_their_hyper_threads(tmp_path: Path) -> None:
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}.items():
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    for given, found in (({0, 1, 4, 5}, {0, 1}), ({4, 5}, {4, 5}), ({0, 4, 9}, {0, 9})):
        assert physical_cores(given, cpus=tmp_path) == found, given


def test_storage_of_a_folder_leaves_it_empty(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such folder"):
        machine.storage(tmp_path / "missing")
    found = machine.storage(tmp_path)
    assert (found["path"], found["problem"]) == (str(tmp_path.resolve()), None)
    assert 0 < found["free_bytes"] <= found["total_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_mount_point_with_blanks_and_foreign_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "self").mkdir()
    mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 8:2 / /mnt/data\\040été中 rw - xfs /dev/b rw\n"
    (tmp_path / "self" / "mountinfo").write_text(mounts)
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert machine._mount(Path("/mnt/data été中/run")) == ("xfs", "/mnt/data été中")
    assert machine._mount(Path("/mnt/other")) == ("ext4", "/")


def test_a_file_in_memory_needs_nothing_of_python_and_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    fd = machine.memory_file()
    try:
        os.pwrite(fd, b"bytes", 3)
        assert os.pread(fd, 8, 0) == bytes(3) + b"bytes"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    monkeypatch.setattr(machine, "_MFD_CLOEXEC", 1 << 30)  # a flag that does not exist
    with pytest.raises(OSError, match="Invalid argument"):
        machine.memory_file()


def test_whether_bfloat16_is_fast_follows_from_the_features_of_the_cpu(tmp_path: Path) -> None:
    for lines, fast in {
        "vendor_id : AuthenticAMD\nflags : fma avx512_bf16": True,
        "vendor_id : GenuineIntel\nflags : fma avx512_bf16": False,
        "vendor_id : GenuineIntel\nflags : fma avx512_bf16 amx_bf16": True,
        "vendor_id : AuthenticAMD\nflags : fma avx2": False,
        "CPU implementer : 0x41\nFeatures : fp asimd i8mm bf16": True,
        "": False,
    }.items():
        (tmp_path / "cpuinfo").write_text(lines)
        machine.multiplies_bfloat16_fast.cache_clear()
        assert machine.multiplies_bfloat16_fast(proc=tmp_path) is fast, lines
