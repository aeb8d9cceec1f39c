"""``MODEL_CARD.md`` of a classifier, made from its ``card.json``, so that both say the same."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from virnucpro.models.classifier_files.card import CONTIG_WEIGHTS_NAME, WEIGHTS_NAME
from virnucpro.training.fitting.suspect_fragments import SUSPECT, SUSPECT_WEIGHT
from virnucpro.training.genomes.genome_split import SPLITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MEASURES = {
    "auroc": "AUROC",
    "auprc": "average precision",
    "f1": "F1 at the threshold",
    "recall_at_1_percent_false_positives": "recall at 1 % false positives",
    "calibration_error": "calibration error",
}
_CALIBRATION = ["fragments", "mean P(virus)", "share that is viral", "95 % interval"]
_MOST_ACCESSIONS = 2000
"""Accessions of a part that are listed; ``card.json`` has all."""
_MOST_ORGANISMS = 50
"""Organisms of a group that are listed."""


def card_text(card: Mapping[str, Any]) -> str:
    """Return the model card as Markdown."""
    sections = (_head(card), _worth(card), _data(card), _training(card), _accessions(card["split"]["accessions"]))
    return "\n".join(sections)


def _head(card: Mapping[str, Any]) -> str:
    dna, protein, training = card["dna_model"], card["protein_model"], card["training"]
    others = card.get("also_chunk_nt", ())
    also = f" (or {', '.join(map(str, others))})" if others else ""
    return f"""# {card["name"]}

{card["purpose"]}

{card["worth"]}.

| | |
| --- | --- |
| takes | contigs of any length, in chunks of {card["chunk_nt"]} nt{also}; `{dna["name"]}` \
({dna["hidden_dim"]}) and `{protein["name"]}` ({protein["hidden_dim"]}) |
| frame classifier | linear {dna["hidden_dim"] + protein["hidden_dim"]} to {card["hidden_dim"]}, batch norm, ReLU, \
dropout, linear to 2, softmax; `{WEIGHTS_NAME}`, sha256 `{card["weights_sha256"]}` |
| contig model | {_contig_model(card)} |
| threshold | {card["threshold"]}: {training["threshold_rule"]} |
| date | {card["date"]} |
| hardware | embedded on {", ".join(training["embedded_on"]) or "nothing"}; trained on {training["hardware"]} |
| versions | {", ".join(f"{name} {number}" for name, number in card["versions"].items())} |
"""


def _worth(card: Mapping[str, Any]) -> str:
    evaluation, overall = card["evaluation"], card["evaluation"]["overall"]
    of_test = card["split"]["organisms"]["test"]
    organisms = [f"{group}: {_some(names, _MOST_ORGANISMS)}" for group, names in of_test.items()]
    return f"""## What it is worth

On the test part: {overall["contigs"]:,} fragments, {overall["viral"]:,} of them viral, of records that were used for \
nothing else. In brackets: 95 % intervals of {evaluation["bootstrap_samples"]:,} bootstrap samples of the genomes.

What these figures are of:

{_listed(evaluation["limits"])}
The test part, by group:

{_listed(organisms)}
{_table(["fragments", "viral", "others", *_MEASURES.values()], _rows({"all": overall, **evaluation["by_length"]}))}

{_other_chunks(evaluation["other_chunks"])}\
By group; one that is all viral, or has no virus, is measured against all fragments of the other kind.

{_table(["group", "viral", "others", *_MEASURES.values()], _rows(evaluation["by_group"]))}

{_groups_left_out(card["training"]["groups_left_out"])}\
Calibration, over bins of equal numbers of fragments:

{_table(_CALIBRATION, _calibration(evaluation["calibration"]))}

{_listed(evaluation["notes"])}"""


def _data(card: Mapping[str, Any]) -> str:
    data, split = card["data"], card["split"]
    return f"""## Data

{data["note"] or "The licence of the genomes is not stated."}

{_table(["file", "groups", "records", "nucleotides", "sha256"], [_file(row) for row in data["files"]])}

{_listed(data["notes"])}
{_left_out(data["left_out"])}

## Parts

{split["rule"]} Seed {split["seed"]}; {split["clusters"]:,} clusters. The largest share of a held-out record's 21-mers \
found in one record of another part is {split["largest_share"]:.4f}.

{_table(["group", "label", *(f"{part}: organisms, clusters, nt, fragments" for part in SPLITS)], _groups(split))}

{card["fragments_rule"]}

{card["frames_rule"]}
"""


def _training(card: Mapping[str, Any]) -> str:
    training = card["training"]
    contigs = training["contigs"]
    losses = ", ".join(f"{loss:.4f} ({kind})" for kind, loss in contigs["validation_losses"].items())
    of_parts = ", ".join(f"{loss:.4f} ({name})" for name, loss in contigs["losses_of_parts"].items())
    return f"""## Training

{training["fragments"]["train"]:,} fragments train ({training["nucleotides"]:,} nt). The frame classifier: AdamW on \
the cross-entropy, both labels weighing the same; {training["frames"]["epochs"]} passes, the weights are a copy of \
those of pass {training["frames"]["best_epoch"]}, {training["frames"]["validation_loss"]:.4f} nats a frame on \
validation (0.6931 is to know nothing). The contig model, from k-mers of the training part's genomes counted out of \
fold, the composition and, where they lower the loss, the means of the frames' embeddings: validation loss of the \
networks by what they take {losses}; of networks, boosted trees and their mean, which is used, {of_parts}. Its \
log-odds are divided by {contigs["temperature"]:.2f}, by validation, so that P(virus) means what it says. \
{_proteins(contigs)}\
{training["repeatable"]}

{_suspects(contigs["suspects"])}

Command: `{training["command"]}`

Settings: {", ".join(f"`{name}` {value}" for name, value in training["settings"].items())}.

Seconds: {", ".join(f"{name} {seconds:.0f}" for name, seconds in training["seconds"].items())}.
"""


def _proteins(contigs: Mapping[str, Any]) -> str:
    if not contigs["proteins"]:
        return ""
    return (
        f"Contigs that letters are not sure of are compared with {contigs['proteins']:,} proteins of the training "
        f"part's genomes ({contigs['residues']:,} residues, drawn from all their likely genes), by a regression that "
        "is fitted on validation. "
    )


def _suspects(suspects: Sequence[Mapping[str, Any]]) -> str:
    if not suspects:
        return "No fragment of a genome that is not viral looks viral."
    by_group = Counter(one["group"] for one in suspects).most_common()
    return (
        f"{len(suspects):,} fragments of genomes that are not viral look viral: trees that have not seen their genomes "
        f"give them a P(virus) of {SUSPECT} or more. They may be prophages, viral elements of plants and animals, or "
        f"what merely resembles viruses; in training each counts {SUSPECT_WEIGHT}, others 1. "
        f"By group: {', '.join(f'{group} {count:,}' for group, count in by_group)}. "
        f"Record, and range in it from 0: {', '.join(one['place'] for one in suspects)}."
    )


def _groups_left_out(found: Mapping[str, Any]) -> str:
    if not found:
        return ""
    rows = [
        [
            name,
            one["label"],
            f"{one['fragments']:,}",
            f"{one['auroc']:.3f}",
            "" if (recall := one["recall_at_1_percent_false_positives"]) is None else f"{recall:.3f}",
        ]
        for name, one in sorted(found.items(), key=lambda item: item[1]["auroc"])
    ]
    return f"""Each group left out of training in turn, worst first: how its fragments rank against the test part's \
fragments of the other label, by boosted trees that were fitted on some of the other groups' fragments and, where the \
model compares contigs with proteins, by the other groups' proteins.

{_table(["group left out", "label", "fragments", "AUROC", "recall at 1 % false positives"], rows)}

"""


def _contig_model(card: Mapping[str, Any]) -> str:
    how = card["training"]["contigs"]
    return (
        f"{len(how['best_epochs'])} networks and boosted trees that take the contig's {how['inputs']}, for "
        f"{len(how['groups'])} groups of genomes, calibrated; `{CONTIG_WEIGHTS_NAME}`, sha256 "
        f"`{card['contig_model']['weights_sha256']}`"
    )


def _other_chunks(measured: Mapping[str, Any]) -> str:
    columns = ["fragments", "viral", "others", *_MEASURES.values()]
    texts = []
    for chunk_nt, one in measured.items():
        rows = _rows({"all": one["overall"], **one["by_length"]})
        texts.append(f"The same fragments in chunks of {chunk_nt} nt:\n\n{_table(columns, rows)}\n\n")
    return "".join(texts)


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rows(strata: Mapping[str, Any]) -> list[list[str]]:
    return [
        [name, f"{one['viral']:,}", f"{one['others']:,}", *(_interval(one[measure]) for measure in _MEASURES)]
        for name, one in strata.items()
    ]


def _interval(measured: Mapping[str, float | None] | None) -> str:
    if measured is None or measured["value"] is None:
        return ""
    if measured["low"] is None or measured["high"] is None:
        return f"{measured['value']:.3f}"
    return f"{measured['value']:.3f} ({measured['low']:.3f} to {measured['high']:.3f})"


def _calibration(bins: list[Mapping[str, Any]] | None) -> list[list[str]]:
    return [
        [
            f"{one['contigs']:,}",
            f"{one['mean_score']:.3f}",
            f"{one['viral_share']:.3f}",
            f"{one['low']:.3f} to {one['high']:.3f}",
        ]
        for one in bins or []
    ]


def _file(row: Mapping[str, Any]) -> list[str]:
    return [
        f"`{row['file']}`",
        ", ".join(row["groups"]),
        f"{row['records']:,}",
        f"{row['nucleotides']:,}",
        f"`{row['sha256']}`",
    ]


def _groups(split: Mapping[str, Any]) -> list[list[str]]:
    """Return label and, for each part, numbers of organisms, clusters, nucleotides and fragments of each group."""
    return [
        [name, row["label"]]
        + [
            ", ".join(
                f"{number:,}"
                for number in (
                    len(split["organisms"][part].get(name, ())),
                    *(row[part][what] for what in ("clusters", "nucleotides", "fragments")),
                )
            )
            for part in SPLITS
        ]
        for name, row in split["groups"].items()
    ]


def _some(names: list[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _left_out(accessions: list[str]) -> str:
    if not accessions:
        return "No genome was left out."
    names = ", ".join(accessions)
    return f"{len(accessions):,} records were left out as relatives of the genomes of --leave-out: {names}."


def _listed(sentences: list[str]) -> str:
    return "".join(f"- {sentence}.\n" for sentence in sentences)


def _accessions(parts: Mapping[str, list[str]]) -> str:
    texts = [f"{part} ({len(names):,}): {_some(names, _MOST_ACCESSIONS)}" for part, names in parts.items()]
    return "\n\n".join(["## Accessions", *texts]) + "\n"
