"""A new password for server, workers and users, in the files of the environment that hold it."""

import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from commands.terminal import Refused, say

_LINE = re.compile(
    r"""^((?:PREFECT|PREFECT_API|PREFECT_SERVER_API)_AUTH_STRING)=["']?([^:"'\n]+):.+$""",
    re.MULTILINE,
)
BYTES = 24


def rotate(files: Sequence[Path]) -> None:
    """
    Write one new password, of 24 random bytes, to all the files; names, owners and modes stay.

    Raises:
        Refused: A file cannot be read or has no password; then no file was changed.
    """
    texts = {}
    for file in files:
        try:
            texts[file] = file.read_text(encoding="utf-8")
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}") from error
        if not _LINE.search(texts[file]):
            raise Refused(
                f"{file} sets no PREFECT_SERVER_API_AUTH_STRING, PREFECT_API_AUTH_STRING or "
                "PREFECT_AUTH_STRING: nothing was changed"
            )
    found = {name for text in texts.values() for _, name in _LINE.findall(text)}
    if len(found) > 1:
        raise Refused(f"the files have several names ({', '.join(sorted(found))}): nothing was changed")
    password = f"{found.pop()}:{secrets.token_hex(BYTES)}"
    for file, text in texts.items():
        try:
            _write(file, _LINE.sub(lambda line: f"{line[1]}={password}", text))
        except OSError as error:
            raise Refused(f"{file}: {error.strerror}; run this again, so that all files have the same") from error
        say(str(file), "has the new password")


def _write(file: Path, text: str) -> None:
    """Replace a file, whole or not at all."""
    before = file.stat()
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            new.write(text)
            os.fchown(new.fileno(), before.st_uid, before.st_gid)
            os.fchmod(new.fileno(), before.st_mode & 0o7777)
            new.flush()
            os.fsync(new.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
