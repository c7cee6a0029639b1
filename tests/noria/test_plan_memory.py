"""What is free is the least of the computer's memory and every control group's."""

import pytest

from noria.plan.memory import host_memory
from noria.plan.units import both_units, exact_bytes, parse_bytes

MIB = 2**20


@pytest.fixture
def computer(tmp_path):
    """Writes files of an invented computer of 1,000 MiB, 800 of them available."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", f"MemTotal: {1000 * 1024} kB\nMemAvailable:  {800 * 1024} kB\n")
    return tmp_path, write


def test_without_a_limit_what_the_kernel_calls_available_is_free(computer):
    root, write = computer
    write("proc/self/cgroup", "0::/\n")
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/memory.current", "5\n")
    memory = host_memory(root)
    assert (memory.total, memory.available) == (1000 * MIB, 800 * MIB)


def test_a_group_above_this_process_limits_what_is_free(computer):
    root, write = computer
    write("proc/self/cgroup", "0::/pod/box\n")
    write("sys/fs/cgroup/pod/memory.max", f"{500 * MIB}\n")
    write("sys/fs/cgroup/pod/memory.current", f"{300 * MIB}\n")
    write("sys/fs/cgroup/pod/memory.stat", f"anon 7\ninactive_file {100 * MIB}\n")
    write("sys/fs/cgroup/pod/box/memory.max", "max\n")
    memory = host_memory(root)
    assert (memory.total, memory.available) == (500 * MIB, 300 * MIB)
    assert memory.limit == "control group /pod"


def test_a_limit_of_version_1_counts_too(computer):
    root, write = computer
    write("proc/self/cgroup", "4:memory:/box\n1:cpu:/box\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{400 * MIB}\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{150 * MIB}\n")
    write("sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {50 * MIB}\n")
    assert host_memory(root).available == 300 * MIB


def test_a_full_group_leaves_nothing_and_never_less(computer):
    root, write = computer
    write("proc/self/cgroup", "0::/\n")
    write("sys/fs/cgroup/memory.max", f"{10 * MIB}\n")
    write("sys/fs/cgroup/memory.current", f"{12 * MIB}\n")
    assert host_memory(root).available == 0


def test_where_there_is_no_proc_all_physical_memory_counts(tmp_path):
    memory = host_memory(tmp_path)
    assert memory.available == memory.total > 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("1000", 1000), ("1.5mib", 3 * 2**19)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 Gigs", "1e9", "9" * 400])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


def test_bytes_are_shown_in_both_units():
    assert both_units(52_428_800_000) == "52.4 GB = 48.8 GiB"
    assert exact_bytes(819_200) == "819,200 bytes = 819.2 kB = 800.0 KiB"
