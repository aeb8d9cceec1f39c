"""The calls of a run as a bar of MultiQC's report, which finds ``*_mqc.json`` in any folder and needs no plugin."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from virnucpro.run_layout import PredictionLayout

_COLOURS = {
    Call.VIRUS: "#c84e00",
    Call.NOT_VIRUS: "#1f6fa8",
    Call.UNDECIDED: "#8b94a1",
    Call.TOO_SHORT: "#c3cad5",
    Call.NO_OPEN_FRAME: "#dfe4ea",
}


def write_multiqc(layout: PredictionLayout, counts: Mapping[str, int]) -> None:
    """Write the number of sequences of each call; the sample is named as the run's folder is."""
    content = {
        "id": "virnucpro",
        "section_name": "VirNucPro",
        "description": "Calls of contigs or reads: which are viral. Each sample is the output folder of a run.",
        "plot_type": "bargraph",
        "pconfig": {"id": "virnucpro_calls", "title": "VirNucPro: calls", "ylab": "Number of sequences"},
        "categories": {key_of(call): {"name": call.capitalize(), "color": _COLOURS[call]} for call in Call},
        "data": {layout.output_dir.resolve().name: {key_of(call): counts.get(key_of(call), 0) for call in Call}},
    }
    durable.write_bytes(layout.multiqc, f"{json.dumps(content, indent=1)}\n".encode())


def key_of(call: Call) -> str:
    """Return the name of the count of a call in ``run.json``."""
    return call.replace(" ", "_")
