"""``virnucpro train``: labelled genomes in, a classifier with its card out."""

from __future__ import annotations

import importlib
import json
import shlex
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from virnucpro.commands.options import AsJson, Flow, Quiet, output_folder, takes_settings
from virnucpro.commands.output import ignoring_closed_output, print_line
from virnucpro.commands.running import configured, run_as_flow, shown_run
from virnucpro.errors import printable
from virnucpro.knobs import settings_of
from virnucpro.training.genomes.labelled_genomes import check_files
from virnucpro.training.training_knobs import TrainingSettings
from virnucpro.training.training_settings import configure_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.training.classifier_training import TrainingResult

_TRAINING = "virnucpro.training.classifier_training"
"""By name: it imports scipy, which no other command needs."""
_NOT_ON_THE_CARD = {"data_note", "keep_work"}
"""Settings of a training that do not change its weights."""


@takes_settings(TrainingSettings)
def train(
    labelled: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            metavar="LABELLED",
            help="FASTA files of genomes, plain or gzip, or folders of them. A file's name says what it holds, unless --genomes does: train_virus_phages.fna.gz, nonviral-bacteria.fa.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            parser=output_folder,
            metavar="DIR",
            help="Folder of the classifier: weights, card.json, MODEL_CARD.md, evaluation.json. `virnucpro predict --classifier DIR` takes it.",
            show_default=False,
        ),
    ],
    settings: TrainingSettings,
    flow: Flow = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """
    Train a classifier on your own genomes, and measure it on others that are not related to them.

    The genomes are split into three parts by relatedness: most train, some stop the training and calibrate it, the
    others only measure. Starting the same command again continues a training that was stopped.
    """
    others = [Path(path) for path in (settings.genomes, *settings.annotations, *settings.leave_out) if path]
    check_files(labelled, *others)  # before weights are searched for or fetched
    name = settings.training.name or output.absolute().name
    named = settings.training.model_copy(update={"name": name})
    command = command_of(labelled, settings.model_copy(update={"training": named}))
    settings = settings.model_copy(update={"training": named.model_copy(update={"command": command})})
    if flow or settings.hardware.runner != "threads":
        files = [str(path) for path in labelled]
        result = run_as_flow("train", settings, is_quiet=quiet, labelled=files, output_dir=str(output))
        _report(result, as_json=as_json, quiet=quiet)
        return
    claim, config = configured(configure_training, settings, is_quiet=as_json or quiet)
    run = partial(
        importlib.import_module(_TRAINING).run_training,
        labelled,
        output,
        config,
        claim,
        workers=settings.hardware.workers or None,
        restart=settings.result.restart,
    )
    with shown_run(run, settings, is_quiet=as_json or quiet, notes=not quiet) as result:
        _report(result, as_json=as_json, quiet=quiet)


def command_of(labelled: Sequence[Path], settings: TrainingSettings) -> str:
    """Return the command that makes the same weights, for the card: files by their names."""
    parts = ["virnucpro", "train", *(path.name for path in labelled), "-o", "DIR"]
    for setting in settings_of(TrainingSettings, face="command"):
        box, name = setting.path[0], setting.path[-1]
        if box not in {"genomes", "annotations", "leave_out", "training"} or name in _NOT_ON_THE_CARD:
            continue
        value: Any = reduce(getattr, setting.path, settings)
        if value == setting.info.default and name != "seed":
            continue
        if isinstance(value, bool):
            parts.append(setting.option)
            continue
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            values = [f"{key}={number:g}" for key, number in value.items()]
        for one in values:
            is_file = box != "training"
            parts += [setting.option, Path(one).name if is_file else str(one)]
    return shlex.join(parts)


def _report(result: TrainingResult, *, as_json: bool, quiet: bool) -> None:
    with ignoring_closed_output():
        if as_json:
            print(json.dumps(result.to_json()))
        if as_json or quiet:
            return
        where, counts = printable(str(result.output_dir)), result.counts
        if result.was_complete:
            print(f"{where}: already complete; nothing was computed")
        parts = ", ".join(f"{counts[f'{part} fragments']:,} {what}" for part, what in _PARTS.items())
        print(f"{counts['records']:,} records in {counts['clusters']:,} clusters that are not related")
        print(f"  {parts}; {counts['frames']:,} open frames embedded")
        for note in result.notes:
            print_line(f"  {note}")
        print(f"  {', '.join(f'{name} {seconds:.1f} s' for name, seconds in result.stages_s.items())}")
        print(printable(result.worth))
        print(f"card: {printable(str(result.output_dir / 'MODEL_CARD.md'))}")
        print(f"next: virnucpro predict CONTIGS -o OUT --classifier {printable(shlex.quote(str(result.output_dir)))}")


_PARTS = {"train": "fragments train", "validation": "stop and calibrate", "test": "measure"}
