"""``virnucpro models``: what sequences can be embedded and classified with."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from virnucpro.commands.options import WeightsDir
from virnucpro.models.registry import models_table


def list_models(
    weights_dir: WeightsDir = None,
) -> None:
    """List the models: name, what they take, parameters, width, where the weights come from, whether they are here."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for column in ("takes", "parameters", "width", "source", "weights"):
        table.add_column(column, overflow="fold")
    for row in models_table(weights_dir=weights_dir):
        table.add_row(
            row.name,
            row.sequence_kind,
            f"{row.num_parameters / 1e6:,.1f} M",
            f"{row.hidden_dim:,}",
            row.source,
            row.where,
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)
