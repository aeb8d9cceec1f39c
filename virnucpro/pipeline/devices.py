"""
The devices of a run, without importing the framework.

A worker sees one device: its ``CUDA_VISIBLE_DEVICES`` is a token of the parent's visible list, or empty for the CPU.
Inside a worker the GPU is always ``cuda:0``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
CPU_TOKEN = ""
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Device:
    token: str
    """CUDA_VISIBLE_DEVICES of the worker; empty for the CPU."""

    @property
    def type(self) -> str:
        """``cpu`` or ``cuda``: the framework's name inside the worker."""
        return "cuda" if self.token else "cpu"

    @property
    def label(self) -> str:
        """Name in logs and reports."""
        return f"cuda:{self.token}" if self.token else "cpu"


CPU = Device(CPU_TOKEN)


def processor_of(device_type: str) -> str:
    """Return the processor that decides the last bits of this process's rows; imports the framework."""
    import torch  # noqa: PLC0415

    if device_type == "cpu":
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} with compute capability {major}.{minor}"


def visible_tokens(environ: Mapping[str, str], *, present: Sequence[str]) -> list[str]:
    """
    Return the tokens of the visible GPUs, in order.

    Args:
        environ: Has ``CUDA_VISIBLE_DEVICES``: numbers, or UUIDs of GPUs or MIG instances. Unset means all, empty none,
            and a negative number ends the list, as in CUDA.
        present: Tokens of the host's GPUs (``host_tokens``).
    """
    value = environ.get(VISIBLE_VARIABLE)
    if value is None:
        return list(present)
    tokens = []
    for token in (item.strip() for item in value.split(",")) if value.strip() else ():
        if re.fullmatch(r"-\d+", token):
            break
        tokens.append(token)
    return check_tokens(tokens, source=VISIBLE_VARIABLE)


def check_tokens(tokens: Sequence[str], *, source: str) -> list[str]:
    """Return *tokens* in canonical form."""
    numbers = [token for token in tokens if re.fullmatch(r"\d+", token)]
    uuids = [token for token in tokens if _UUID.fullmatch(token)]
    for token in tokens:
        if token not in numbers and token not in uuids:
            problem = f"{token!r} is neither a device number nor a GPU- or MIG- UUID"
            choices = ": choose auto, auto:N, cpu, or a list such as 0,1" if source == "--devices" else ""
            raise DeviceError(f"{source}: {problem}{choices}")
    if numbers and uuids:
        raise DeviceError(f"{source}: numbers and UUIDs are mixed ({', '.join(tokens)}): use one form")
    canonical = [str(int(token)) if token in numbers else token for token in tokens]
    if len(set(canonical)) < len(canonical):
        raise DeviceError(f"{source}: a device is named twice ({', '.join(tokens)})")
    return canonical


def devices_for_ranks(
    world_size: int, environ: Mapping[str, str] | None = None, *, workers_per_device: int = 1
) -> list[Device]:
    """Map ranks to the parent's visible list; when that is empty, every rank is a CPU worker."""
    tokens = visible_tokens(os.environ if environ is None else environ, present=_on_host())
    if not tokens:
        return [CPU] * world_size
    if world_size > len(tokens) * workers_per_device:
        raise DeviceError(
            f"{world_size} workers requested, but only {len(tokens)} GPUs are visible ({', '.join(tokens)})"
        )
    return [Device(token) for token in tokens * workers_per_device][:world_size]


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """The devices that a run may take, and how many."""

    candidates: tuple[Device, ...]
    """Each once, in order of preference."""
    least: int
    """Devices needed to begin."""
    most: int
    """Devices taken when free."""
    workers_each: int = 1
    most_workers: int | None = None
    """Most workers in all; None sets no limit."""

    @property
    def type(self) -> str:
        return self.candidates[0].type

    def ranks(self, taken: Sequence[Device]) -> list[Device]:
        return (list(taken) * self.workers_each)[: self.most_workers]


def choose_devices(
    choice: str,
    *,
    workers: int | None = None,
    workers_per_device: int = 1,
    environ: Mapping[str, str] | None = None,
    present: Sequence[str] | None = None,
) -> DeviceChoice:
    """
    Return the devices that a run may take.

    Args:
        choice: ``auto`` (free visible GPUs, else the CPU), ``auto:N`` (N of them), ``cpu``, or a list: numbers count
            within the visible list, UUIDs must be in it.
        present: Tokens of the host's GPUs; None asks the driver.
    """
    present = _on_host() if present is None else present
    wanted = choice.strip()
    if workers_per_device < 1:
        raise DeviceError(f"--workers-per-device is {workers_per_device}: it must be at least 1")
    visible: list[str] = []
    if present and wanted != "cpu":
        visible = visible_tokens(os.environ if environ is None else environ, present=present)
    if wanted == "cpu" or (wanted == "auto" and not visible):
        return _on_cpu(_cpu_workers(workers, workers_per_device))
    if wanted == "auto":
        tokens, least = visible, 1
    elif wanted.startswith("auto:"):
        tokens, least = visible, _number_of_gpus(wanted, visible)
    else:
        tokens = [_pick(token, visible) for token in _listed(wanted)]
        least = len(tokens)
    check_tokens(tokens, source="--devices")
    most = len(tokens) if wanted == "auto" else least
    if workers is not None and workers != most * workers_per_device:
        raise DeviceError(
            f"--workers is the number of CPU workers: with GPUs it follows from --workers-per-device "
            f"({most * workers_per_device} here)"
        )
    return DeviceChoice(candidates=tuple(map(Device, tokens)), least=least, most=most, workers_each=workers_per_device)


def first_devices(world_size: int, *, workers_per_device: int = 1) -> DeviceChoice:
    """Return exactly the devices of ``devices_for_ranks``."""
    ranks = devices_for_ranks(world_size, workers_per_device=workers_per_device)
    if ranks[0] == CPU:
        return _on_cpu(world_size)
    candidates = tuple(dict.fromkeys(ranks))
    return DeviceChoice(
        candidates=candidates,
        least=len(candidates),
        most=len(candidates),
        workers_each=workers_per_device,
        most_workers=world_size,
    )


def _on_host() -> list[str]:
    from virnucpro.host_gpus import host_tokens  # noqa: PLC0415  a worker, whose device is given, starts sooner

    return host_tokens()


def _on_cpu(workers: int) -> DeviceChoice:
    return DeviceChoice(candidates=(CPU,), least=1, most=1, workers_each=workers)


def _number_of_gpus(choice: str, visible: Sequence[str]) -> int:
    number = choice.removeprefix("auto:").strip()
    if not (number.isdecimal() and number.isascii() and int(number)):
        raise DeviceError(f"--devices is {choice!r}: after auto: comes the number of GPUs, 1 or more")
    if int(number) > len(visible):
        raise DeviceError(f"--devices is {choice!r}, but only {len(visible)} GPUs are visible ({_shown(visible)})")
    return int(number)


def _cpu_workers(workers: int | None, workers_per_device: int) -> int:
    if workers_per_device > 1:
        raise DeviceError("--workers-per-device is for GPUs: with the CPU give the number of workers as --workers")
    if workers is not None and workers < 1:
        raise DeviceError(f"--workers is {workers}: it must be at least 1")
    return 1 if workers is None else workers


def _listed(choice: str) -> list[str]:
    tokens = [token.strip() for token in choice.split(",") if token.strip()]
    if not tokens:
        raise DeviceError("--devices is empty: give auto, cpu, or a list such as 0,1")
    return check_tokens(tokens, source="--devices")


def _pick(token: str, visible: Sequence[str]) -> str:
    shown = _shown(visible)
    if token.isdigit():
        if int(token) >= len(visible):
            raise DeviceError(f"--devices: there is no GPU {token} (visible: {shown})")
        return visible[int(token)]
    if not visible:
        raise DeviceError(f"--devices: there is no GPU {token} (visible: {shown})")
    if all(item.isdigit() for item in visible) or token in visible:
        return token
    raise DeviceError(f"--devices: {token} is not in the visible list ({shown})")


def _shown(tokens: Sequence[str]) -> str:
    return ", ".join(tokens) or "none"
