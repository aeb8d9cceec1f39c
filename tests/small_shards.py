"""
The real command line, with shards of fifty rows: ``python -m tests.small_shards embed ...``.

Only the driver cuts them.
"""

import virnucpro.cli
from virnucpro.store.results import hdf5


def main() -> None:
    hdf5.SHARD_ROWS = 50
    virnucpro.cli.main()


if __name__ == "__main__":
    main()
