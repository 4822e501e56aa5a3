"""What is read of processes, and how their growth is told."""

import os

from experiments.endurance.footprint import Footprint, ProcessSize, growth, read_footprint


def test_the_footprint_of_this_process_is_what_the_kernel_says() -> None:
    before = read_footprint(os.getpid())
    (size,) = (size for (pid, _), size in before.sizes.items() if pid == os.getpid())
    pipe = os.pipe()
    block = bytearray(b"x" * 64 * 2**20)
    after = read_footprint(os.getpid())
    (grown,) = (size for (pid, _), size in after.sizes.items() if pid == os.getpid())
    assert grown.descriptors == size.descriptors + 2
    assert grown.rss_mib - size.rss_mib > 32, len(block)
    for end in pipe:
        os.close(end)


def test_growth_compares_processes_that_lived_all_the_time() -> None:
    def at(at_s: float, **rss_mib: float) -> Footprint:
        sizes = {
            (number, 0): ProcessSize("gateway", rss_mib[name], 10 + round(at_s / 100))
            for number, name in enumerate(("a", "b", "c"))
            if name in rss_mib
        }
        return Footprint(at_s, sizes)

    found = growth(
        [at(0, a=100, b=100), at(290, a=110, b=120), at(300, a=110, b=130, c=9), at(900, a=115, b=131, c=90)]
    )
    assert found == {
        "gateway": {
            "processes": 2,
            "rss_mib": [200, 240, 246],
            "descriptors": [20, 26, 38],
            "worst_mib": 5,
            "by_minute_mib": [200, 230, 240, 246],
        }
    }
