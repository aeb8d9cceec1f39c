"""A trained classifier's card for readers, made from its card for programs, so that the two say the same."""

from __future__ import annotations

from typing import Any

from virnucpro.models.classifier_card import WEIGHTS_NAME


def card_text(card: dict[str, Any]) -> str:
    """Return the model card as Markdown."""
    training, evaluation, data = card["training"], card["evaluation"], card["data"]
    dna, protein = card["dna_model"], card["protein_model"]
    rule = evaluation["rule"]
    return f"""# {card["name"]}

**A demonstration classifier.** It works on the two bundled demonstration encoders, so that everything works without a
download. It is no substitute for the published classifiers on DNABERT-S and ESM-2 3B.

| | |
| --- | --- |
| takes | chunks of {card["chunk_nt"]} nt; `{dna["name"]}` ({dna["hidden_dim"]}) and `{protein["name"]}` \
({protein["hidden_dim"]}) |
| architecture | linear {dna["hidden_dim"] + protein["hidden_dim"]} to {card["hidden_dim"]}, batch norm, ReLU, \
dropout, linear to 2, softmax |
| weights | `{WEIGHTS_NAME}`, float32; sha256 `{card["weights_sha256"]}` |
| threshold | {card["threshold"]}: {evaluation["threshold_rule"]} |
| contig rule | {rule} |
| licence of the weights | {card["licence"]} |
| date | {card["date"]} |
| hardware | {training["hardware"]} |
| versions | {", ".join(f"{name} {number}" for name, number in card["versions"].items())} |

## Data

Genomes and windows of genomes of INSDC and RefSeq. Licence: free of restrictions on use. {data["left_out_rule"]} \
{data["pieces_rule"]}

| file | records | left out as related | held out | pieces | open frames | sha256 |
| --- | --- | --- | --- | --- | --- | --- |
{_rows(data["files"], "file", ("num_records", "num_related", "num_held_out", "num_pieces", "num_frames"), "sha256")}

Bias: {data["bias"]}

## Split

{data["split_rule"]} Seed {training["settings"]["seed"]}. The largest share of a held-out record's 21-mers found in \
one training record is {data["largest_share"]:.4f}.

## Training

{training["text"]} {training["epochs"]} passes, the weights are those of pass {training["best_epoch"]}: \
{training["validation_loss"]:.4f} nats a frame on the held-out genomes (0.6931 is to know nothing), AUROC of frames \
{training["validation_auroc"]:.4f}.

Settings: {", ".join(f"`{name}` {value}" for name, value in training["settings"].items())}.

Command: `{training["command"]}`

## What it is worth

{evaluation["contigs"]} contigs of the development set, {evaluation["viral"]} of them viral, 300 to 10,000 nt, of \
genomes that neither train nor stop the training; the encoders were trained, without labels, on relatives of some. \
{evaluation["without_an_open_frame"]} have no open frame, so that nothing can be said of them: below they count as the \
least viral of all, and as not called. The set was used to choose the contig rule and the threshold, so the figures \
are a little better than on contigs that nothing was chosen by. In brackets: 95 % intervals of \
{evaluation["bootstrap_samples"]:,} bootstrap samples.

| contig rule | AUROC | 300 to 500 nt | 800 to 1,000 nt | 2,000 nt and more | of those with an open frame | above the \
plain mean | recall at 1 % false positives |
| --- | --- | --- | --- | --- | --- | --- | --- |
{_rule_rows(evaluation["rules"])}

The rule in use is the first. {evaluation["choice"]}

With it, by length (recall and false positives at the threshold {card["threshold"]}; last column: recall at the \
threshold that 1 % of all contigs which are not viral pass):

| contigs | viral | others | without an open frame | recall | false positives | recall at 1 % |
| --- | --- | --- | --- | --- | --- | --- |
{_length_rows(evaluation["by_length"])}

By group, the share called viral:

| group | label | contigs | without an open frame | at {card["threshold"]} | at 1 % false positives |
| --- | --- | --- | --- | --- | --- |
{_group_rows(evaluation["by_group"])}
"""


def _rows(items: list[dict[str, Any]], name: str, counts: tuple[str, ...], digest: str) -> str:
    return "\n".join(
        f"| `{item[name]}` | {' | '.join(f'{item[count]:,}' for count in counts)} | `{item[digest]}` |"
        for item in items
    )


def _interval(measured: list[float]) -> str:
    value, low, high = measured
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def _rule_rows(rules: dict[str, Any]) -> str:
    return "\n".join(
        f"| {name} | {_interval(of_rule['auroc'])} | "
        f"{' | '.join(_interval(x) for x in of_rule['auroc_by_length'].values())} | "
        f"{_interval(of_rule['auroc_with_an_open_frame'])} | "
        f"{_interval(of_rule['auroc_above_plain_mean'])} | "
        f"{_interval(of_rule['recall_at_1_percent_false_positives'])} |"
        for name, of_rule in rules.items()
    )


def _length_rows(by_length: dict[str, Any]) -> str:
    return "\n".join(
        f"| {which} | {row['viral']} | {row['others']} | {row['without_an_open_frame']} | {row['recall']:.2f} | "
        f"{row['false_positives']:.2f} | {row['recall_at_1_percent_false_positives']:.2f} |"
        for which, row in by_length.items()
    )


def _group_rows(by_group: dict[str, Any]) -> str:
    return "\n".join(
        f"| {group} | {row['label']} | {row['contigs']} | {row['without_an_open_frame']} | {row['called']:.2f} | "
        f"{row['called_at_1_percent_false_positives']:.2f} |"
        for group, row in by_group.items()
    )
