"""
What calls are worth in samples: without a virus, by kind of genome, and of 1 to 80 % viruses.

Contigs are cut at random from genomes that did not train the classifier: the parts ``test`` and ``validation`` of its
card, and all of ``--left-out``, each file a kind. Others are made: random sequences, shuffled genomes (the same pairs
of neighbours), tandem repeats, cellular contigs with a homopolymer tail, arrays like those of CRISPR. All get their
scores from ``predict``.

- **virus-free**: all contigs of a kind are a sample: the estimated share of viruses with its interval, and how many
  are called viral by default and with ``--fdr 0.05``.
- **mixtures**: samples of 1,000, drawn with replacement, of held-out viruses among bacteria or eukaryotes: how often
  the interval has the share, the share that is found, and the share of calls that is wrong.
- **changed**: the development contigs on the other strand, with an N in the middle, with errors of sequencing: how
  many are called viral at the threshold, and how many calls change.

    python benchmarks/samples.py DATA [--classifier DIR] [--left-out FILE ...] [--work DIR] [--write]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from bench_common import machine, write_result

from virnucpro import predict_fasta
from virnucpro.calls.sample_prior import call_limits, count_scores, estimate_prior
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.models.classifier_files.card import CARD_NAME, locate_classifier
from virnucpro.store.contig_table import Call, read_contig_calls
from virnucpro.training.evaluation.tables import read_truth
from virnucpro.training.genomes.artificial_genomes import shuffled
from virnucpro.training.genomes.labelled_genomes import read_labelled
from virnucpro.training.genomes.records import read_records
from virnucpro.training.genomes.related import reverse_complement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import BoolArray, FloatArray
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome

TABLE = Path(__file__).parent.parent / "tools" / "default_classifier" / "genomes.tsv.gz"
SEED, FDR = 20261128, 0.05
CONTIGS, LENGTHS = 500, (300, 500, 1000, 2000, 5000, 10_000)
"""Of a kind, and their nucleotides; a shorter record is one contig."""
SHARES, SIZE, SAMPLES = (0.01, 0.05, 0.2, 0.8), 1000, 100
EUKARYOTES = ("animal", "fungus", "plant", "plant_other", "protist", "animal_other")
SEEDED = tuple(f"random, {gc} % GC" for gc in (30, 50, 70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of viral, genomes and kinds")
    parser.add_argument("--classifier", default=DEFAULT_CLASSIFIER)
    parser.add_argument("--left-out", type=Path, nargs="*", default=[], help="files that did not train it")
    parser.add_argument("--work", type=Path, help="folder of the prediction, which stays")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    folder = locate_classifier(asked.classifier)
    card = json.loads((folder / CARD_NAME).read_text())
    random = np.random.default_rng(SEED)
    contigs = {kind: cut(genomes, random) for kind, genomes in held_out(asked.data, card, asked.left_out).items()}
    contigs |= made([*contigs["virus"], *contigs["bacteria"]], contigs["bacteria"], random)
    changes, is_virus = changed(asked.data / "genomes", random)
    contigs |= changes
    with tempfile.TemporaryDirectory() as scratch:
        scores, few = scored(contigs, asked.classifier, asked.work or Path(scratch))
    report: dict[str, Any] = {"machine": machine("numpy", "virnucpro"), "classifier": card["name"]}
    report["left_out"] = [path.name for path in asked.left_out]
    kinds = scores.keys() - {"virus", *changes}
    report["virus_free"] = {
        kind: free(scores[kind], card["threshold"]) | {"in_few": round(float(np.mean(few[kind])), 4)}
        for kind in scores
        if kind in kinds
    }
    for kind, row in report["virus_free"].items():
        print(f"| {kind} | " + " | ".join(str(value) for value in row.values()) + " |")
    hosts = {"bacteria": scores["bacteria"]}
    hosts["eukaryotes"] = np.concatenate([scores[kind] for kind in EUKARYOTES if kind in scores])
    report["mixtures"] = []
    for host, others in hosts.items():
        for share in SHARES:
            row = {"among": host, "share": share, **mixed(scores["virus"], others, share, card["threshold"])}
            report["mixtures"].append(row)
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    called = {change: scores[change] >= card["threshold"] for change in changes}
    report["changed"] = {
        change: {
            "viruses found": round(float(viral[is_virus].mean()), 4),
            "others called viral": round(float(viral[~is_virus].mean()), 4),
            "calls changed": int(np.count_nonzero(viral != called["unchanged"])),
            "largest change of a score": round(float(np.nanmax(np.abs(scores[change] - scores["unchanged"]))), 4),
        }
        for change, viral in called.items()
    }
    for change, row in report["changed"].items():
        print(f"| {change} | " + " | ".join(str(value) for value in row.values()) + " |")
    if asked.write:
        print(write_result("samples", report))


def changed(folder: Path, random: np.random.Generator) -> tuple[dict[str, list[str]], BoolArray]:
    """Return the development contigs, changed in several ways, and which are viral."""
    truth = read_truth(folder / "dev_truth.tsv")
    is_virus = dict(zip(truth.contigs, truth.is_virus_C.tolist(), strict=True))
    records = list(read_records(folder / "dev_contigs.fa.gz"))
    contigs = [record.letters for record in records]

    def with_errors(letters: str, substituted: float, inserted: float) -> str:
        others = random.choice(list("ACGT"), len(letters))
        found = []
        for letter, other, chance in zip(letters, others, random.random(len(letters)), strict=True):
            if chance < inserted:
                found += [letter, other] if chance < inserted / 2 else []
            else:  # a quarter of the others are the same letter
                found.append(other if chance < inserted + substituted * 4 / 3 else letter)
        return "".join(found)

    changes = {
        "unchanged": contigs,
        "other strand": [reverse_complement(one) for one in contigs],
        "an N in the middle": [one[: len(one) // 2] + "N" + one[len(one) // 2 + 1 :] for one in contigs],
        "1 % substituted": [with_errors(one, 0.01, 0.0) for one in contigs],
        "5 % substituted": [with_errors(one, 0.05, 0.0) for one in contigs],
        "1 % inserted or deleted": [with_errors(one, 0.0, 0.01) for one in contigs],
    }
    return changes, np.array([is_virus[record.accession] for record in records])


def held_out(data: Path, card: dict[str, Any], left_out: Sequence[Path]) -> dict[str, list[LabelledGenome]]:
    """Return the genomes that did not train, by kind; all viruses are one."""
    kept = {name for part in ("test", "validation") for name in card["split"]["accessions"][part]}
    files = sorted(path for folder in ("viral", "genomes", "kinds") for path in (data / folder).glob("*.fna.gz"))
    kinds = defaultdict(list)
    for genome in read_labelled(files, TABLE).genomes:
        if genome.accession in kept:
            kinds["virus" if genome.is_virus else genome.group].append(genome)
    for path in left_out:
        kinds[path.name.removeprefix("nonviral_").removesuffix(".fna.gz")] += read_labelled([path]).genomes
    return kinds


def cut(genomes: Sequence[LabelledGenome], random: np.random.Generator) -> list[str]:
    """Return contigs, as many of one genome as of another."""
    by_source = defaultdict(list)
    for genome in genomes:
        if len(genome.letters) >= LENGTHS[0]:
            by_source[genome.source].append(genome.letters)
    sources = list(by_source.values())
    found = []
    for number in range(CONTIGS):
        records = sources[number % len(sources)]
        letters, length = records[int(random.integers(len(records)))], int(random.choice(LENGTHS))
        start = int(random.integers(max(len(letters) - length, 0) + 1))
        found.append(letters[start : start + length])
    return found


def made(natural: Sequence[str], cellular: Sequence[str], random: np.random.Generator) -> dict[str, list[str]]:
    """Return sequences that no organism has, or with what sequencing and evolution add, by kind."""

    def drawn(length: int, gc: float = 0.5) -> str:
        return "".join(random.choice(list("ACGT"), length, p=[(1 - gc) / 2, gc / 2, gc / 2, (1 - gc) / 2]))

    lengths = [int(length) for length in random.choice(LENGTHS, CONTIGS)]
    units = [drawn(int(random.integers(1, 61))) for _ in range(CONTIGS)]
    arrays = []
    for length in lengths:
        repeat, array = drawn(int(random.integers(28, 38))), ""
        while len(array) < length:
            array += repeat + drawn(int(random.integers(32, 39)))
        arrays.append(array[:length])
    return {
        **{kind: [drawn(length, float(kind.split()[1]) / 100) for length in lengths] for kind in SEEDED},
        "shuffled genomes": [shuffled(natural[int(random.integers(len(natural)))], random) for _ in range(CONTIGS)],
        "homopolymers": ["ACGT"[number % 4] * length for number, length in enumerate(lengths)],
        "tandem repeats": [(unit * length)[:length] for unit, length in zip(units, lengths, strict=True)],
        "bacteria with a tail of 90": [one + "ACGT"[number % 4] * 90 for number, one in enumerate(cellular)],
        "arrays like CRISPR": arrays,
    }


def scored(
    contigs: dict[str, list[str]], classifier: str, work: Path
) -> tuple[dict[str, FloatArray], dict[str, list[bool]]]:
    """Return the scores of each kind, float32 (contigs,), NaN: none; and which are viral in samples of few contigs."""
    work.mkdir(parents=True, exist_ok=True)
    fasta = work / "contigs.fasta"
    names = {f"{place}.{number}": kind for place, kind in enumerate(contigs) for number in range(len(contigs[kind]))}
    letters = [one for of_kind in contigs.values() for one in of_kind]
    fasta.write_text("".join(f">{name}\n{one}\n" for name, one in zip(names, letters, strict=True)))
    predict_fasta(fasta, work / "out", classifier=classifier, prior="off", genes="none")
    scores, few = defaultdict(list), defaultdict(list)
    for call in read_contig_calls(work / "out" / "contigs.tsv"):
        scores[names[call.contig]].append(np.nan if call.score is None else call.score)
        few[names[call.contig]].append(call.call is Call.VIRUS)
    return {kind: np.array(of_kind, dtype=np.float32) for kind, of_kind in scores.items()}, few


def free(scores: FloatArray, threshold: float) -> dict[str, Any]:
    """Return what a sample without a virus is said to be, and the shares of its contigs that are called viral."""
    if np.isnan(scores).all():
        return {"contigs": len(scores), "scored": 0, "share": "", "default": 0.0, "fdr_0.05": 0.0}
    sample = estimate_prior(count_scores(scores))
    low, high = sample.interval or (0.0, 1.0)
    return {
        "contigs": len(scores),
        "scored": int(np.count_nonzero(~np.isnan(scores))),
        "share": f"{sample.share:.3f} ({low:.3f} to {high:.3f})",
        "default": round(float(np.mean(scores >= call_limits(sample, threshold).virus_from)), 4),
        "fdr_0.05": round(float(np.mean(scores >= call_limits(sample, threshold, fdr=FDR).virus_from)), 4),
    }


def mixed(viral: FloatArray, others: FloatArray, share: float, threshold: float) -> dict[str, float]:
    """Return means over samples of a *share* of viruses."""
    random = np.random.default_rng(SEED)
    number = round(SIZE * share)
    truth, rows = np.arange(SIZE) < number, []
    for _ in range(SAMPLES):
        drawn = np.concatenate([random.choice(viral, number), random.choice(others, SIZE - number)])
        sample = estimate_prior(count_scores(drawn))
        low, high = sample.interval or (0.0, 1.0)
        row = {"estimate": sample.share, "covered": low <= share <= high}
        for name, fdr in (("default", None), ("fdr_0.05", FDR)):
            called = drawn >= call_limits(sample, threshold, fdr=fdr).virus_from
            row |= {
                f"{name}_found": called[truth].mean(),
                f"{name}_wrong": (called & ~truth).sum() / max(called.sum(), 1),
            }
        rows.append(row)
    return {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}


if __name__ == "__main__":
    main()
