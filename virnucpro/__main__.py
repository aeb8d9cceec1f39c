"""
The command: ``virnucpro``, or ``python -m virnucpro``.

Ctrl-C while the program is still being loaded ends it as it does later on: without a traceback, with 130.
"""

import importlib
import os


def main() -> None:
    """Run the command line."""
    try:
        importlib.import_module("virnucpro.cli").main()
    except KeyboardInterrupt:
        os._exit(130)  # ExitCode.INTERRUPTED, which may not be there yet


if __name__ == "__main__":
    main()
