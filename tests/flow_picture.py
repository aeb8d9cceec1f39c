"""Write docs/images/flow.png: the graph of a run of embed in Prefect's UI, a worker of which was killed."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prefect.client.schemas.sorting import FlowRunSort

from tests.chromium import Browser
from tests.conftest import REPOSITORY
from tests.debian_programs import program
from tests.prefect_service import PrefectService

PICTURE = REPOSITORY / "docs" / "images" / "flow.png"
DRAWN_S = 12.0
"""Seconds in which the page has drawn the graph."""
CLIP = {"x": 258, "y": 8, "width": 1142, "height": 492, "scale": 1}


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        (folder / "home").mkdir()
        service = PrefectService(folder, "127.0.0.1", port, {})
        service.password = None  # or the page asks for it
        del service.environ["PREFECT_API_AUTH_STRING"]
        with service.server:
            service.serve()
            killed = {"VIRNUCPRO_FAILPOINT": f"gpu_worker_1/file.open:3:kill:{folder / 'killed'}"}
            fasta = REPOSITORY / "examples" / "proteins.fasta"
            command = [
                sys.executable,
                "-m",
                "virnucpro",
                "embed",
                fasta,
                "-o",
                "embeddings",
                "--workers",
                "2",
                "--flow",
            ]
            subprocess.run(command, cwd=folder, env=service.environ | killed, check=True)
            with service.client() as client:
                (run,) = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
            browser = Browser(program("chromium"), program("chromedriver"), folder / "profile")
            size = {"width": 1400, "height": 760, "deviceScaleFactor": 1, "mobile": False}
            browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.driver.get(f"{service.url}/runs/flow-run/{run.id}")
            time.sleep(DRAWN_S)
            shot = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": CLIP})
            browser.driver.quit()
    PICTURE.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
