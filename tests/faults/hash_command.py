"""
The real command line, with the hash model in place of weights: ``python -m tests.faults.hash_command CONTROL ...``.

Only where the model comes from is exchanged; everything else, the workers' processes included, is the program.
"""

import sys

import virnucpro.cli
from tests import fakes


def main() -> None:
    control = sys.argv.pop(1)
    virnucpro.cli.configure_model = lambda *_, **__: fakes.hash_config(
        weights_path=control, loader="tests.fakes:load_faulty_model"
    )
    virnucpro.cli.main()


if __name__ == "__main__":
    main()
