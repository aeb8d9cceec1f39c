"""
The real flow ``embed`` with the hash model in place of weights, for deployments: ``tests/hash_flows.py:embed``.

Only where the model comes from is exchanged. What the model does stands in the JSON file that the variable
``HASH_CONTROL`` of the flow's process names (see ``fakes.load_faulty_model``), which a test may rewrite between runs; a
deployment sets it among its job variables, ``PrefectService.deploy``'s *environ*. With ``FAKE_GPUS`` set as well the
flow's process sees that many GPUs, which are none (``tests.fake_gpus``).
"""

import json
import os
from pathlib import Path

import prefect
from prefect.concurrency import _leases

import flows.embed
from tests import fake_gpus, fakes
from virnucpro.pipeline.run.run_preparation import PreparedRun

VARIABLE = "HASH_CONTROL"
RENEW_LEASE_S = "RENEW_LEASE_S"
"""Variable of the flow's process: seconds until it renews the lease of a concurrency limit, instead of 225."""


def control_file(path: Path, **plan) -> Path:
    """Write what the model does: ``slow_s``, ``calls``, ``rank``, ``how``, ``times``, ``before_batch`` and so on."""
    path.write_text(json.dumps({"how": "none", "times": 0, "before_batch": -1, **plan}))
    return path


assert os.environ.get("TESTED_PREFECT", prefect.__version__) == prefect.__version__
if VARIABLE in os.environ:
    _config = fakes.hash_config(weights_path=os.environ[VARIABLE], loader="tests.fakes:load_faulty_model")
    flows.embed.configure_model = lambda *_, **__: _config
if RENEW_LEASE_S in os.environ:
    _leases._RENEWAL_FRACTION = float(os.environ[RENEW_LEASE_S]) / 300
if fake_gpus.VARIABLE in os.environ:
    fake_gpus.pretend(int(os.environ[fake_gpus.VARIABLE]))
    PreparedRun.worker_fn = fake_gpus.WORKER

embed = flows.embed.embed
