"""
GPUs under Prefect, to read first and to copy: one flow, one task a GPU, in each a process that sees this GPU alone.

Try `python examples/prefect_flow.py`: 40 units on two CPU workers. A unit is a file that is whole or absent, so a retry
or the next run computes only what is missing. One run at a time in a folder. Why: docs/gpus_under_prefect.md.
"""

import json
import os
import sys
import threading
from pathlib import Path
from subprocess import PIPE, Popen


def work(folder: str, units: list[int]) -> None:
    """Compute, in the process of one GPU, which never imports Prefect."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()  # ends with the flow, if killed
    for result in [path for unit in units if not (path := Path(folder, f"{unit}.txt")).exists()]:
        with result.with_suffix(".tmp").open("wb", buffering=0) as file:
            file.write(f"{sum(range(10**7 + int(result.stem)))}\n".encode())  # your model; `cuda:0` is the only device
            os.fsync(file)  # the content is on the disk before the file has its name
        Path(file.name).replace(result)


if __name__ == "__main__" and sys.argv[1:] == ["work"]:
    sys.exit(work(*json.loads(sys.stdin.readline())))
from prefect import flow, task
from prefect.futures import wait


@task(task_run_name="on {gpu}", retries=2, retry_delay_seconds=1, persist_result=False)  # files say what is done
def on_one_gpu(gpu: str, folder: str, units: list[int], stop: threading.Event) -> None:
    command = [sys.executable, __file__, "work"]  # multiprocessing would import the flow's `__main__` in the child
    with Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, stdin=PIPE, text=True) as child:
        print(json.dumps([folder, units]), file=child.stdin, flush=True)
        while child.poll() is None and not stop.wait(0.2):
            pass
        child.kill()  # does nothing after its end; half a unit has no name
    if child.returncode and not stop.is_set():  # of a run that stops, nothing is tried again
        raise RuntimeError(f"the process on {gpu} ended with {child.returncode}")


@flow
def on_gpus(folder: str = "units", units: int = 40, gpus: tuple[str, ...] = ("cpu", "cpu")) -> None:
    """Compute all units; *gpus* are numbers or UUIDs, and any other word hides every GPU."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    futures = [on_one_gpu.submit(gpu, folder, [*range(n, units, len(gpus))], stop) for n, gpu in enumerate(gpus)]
    try:
        while wait(futures, timeout=5).not_done:  # short waits: a suspension or a lost lease lands in between
            pass
    finally:
        stop.set()  # cancelled, suspended, Ctrl-C: no process is left
    if missing := [unit for unit in range(units) if not Path(folder, f"{unit}.txt").exists()]:  # not what tasks say
        raise RuntimeError(f"{len(missing)} of {units} units are missing: run again to compute them")


if __name__ == "__main__":
    on_gpus()
