"""How much memory there is to take, as files of the kernel's tell it."""

from __future__ import annotations

from pathlib import Path

from tensorkeep.io.available import available_bytes

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


def test_without_a_group_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert available_bytes(**kernel(tmp_path, "0::/\n", {})) == 2 * MIB


def test_a_group_above_limits_it_and_its_page_cache_counts_as_free(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "1000000\n",
        "a/memory.current": "900000\n",
        "a/memory.stat": "anon 5\ninactive_file 50000\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "800000\n",
    }
    assert available_bytes(**kernel(tmp_path, "0::/a/b\n", files)) == 150_000


def test_a_group_of_version_1(tmp_path: Path) -> None:
    files = {"memory/x/memory.limit_in_bytes": "5000\n", "memory/x/memory.usage_in_bytes": "4000\n"}
    cgroup = "5:cpu:/x\n4:hugetlb,memory:/x\n"
    assert available_bytes(**kernel(tmp_path, cgroup, files)) == 1000


def test_a_group_whose_folder_is_mounted_as_the_root(tmp_path: Path) -> None:
    files = {"memory.max": "7000\n", "memory.current": "8000\n"}
    assert available_bytes(**kernel(tmp_path, "0::/not/visible/here\n", files)) == 0


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
