"""The bundled DNA encoder's card for readers, made from its card for programs, so that the two say the same."""

from __future__ import annotations

from typing import Any

from tools.encoders.card import WEIGHTS_NAME, settings_and_command


def card_text(card: dict[str, Any]) -> str:
    """Return the model card as Markdown."""
    shape, data, split, training = card["architecture"], card["data"], card["split"], card["training"]
    return f"""# {card["name"]}

**A demonstration encoder.** It is small enough to come with the package, so that everything works without a download.
It is no substitute for the published DNABERT-S: use that (`virnucpro models list`) for results that matter.

| | |
| --- | --- |
| architecture | MosaicBERT, as DNABERT-2 and DNABERT-S: {shape["num_hidden_layers"]} layers, width \
{shape["hidden_size"]}, {shape["num_attention_heads"]} heads, feed-forward {shape["intermediate_size"]}, \
{card["num_parameters"]:,} parameters |
| weights | `{WEIGHTS_NAME}`, float32, the published tensor names, the decoder's matrix left out (it is the token \
embeddings); sha256 `{card["weights_sha256"]}` |
| tokenizer | `tokenizer.json` of DNABERT-S (BPE, {shape["vocab_size"]:,} tokens; Apache-2.0, Zhou et al. 2024) |
| licence of the weights | {card["licence"]} |
| date | {card["date"]} |
| hardware | {training["hardware"]} |
| versions | {", ".join(f"{name} {number}" for name, number in card["versions"].items())} |

## Data

{data["description"]}. Licence: {data["licence"]}.

| file | records | nt | held out | sha256 |
| --- | --- | --- | --- | --- |
{_file_rows(card)}

Bias: eukaryotes are one fungus; archaea are absent but for a few filed under bacteria; prophages
inside bacterial windows were not filtered; the genomes are public, so published tools may have been trained on them.

## Split

{split["rule"]} Seed {split["seed"]}. {split["num_training"]:,} records train, {split["num_held_out"]:,} \
({split["held_out_nt"]:,} nt) are held out ({split["num_groups"]:,} groups in all). Measured on the finished split, \
the largest share of a held-out record's 21-mers found in one training record is {split["largest_share"]:.4f}; the \
mean of these largest shares is {split["mean_share"]:.4f}. Relatives further apart are on both sides, such as \
other species of a genus. `card.json` lists the accessions that are held out, and those that trained: a classifier on \
this encoder is not to be measured on them.

## Training

Masked-token prediction on either strand: 15 % of the tokens, of these 80 % masked, 10 % replaced, 10 % left. \
{training["steps"]:,} steps, {training["tokens_seen"]:,} tokens, {training["elapsed_minutes"]:.0f} minutes, \
precision {training["settings"]["precision"]}. {training["repeatable"]}

{settings_and_command(training)}

## What it is worth

Held-out loss, every chosen token masked (fixed mask, up to eight windows of 126 tokens of each held-out record), nats
per masked token. The unigram model has the token frequencies of the training part, one added to each count.

| held-out records of | masked tokens | unigram model | this encoder | gain |
| --- | --- | --- | --- | --- |
{_loss_rows(card)}

Nothing here measures how well viral sequences are told from others.
"""


def _file_rows(card: dict[str, Any]) -> str:
    held_out = card["split"]["held_out_of_file"]
    return "\n".join(
        f"| `{item['file']}` | {item['num_records']:,} | {item['num_nt']:,} | {held_out.get(item['file'], 0):,} | "
        f"`{item['sha256']}` |"
        for item in card["data"]["files"]
    )


def _loss_rows(card: dict[str, Any]) -> str:
    return "\n".join(
        f"| `{name}` | {part['num_tokens']:,} | {part['unigram']:.4f} | {part['encoder']:.4f} | {part['gain']:.4f} |"
        for name, part in [("all", card["held_out_loss"]), *card["held_out_loss_by_file"].items()]
    )
