"""
The tables of ``docs/models.md``: what each combination of models weighs, how fast it is, what it reaches.

Run it as ``python benchmarks/model_zoo.py``. It measures nothing: speeds are those of ``benchmarks/results``, sizes and
licences those of the registry and of the bundled files, and what a classifier reaches is the ``evaluation.json`` of
``virnucpro evaluate``, kept as ``benchmarks/results/evaluation_NAME.json``. What was not measured stays empty.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virnucpro.choices import DEFAULT_CLASSIFIER, DEFAULT_DNA_MODEL, DEFAULT_PROTEIN_MODEL
from virnucpro.models.classifier_files.card import BUNDLED_CLASSIFIERS
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, MODELS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
MARKS = {
    name: (f"<!-- {name}: written by benchmarks/model_zoo.py -->", f"<!-- end of {name} -->")
    for name in ("combinations", "accuracy")
}
LENGTHS = ("up to 500 nt", "501 to 1,000 nt", "2,000 nt and more")
"""Length classes of the development contigs."""
SPEEDS = {"esm2_t6_8M_UR50D": "8M", "esm2_t30_150M_UR50D": "150M", "esm2_t33_650M_UR50D": "650M"}
"""What the benchmark of embedding calls a model."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A classifier and the two encoders that it was trained with."""

    name: str
    """Also of its evaluation in the results."""
    dna: str
    protein: str
    chunks: str
    licence: str
    """Of the classifier's weights."""
    origin: str


ZOO = (
    Combination(
        name=DEFAULT_CLASSIFIER,
        dna=DEFAULT_DNA_MODEL,
        protein=DEFAULT_PROTEIN_MODEL,
        chunks="[its card](../virnucpro/models/weights/virnucpro-tiny/MODEL_CARD.md)",
        licence="MIT",
        origin="bundled",
    ),
    Combination(
        name="own-8M",
        dna=DEFAULT_DNA_MODEL,
        protein="esm2_t6_8M_UR50D",
        chunks="300 or 500",
        licence="yours",
        origin="[train it](#a-middle-choice)",
    ),
    *(
        Combination(
            name=f"published-{chunk}",
            dna="dnabert-s",
            protein="esm2_t36_3B_UR50D",
            chunks=chunk,
            licence="not stated where it was looked for",
            origin=f"[`{chunk}_model.pth`](#the-published-classifiers)",
        )
        for chunk in ("500", "300")
    ),
)


def combinations() -> str:
    """Return the table of what the combinations are."""
    speeds = _speeds()
    lines = [
        "| classifier | chunks, nt | DNA encoder | protein encoder | weights, MB | tokens per CPU s | licence | from |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in ZOO:
        encoders = (MODELS[one.dna], MODELS[one.protein])
        described = [f"`{spec.name}`, {spec.num_parameters / 1e6:,.1f} M, {spec.licence}" for spec in encoders]
        total = sum(_megabytes(spec.name) for spec in encoders)
        total += _megabytes(one.name) if one.name in BUNDLED_CLASSIFIERS else 0
        cells = [f"`{one.name}`", one.chunks, *described, f"{total:,.0f}", speeds.get(one.protein, ""), one.licence]
        lines.append(f"| {' | '.join([*cells, one.origin])} |")
    return "\n".join(lines)


def accuracy() -> str:
    """Return the table of what was measured of the combinations."""
    lines = [
        f"| classifier | contigs | AUROC | {' | '.join(LENGTHS)} | recall at 1 % false positives | calibration error |",
        f"| --- | --- | --- |{' --- |' * len(LENGTHS)} --- | --- |",
    ]
    for one in ZOO:
        path = RESULTS / f"evaluation_{one.name}.json"
        if not path.exists():
            lines.append(f"| `{one.name}` | not measured |{' |' * (len(LENGTHS) + 3)}")
            continue
        (table,) = json.loads(path.read_text())["tables"]
        overall = table["overall"]
        measured = [overall["auroc"], *((table["by_length"].get(which) or {}).get("auroc") for which in LENGTHS)]
        measured += [overall["recall_at_1_percent_false_positives"], overall["calibration_error"]]
        cells = [f"`{one.name}`", f"{overall['contigs']:,}", *map(_interval, measured)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """Return the page with both tables as they are now."""
    for name, table in (("combinations", combinations()), ("accuracy", accuracy())):
        begin, end = MARKS[name]
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{name} has no place in {PAGE}"
        page = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    return page


def _megabytes(name: str) -> float:
    """Return the size of a bundled model's or classifier's weights, or of another's in float32."""
    if name in BUNDLED_CLASSIFIERS or MODELS[name].is_bundled:
        return sum(path.stat().st_size for path in (BUNDLED_WEIGHTS_DIR / name).glob("*.safetensors*")) / 1e6
    return MODELS[name].num_parameters * 4 / 1e6


def _speeds() -> dict[str, str]:
    """Return the tokens per CPU second of chunks of each protein model that was measured."""
    rows = [
        row
        for name in ("embedding", "embedding_large")
        for path in sorted(RESULTS.glob(f"{name}_[0-9]*.json"))[-1:]
        for row in json.loads(path.read_text())["rows"]
    ]
    found = {row["model"]: row["tokens_per_cpu_second"]["median"] for row in rows if row["workload"] == "chunks"}
    return {model: f"{found[short]:,.0f}" for model, short in SPEEDS.items() if short in found}


def _interval(one: dict[str, Any] | None) -> str:
    return f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})" if one else ""


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
