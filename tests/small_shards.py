"""
The real command line, with shards of fifty rows: ``python -m tests.small_shards embed ...``.

Only the driver cuts them. On a cluster it lets a host begin with each pass over them, so that hosts have their share.
"""

import time

import virnucpro.cli
from virnucpro.pipeline.hosts import result_passes as passes
from virnucpro.store.results import hdf5

LONGEST_WAIT_S = 60.0


def main() -> None:
    hdf5.SHARD_ROWS = 50
    take_part = passes._take_part

    def after_a_host(run, layout, stop):
        end_s = time.monotonic() + LONGEST_WAIT_S
        while not any(layout.claims_dir.iterdir()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return take_part(run, layout, stop)

    passes._take_part = after_a_host
    virnucpro.cli.main()


if __name__ == "__main__":
    main()
