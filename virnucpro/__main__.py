"""``python -m virnucpro`` is the command line."""

from virnucpro.cli import main

main()
