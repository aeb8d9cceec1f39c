"""Exit codes and lines of the commands."""

# ruff: noqa: T201
# what is printed is the product

FAILED, CONFIGURATION = 70, 78


class Refused(Exception):  # noqa: N818  no error of ours
    """The command cannot do what was asked; the message has the reason."""


def say(what: str, became: str) -> None:
    """Print one line."""
    print(f"{what:<46} {became}", flush=True)
