"""
Backup, restore and upgrade of a Prefect server's database: SQLite here, PostgreSQL by pg_dump and pg_restore.

The database is the one of this process's Prefect settings, so the environment must be the server's. A backup is one
file, readable only by its owner: it holds parameters of runs, and the blocks with their key.
"""

import os
import sqlite3
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from commands.terminal import Refused, say

BUSY_S = 60.0
"""Seconds to wait for a database in which another process writes."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def backup(file: Path) -> None:
    """
    Write the whole database, as of one moment, to a new file; the server may run.

    Raises:
        Refused: The file exists, or the database cannot be read.
    """
    if file.exists():
        raise Refused(f"{file} exists: give the name of a new file")
    url = _url()
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".backup.") as folder:  # of mode 0700
            new = Path(folder) / "new"
            if url.startswith("sqlite"):
                _copy(_sqlite_file(url), new)
            else:
                _postgresql(url, "pg_dump", "--format", "custom", "--file", str(new))
            _replace(new, file)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from error
    say(f"backup {file}", f"{file.stat().st_size / 1e6:,.1f} MB")


def restore(file: Path) -> None:
    """
    Put a backup in place of the database of a stopped server; an SQLite database that was there is kept beside it.

    Raises:
        Refused: The server is running, or the file is no backup of a Prefect server.
    """
    url = _url()
    _refuse_if_running()
    if not url.startswith("sqlite"):
        _postgresql(url, "pg_restore", "--clean", "--if-exists", "--single-transaction", "--no-owner", str(file))
        say(f"restored {file}", "start the server: it upgrades an older database by itself")
        return
    _check(file)
    database = _sqlite_file(url, must_exist=False)
    kept = None
    with tempfile.TemporaryDirectory(dir=database.parent, prefix=".restore.") as folder:
        new = Path(folder) / "new"
        _copy(file, new)
        if database.exists():
            _refuse_if_open(database)
            kept = database.with_name(f"{database.name}.before-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
            for suffix in ("", "-wal", "-shm"):  # the last two only of a damaged one
                if (part := database.with_name(database.name + suffix)).exists():
                    part.replace(kept.with_name(kept.name + suffix))
        _replace(new, database)
    say(f"restored {file}", "start the server: it upgrades an older database by itself")
    if kept is not None:
        say("the database that was there", str(kept))


def upgrade(file: Path) -> None:
    """
    Back the database of a stopped server up, and bring it to the schema of the installed Prefect.

    Raises:
        Refused: The server is running, or a step failed; the message names the backup.
    """
    _refuse_if_running()
    backup(file)
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"],
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Refused(f"{done.stdout}\nthe upgrade failed; the database as it was: deployments/server restore {file}")
    say("database", "upgraded: start the server")


def _url() -> str:
    from prefect.settings import get_current_settings  # noqa: PLC0415  takes seconds

    url = get_current_settings().server.database.connection_url
    if url is None:
        raise Refused("Prefect's settings name no database")
    return str(url.get_secret_value())


def _sqlite_file(url: str, *, must_exist: bool = True) -> Path:
    """Return the database's file; another user's is refused, because the server could not write what we leave."""
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    found = Path(make_url(url).database or "")
    if must_exist and not found.is_file():
        raise Refused(f"there is no database {found}: set PREFECT_HOME as the server has it")
    if not found.parent.is_dir():
        raise Refused(f"there is no folder {found.parent}: set PREFECT_HOME as the server has it")
    owner = (found if found.exists() else found.parent).stat().st_uid
    if owner != os.geteuid():
        raise Refused(f"{found} belongs to user {owner}: run this as that user, the server's")
    return found


def _refuse_if_running() -> None:
    """Refuse while a server answers where this environment's server listens."""
    from prefect.settings import get_current_settings  # noqa: PLC0415

    settings = get_current_settings()
    url = f"http://{settings.server.api.host}:{settings.server.api.port}/api"
    for address in {url, str(settings.api.url or url)}:
        try:
            with _DIRECT.open(f"{address.rstrip('/')}/health", timeout=5):
                raise Refused(f"a server answers at {address}: stop it first")
        except OSError:
            continue


def _refuse_if_open(database: Path) -> None:
    """Refuse a database that another process has open; take in what its log holds."""
    try:
        with closing(sqlite3.connect(database, timeout=5)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")  # needs the database for itself
    except sqlite3.OperationalError as error:
        raise Refused(f"{database} is in use ({error}): stop the server first") from error
    except sqlite3.DatabaseError:  # damaged: the reason to restore
        return


def _check(file: Path) -> None:
    """Refuse what is no whole database of a Prefect server."""
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            connection.execute("SELECT version_num FROM alembic_version").fetchone()
            connection.execute("SELECT count(*) FROM flow_run").fetchone()
    except sqlite3.DatabaseError as error:
        raise Refused(f"{file} is no backup of a Prefect server's SQLite database: {error}") from error
    if found != "ok":
        raise Refused(f"{file} is damaged: {found}")


def _copy(database: Path, new: Path) -> None:
    """Copy a database that may be in use."""
    try:
        with closing(sqlite3.connect(database, timeout=BUSY_S)) as connection:
            connection.execute("VACUUM INTO ?", (str(new),))
    except sqlite3.DatabaseError as error:
        raise Refused(f"{database}: {error}") from error
    _check(new)


def _replace(new: Path, file: Path) -> None:
    """Give a new file its name, durably."""
    new.chmod(0o600)
    with new.open("rb") as written:
        os.fsync(written.fileno())
    new.replace(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _postgresql(url: str, program: str, *arguments: str) -> None:
    """Run one of PostgreSQL's programs; the password goes through its environment, which other users cannot read."""
    from sqlalchemy.engine import make_url  # noqa: PLC0415

    parsed = make_url(url).set(drivername="postgresql")
    environ = os.environ | ({} if parsed.password is None else {"PGPASSWORD": str(parsed.password)})
    address = parsed._replace(password=None).render_as_string(hide_password=False)
    command = [program, *arguments, "--dbname", address]
    try:
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise Refused(f"{program} is not installed: apt-get install postgresql-client") from error
    if done.returncode != 0:
        raise Refused(f"{program}: {done.stderr.strip()}")
