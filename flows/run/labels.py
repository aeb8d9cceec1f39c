"""What a flow run is, for its metrics and its log lines: ids and names that lead back to Prefect's page."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from flows.run.api import client_that_asks_once
from virnucpro.telemetry.labels import LABEL_VARIABLES


@contextmanager
def labelled_run() -> Iterator[None]:
    """Set the labels of this flow run for the processes and metrics of the block."""
    before = {variable: os.environ.get(variable) for variable in LABEL_VARIABLES.values()}
    os.environ.update({LABEL_VARIABLES[label]: value for label, value in _labels().items()})
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def _labels() -> dict[str, str]:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return {"flow_run": "", "deployment": ""}
    run, flow = context.flow_run, context.flow
    deployment = ""
    if run.deployment_id is not None and flow is not None:
        try:
            with client_that_asks_once() as client:
                deployment = f"{flow.name}/{client.read_deployment(run.deployment_id).name}"
        except Exception as error:  # noqa: BLE001  the run is worth more than its label
            get_run_logger().warning("metrics and logs do not name the deployment: %s", error or repr(error))
    return {"flow_run": str(run.id), "deployment": deployment}
