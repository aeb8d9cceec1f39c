"""``virnucpro models``: list models and classifiers; convert published classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from virnucpro.commands.grouped_help import GroupedCommand
from virnucpro.commands.options import takes_settings
from virnucpro.commands.output import print_line, print_renderable
from virnucpro.errors import ConfigurationError, printable
from virnucpro.models.classifier_files.card import PUBLISHED_DNA_MODEL, PUBLISHED_PROTEIN_MODEL, classifiers_table
from virnucpro.models.registry import BUNDLED, models_table
from virnucpro.settings import EmbeddingSettings

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def _models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list", short_help="List models and classifiers, and whether their weights are here.", cls=GroupedCommand)
@takes_settings(EmbeddingSettings, only={"weights_dir"})
def list_models(
    settings: EmbeddingSettings,
) -> None:
    """List models and classifiers: what they take, how large they are, where they come from, whether they are here."""
    broken: list[ConfigurationError] = []
    rows = models_table(weights_dir=_folder(settings), on_broken=broken.append)
    table = _table("name", "takes", "parameters", "width", "weights")
    for spec, path in rows:
        weights = BUNDLED if spec.is_bundled else "absent" if path is None else "here"
        parameters = f"{spec.num_parameters / 1e6:,.1f} M"
        table.add_row(spec.name, spec.family.sequence_kind, parameters, f"{spec.hidden_dim:,}", weights)
    print_renderable(table)
    for error in broken:
        print_line(str(error))
    print("\nweights that are here:")
    for _, path in rows:
        if path is not None:
            print(f"  {printable(str(path))}")  # a line each, so that a terminal copies it whole
    if absent := [spec.source for spec, path in rows if path is None]:
        print("absent weights are fetched when they are first needed, from:", *absent, sep="\n  ")
    print()
    classifiers = _table("classifier", "chunks", "DNA model", "protein model", "threshold")
    cards = classifiers_table()
    for card in cards:
        names = (card.name, card.chunk_choice, card.dna_model.name, card.protein_model.name, f"{card.threshold:g}")
        classifiers.add_row(*(Text(printable(name)) for name in names))
    print_renderable(classifiers)
    for card in cards:
        print_line(card.worth)


def _table(*columns: str) -> Table:
    """Return an empty table in which only ``chunks`` wraps."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name != "chunks")
    return table


@app.command("convert-classifier", short_help="Turn a published classifier into safetensors.", cls=GroupedCommand)
@takes_settings(EmbeddingSettings, only={"weights_dir"})
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            readable=False, metavar="FILE", help="The published file, such as 500_model.pth.", show_default=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", readable=False, metavar="DIR", help="Folder of the classifier.", show_default=False
        ),
    ],
    settings: EmbeddingSettings,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="NT",
            help="Nucleotides of the chunks that it was trained on.",
            show_default="what the name of the file begins with",
        ),
    ] = None,
    dna_model: Annotated[
        str, typer.Option(metavar="NAME", help="DNA model that it was trained with.")
    ] = PUBLISHED_DNA_MODEL,
    protein_model: Annotated[
        str, typer.Option(metavar="NAME", help="Protein model that it was trained with.")
    ] = PUBLISHED_PROTEIN_MODEL,
) -> None:
    """
    Turn a published classifier into safetensors and a card, for `virnucpro predict --classifier DIR`.

    Nothing in the file is run: what it asks for besides the layers of such a classifier is refused by name.
    """
    from virnucpro.models.classifier_files.conversion import convert_classifier  # noqa: PLC0415  only needed here

    card = convert_classifier(
        source, output, chunk_nt=chunk, dna_model=dna_model, protein_model=protein_model, weights_dir=_folder(settings)
    )
    where, encoders = printable(str(output)), (card.dna_model, card.protein_model)
    widths = ", ".join(f"{printable(encoder.name)} {encoder.hidden_dim:,}" for encoder in encoders)
    print(f"{where}: {card.name}, {card.input_dim:,} numbers a frame ({widths}), chunks of {card.chunk_nt} nt")
    by_name = [printable(encoder.name) for encoder in encoders if encoder.sha256 is None]
    if by_name:
        print(
            f"{' and '.join(by_name)}: known by name only, since the weights are not here; convert again once they are, "
            "and the classifier refuses any others"
        )
    print(f"use it with: virnucpro predict CONTIGS -o OUT --classifier {where}")


def _folder(settings: EmbeddingSettings) -> Path | None:
    return Path(settings.cache.weights_dir) if settings.cache.weights_dir else None
