"""Free memory, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from datastates._base.free_memory import host_memory

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a machine with 100 MiB of available memory, without control groups."""
    write(tmp_path / "proc/meminfo", "MemTotal:  999999 kB\nMemAvailable:  102400 kB\nHugePages_Total:  0\n")
    write(tmp_path / "proc/self/cgroup", "")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def limit_2(group: Path, limit: int | str, used: int, cached: int = 0) -> None:
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon 1\nshmem 7\ninactive_file {cached}\nactive_file 0\n")


def limit_1(group: Path, limit: int, used: int, cached: int = 0) -> None:
    write(group / "memory.limit_in_bytes", f"{limit}\n")
    write(group / "memory.usage_in_bytes", f"{used}\n")
    write(group / "memory.stat", f"inactive_file 0\ntotal_inactive_file 0\ntotal_active_file {cached}\n")


def test_this_machine() -> None:
    assert 0 < host_memory() < psutil.virtual_memory().total


def test_without_control_groups(root: Path) -> None:
    assert host_memory(root) == 100 * MIB


def test_a_control_group_limits_it(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/job\n")
    group = root / "sys/fs/cgroup/job"
    limit_2(group, 50 * MIB, 10 * MIB)
    assert host_memory(root) == 40 * MIB
    limit_2(group, 50 * MIB, 60 * MIB)
    assert host_memory(root) == 0
    limit_2(group, "max", 10 * MIB)
    assert host_memory(root) == 100 * MIB
    limit_2(group, 500 * MIB, 10 * MIB)
    assert host_memory(root) == 100 * MIB


def test_the_groups_around_a_group_limit_it_too(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pod/container\n")
    limit_2(root / "sys/fs/cgroup/pod/container", 90 * MIB, 0)
    limit_2(root / "sys/fs/cgroup/pod", 80 * MIB, 60 * MIB)
    limit_2(root / "sys/fs/cgroup", "max", 60 * MIB)
    limit_2(root / "sys/fs/cgroup/other", 1 * MIB, 0)
    assert host_memory(root) == 20 * MIB


def test_the_page_cache_of_a_group_is_free(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    limit_2(root / "sys/fs/cgroup", 50 * MIB, 45 * MIB, cached=30 * MIB)
    assert host_memory(root) == 35 * MIB


def test_control_groups_of_version_1(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory,hugetlb:/job/step\n0::/\n")
    limit_1(root / "sys/fs/cgroup/memory/job/step", 2**63 - 4096, 30 * MIB)
    limit_1(root / "sys/fs/cgroup/memory/job", 60 * MIB, 30 * MIB, cached=10 * MIB)
    assert host_memory(root) == 40 * MIB


def test_a_container_shows_its_own_group_at_the_top(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/docker/1234\n")
    limit_1(root / "sys/fs/cgroup/memory", 60 * MIB, 30 * MIB)
    assert host_memory(root) == 30 * MIB


def test_swap_counts_on_demand_as_far_as_the_group_may_use_it(root: Path) -> None:
    write(root / "proc/meminfo", "MemAvailable:  102400 kB\nSwapFree:  20480 kB\n")
    assert (host_memory(root), host_memory(root, swap=True)) == (100 * MIB, 120 * MIB)
    write(root / "proc/self/cgroup", "0::/job\n")
    group = root / "sys/fs/cgroup/job"
    limit_2(group, 50 * MIB, 10 * MIB)
    write(group / "memory.swap.current", "0\n")
    write(group / "memory.swap.max", "max\n")
    assert (host_memory(root), host_memory(root, swap=True)) == (40 * MIB, 60 * MIB)
    write(group / "memory.swap.max", f"{5 * MIB}\n")
    assert host_memory(root, swap=True) == 45 * MIB
