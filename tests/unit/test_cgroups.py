"""Limits of control groups, on trees as systems and containers have them: v1, v2, both, with and without namespaces."""

from pathlib import Path

import pytest

from trireme.machine.cgroups import GroupLimits, below, read_limits, usable_cores
from trireme.machine.device import read_device
from trireme.sizes import GIB, MIB

V2_MOUNT = "35 25 0:30 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "{id} 25 0:{id} {top} /sys/fs/cgroup/{name} rw,nosuid - cgroup cgroup rw,{name}"
NO_LIMIT = "9223372036854771712\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(root: Path, group: str, top: str, groups: dict[str, dict[str, str]]) -> GroupLimits:
    """Limits where only v2 is mounted; `groups` are files by directory below the mount."""
    files = {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNT.format(top=top) + "\n"}
    inside = {f"sys/fs/cgroup/{at}/{name}": text for at, found in groups.items() for name, text in found.items()}
    return read_limits(tree(root, files | inside))


def holding(used: int, *, cached: tuple[int, int] = (0, 0), **limits: int) -> dict[str, str]:
    """A v2 group's memory files, in MiB."""
    stat = f"anon 7\nfile {sum(cached) * MIB}\ninactive_file {cached[0] * MIB}\nactive_file {cached[1] * MIB}\n"
    shown = {f"memory.{name}": f"{size * MIB}\n" for name, size in limits.items()}
    return {"memory.current": f"{used * MIB}\n", "memory.stat": stat, "memory.max": "max\n"} | shown


def test_v2_our_own_group_counts(tmp_path: Path) -> None:
    found = v2(tmp_path, "/system.slice/t.service", "/", {"system.slice/t.service": holding(100, max=1000)})
    assert found == GroupLimits(1000 * MIB, 900 * MIB, None)


def test_v2_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    """The lowest limit and the lowest room may be in different groups: a parent is filled by our siblings too."""
    groups = {"pod": holding(1700, max=2000), "pod/box": holding(100, max=1000), "pod/box/in": holding(100)}
    assert v2(tmp_path, "/pod/box/in", "/", groups) == GroupLimits(1000 * MIB, 300 * MIB, None)


def test_v2_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    assert v2(tmp_path, "/a", "/", {"a": holding(100, high=600, max=1000)}) == GroupLimits(600 * MIB, 500 * MIB, None)


def test_v2_file_pages_that_can_be_dropped_are_room(tmp_path: Path) -> None:
    assert v2(tmp_path, "/a", "/", {"a": holding(900, cached=(200, 300), max=1000)}).memory_free == 600 * MIB


def test_v2_a_group_beyond_its_high_has_no_room(tmp_path: Path) -> None:
    assert v2(tmp_path, "/a", "/", {"a": holding(900, high=600)}) == GroupLimits(600 * MIB, 0, None)


@pytest.mark.parametrize(
    ("group", "top"),
    [("/", "/"), ("/docker/4f", "/docker/4f"), ("/../../4f", "/../../4f")],
    ids=["namespaced", "bound", "namespaced, from outside"],
)
def test_v2_of_a_container_is_at_the_mount(tmp_path: Path, group: str, top: str) -> None:
    own = holding(100, max=1000) | {"cpu.max": "300000 100000\n"}
    assert v2(tmp_path, group, top, {"": own}) == GroupLimits(1000 * MIB, 900 * MIB, 3.0)


def test_v2_a_mount_from_outside_our_namespace(tmp_path: Path) -> None:
    """`/` is our own group, which the mount has two levels down under names that nobody tells; ours is the one with our pid."""
    tree(tmp_path, {"proc/self/stat": "42 (python) R 1\n"})
    groups = {
        "": holding(5, max=9000),
        "pod/other": holding(5, max=10) | {"cgroup.procs": "41\n"},
        "pod/ours": holding(5, max=300) | {"cgroup.procs": "7\n42\n"},
    }
    assert v2(tmp_path, "/", "/../..", groups) == GroupLimits(300 * MIB, 295 * MIB, None)


def test_v2_a_process_that_was_moved_out_of_its_namespace(tmp_path: Path) -> None:
    """Nothing says where it is now: what the mount shows at its top is all there is."""
    found = v2(tmp_path, "/../elsewhere", "/", {"": holding(100, max=1000), "elsewhere": holding(1, max=2)})
    assert found == GroupLimits(1000 * MIB, 900 * MIB, None)


def test_v2_a_group_that_the_mount_does_not_have(tmp_path: Path) -> None:
    assert v2(tmp_path, "/a/gone", "/", {"a": holding(100, max=1000)}).memory == 1000 * MIB


def test_v2_the_least_quota_of_all_groups_counts(tmp_path: Path) -> None:
    groups = {
        "a": {"cpu.max": "150000 100000\n"},
        "a/b": {"cpu.max": "max 100000\n"},
        "a/b/c": {"cpu.max": "8000 1000"},
    }
    assert v2(tmp_path, "/a/b/c", "/", groups).cpus == 1.5


def test_no_limits_and_no_files(tmp_path: Path) -> None:
    assert v2(tmp_path, "/a", "/", {"a": holding(100)}) == GroupLimits(None, None, None)
    assert read_limits(tmp_path / "nothing") == GroupLimits(None, None, None)


def v1(root: Path, groups: dict[str, str], files: dict[str, str], tops: dict[str, str] | None = None) -> GroupLimits:
    """Limits where v1 is mounted, one hierarchy for each controller."""
    lines = [f"{i}:{name}:{path}" for i, (name, path) in enumerate(groups.items(), 2)]
    mounts = [V1_MOUNT.format(id=40 + i, name=name, top=(tops or {}).get(name, "/")) for i, name in enumerate(groups)]
    proc = {"proc/self/cgroup": "\n".join(lines) + "\n", "proc/self/mountinfo": "\n".join(mounts) + "\n"}
    return read_limits(tree(root, proc | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}))


def test_v1_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    cached = f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {30 * MIB}\n"
    files = {
        "memory/a/memory.limit_in_bytes": f"{800 * MIB}\n",
        "memory/a/memory.usage_in_bytes": f"{500 * MIB}\n",
        "memory/a/memory.stat": cached,
        "memory/a/b/memory.limit_in_bytes": NO_LIMIT,
        "memory/a/b/memory.usage_in_bytes": "5\n",
        "cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
    }
    assert v1(tmp_path, {"memory": "/a/b", "cpu,cpuacct": "/a/b"}, files) == GroupLimits(800 * MIB, 350 * MIB, 2.5)


def test_v1_of_a_container_is_at_the_mount_and_knows_the_groups_above(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": NO_LIMIT,
        "memory/memory.usage_in_bytes": f"{100 * MIB}\n",
        "memory/memory.stat": f"hierarchical_memory_limit {700 * MIB}\nhierarchical_memsw_limit 9223372036854771712\n",
    }
    found = v1(tmp_path, {"memory": "/docker/4f"}, files, {"memory": "/docker/4f"})
    assert found == GroupLimits(700 * MIB, 600 * MIB, None)


def test_both_versions_at_once(tmp_path: Path) -> None:
    """systemd's hybrid: memory is in v1, v2 is mounted beside it and has what its own controllers say."""
    files = {
        "proc/self/cgroup": "4:memory:/box\n1:name=systemd:/x\n0::/unit\n",
        "proc/self/mountinfo": "\n".join(
            [
                "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755",
                V1_MOUNT.format(id=35, name="memory", top="/"),
                "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
            ]
        ),
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{500 * MIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{200 * MIB}\n",
        "sys/fs/cgroup/unified/unit/cpu.max": "400000 100000\n",
    }
    assert read_limits(tree(tmp_path, files)) == GroupLimits(500 * MIB, 300 * MIB, 4.0)


def test_a_mount_at_an_unusual_place(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": "35 25 0:30 / /run/c\\040g rw - cgroup2 cgroup2 rw\n",
        "run/c g/a/memory.max": f"{GIB}\n",
        "run/c g/a/memory.current": "0\n",
    }
    assert read_limits(tree(tmp_path, files)).memory == GIB


@pytest.mark.parametrize(
    ("group", "top", "names"),
    [
        ("/a/b", "/", ["a", "b"]),
        ("/a/b", "/a", ["b"]),
        ("/../x/y", "/../x", ["y"]),
        ("/ab", "/a", None),
        ("/../x", "/", None),
        ("/", "/..", None),
    ],
)
def test_where_a_group_is_below_a_mount(group: str, top: str, names: list[str] | None) -> None:
    assert below(group, top) == names


def test_cores_under_a_quota() -> None:
    assert [usable_cores(8, GroupLimits(cpus=cpus)) for cpus in (None, 0.2, 1.9, 4.0, 64.0)] == [8, 1, 1, 4, 8]


def test_the_facts_of_a_device_are_those_of_its_group(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n"}
    own = holding(256, high=1024) | {"cpu.max": "100000 100000\n"}
    v2(tree(tmp_path, files), "/a/b", "/", {"a": own, "a/b": holding(1)})
    facts = read_device(tmp_path)
    assert (facts.cores, facts.memory_total, facts.memory_free) == (1, GIB, 768 * MIB)
