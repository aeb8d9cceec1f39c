"""
The automations of a server: those that every server has, and the examples that `bootstrap --with` installs.

An existing automation keeps whether it is enabled, and actions that an operator chose; the rest becomes as it is here.
"""

# ruff: noqa: PLC0415
# Prefect takes seconds to import, and --help need not wait for it

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from commands.terminal import Refused, say

SILENT_S = 900
"""Seconds without a heartbeat (prefect.yaml: every 30) after which a run's host counts as dead. It must outlast any
absence of the server, such as an upgrade: meanwhile no heartbeat arrives from runs that still compute."""
STARTS = 3
"""Most starts of a run that `resume-crashed` still resumes: the fourth is the last."""
WEBHOOK = "virnucpro"
"""Name of the Webhook block unless `--with webhook=BLOCK` gives another."""
SCAN = "predict-inbox/predict-nightly"
TAG = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.virnucpro"}
SILENT = f"no heartbeat for {SILENT_S // 60} minutes"
ENDS = ("virnucpro.run.completed", "virnucpro.run.partial", "virnucpro.run.failed")
EXAMPLES = {
    "next-sample": f"when a run ends, {SCAN} scans its folder, and new files start at once",
    "resume-crashed": f"a run whose host died is resumed by the next worker, unless it was started more than {STARTS} "
    "times",
    "webhook": f"a webhook is called when a run ends; webhook=BLOCK names a Webhook block (default: {WEBHOOK})",
}
"""Name for `--with` -> what it does."""
PAYLOAD = """{
  "event": {{ event.event | tojson }},
  "run": {{ event.resource.name | tojson }},
  "run_id": {{ event.resource.id | tojson }},
  "state": {{ flow_run.state.name | tojson }},
  "details": {{ event.payload | tojson }}
}"""


def on_event(*names: str, match: dict[str, Any] | None = None) -> Any:
    """Return the trigger of events of our deployments' runs; *match*: label of the run -> pattern or patterns."""
    from prefect.events import EventTrigger
    from prefect.events.schemas.automations import Posture

    return EventTrigger(
        expect=set(names),
        match={"prefect.resource.id": "prefect.flow-run.*", **(match or {})},
        match_related=TAG,
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def automations(client: Any, notify: str | None) -> list[Any]:
    """
    Return the automations that every server has.

    Args:
        client: Of the server.
        notify: TYPE/NAME of the notification block for failed and crashed runs.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events import AutomationCore, EventTrigger
    from prefect.events.actions import ChangeFlowRunState, DoNothing, SendNotification
    from prefect.events.schemas.automations import Posture

    actions: list[Any] = [DoNothing()]
    if notify is not None:
        kind, name = notify.split("/")
        block = read_block(client, kind, name, option=f"--notify {notify}")
        body = "{{ flow_run.name }}: {{ flow_run.state.name }}: {{ flow_run.state.message }}\n{{ flow_run|ui_url }}"
        actions = [SendNotification(block_document_id=block, subject="VirNucPro: {{ flow_run.name }}", body=body)]
    silent = EventTrigger(
        # Any event counts as a heartbeat, since a run may end in a state of any name: Completed, Partial, TimedOut.
        after={"prefect.flow-run.heartbeat"},
        expect={"prefect.flow-run.*"},
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related=TAG,
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=SILENT_S),
    )
    return [
        AutomationCore(
            name="virnucpro: a run failed",
            description="The run's message has the reason, its summary the results so far. A second run resumes it.",
            trigger=on_event("prefect.flow-run.Failed", "prefect.flow-run.TimedOut"),
            actions=actions,
        ),
        AutomationCore(
            name="virnucpro: a run crashed",
            description="Its process was killed, perhaps with its host. A second run resumes it.",
            trigger=on_event("prefect.flow-run.Crashed"),
            actions=actions,
        ),
        AutomationCore(
            name="virnucpro: a run sends no heartbeat",
            description="Its host is dead: nothing else would end the run, and it would hold its queue's limit.",
            trigger=silent,
            actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"{SILENT}: run it again, and it continues")],
        ),
    ]


def examples(client: Any, chosen: Sequence[str]) -> list[Any]:
    """
    Return the automations of the examples, each NAME or NAME=VALUE; the deployments must exist.

    Raises:
        Refused: The server lacks a block or a deployment.
    """
    from prefect.client.schemas.objects import StateType
    from prefect.events import AutomationCore
    from prefect.events.actions import CallWebhook, ChangeFlowRunState, RunDeployment
    from prefect.exceptions import ObjectNotFound

    found = []
    for one in chosen:
        name, _, value = one.partition("=")
        if name == "next-sample":
            try:
                scan = client.read_deployment_by_name(SCAN)
            except ObjectNotFound as error:
                raise Refused(f"--with {one}: the server has no deployment {SCAN}") from error
            trigger, action = on_event(*ENDS), RunDeployment(deployment_id=scan.id)
        elif name == "resume-crashed":
            starts = [str(number) for number in range(1, STARTS + 1)]
            match = {"prefect.state-message": f"{SILENT}*", "prefect.run-count": starts}
            trigger = on_event("prefect.flow-run.Crashed", match=match)
            action = ChangeFlowRunState(
                state=StateType.SCHEDULED,
                name="AwaitingRetry",
                message="Its host died; another worker resumes the run.",
            )
        else:
            block = read_block(client, "webhook", value or WEBHOOK, option=f"--with {one}")
            trigger = on_event(*ENDS, "prefect.flow-run.Crashed", "prefect.flow-run.Cancelled")
            action = CallWebhook(block_document_id=block, payload=PAYLOAD)
        what = EXAMPLES[name]
        found.append(AutomationCore(name=f"virnucpro: {name}", description=what, trigger=trigger, actions=[action]))
    return found


def read_block(client: Any, kind: str, name: str, *, option: str) -> Any:
    """Return the id of a block. Raises Refused: the server has none of that name."""
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound as error:
        raise Refused(f"{option}: the server has no such block {kind}/{name}; `prefect block ls`") from error


def make_automations(client: Any, wanted: Sequence[Any], *, keep_notifications: bool) -> None:
    """
    Make the automations, or bring existing ones up to date.

    Args:
        client: Of the server.
        wanted: As they should be.
        keep_notifications: Leave the actions of those that only notify as the operator has set them.
    """

    def plain(automation: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(automation.model_dump_json(include={"description", "trigger", "actions"}))
        found["trigger"].pop("id", None)
        for name in ("after", "expect", "for_each"):
            found["trigger"][name] = sorted(found["trigger"][name])
        return found

    for automation in wanted:
        found = client.read_automations_by_name(automation.name)
        if not found:
            client.create_automation(automation)
            say(automation.name, "made")
            continue
        (existing, *_) = found
        if keep_notifications and any(one.type in ("do-nothing", "send-notification") for one in automation.actions):
            automation.actions = existing.actions
        automation.enabled = existing.enabled
        if plain(existing) == plain(automation):
            say(automation.name, "as it was")
        else:
            client.update_automation(existing.id, automation)
            say(automation.name, "changed")
