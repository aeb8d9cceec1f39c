"""
How well viral regions are found: in synthetic prophages, in bacteria, and where bacteria match a known phage.

Phages, cut to 3, 5, 10 and 20 kb, are set into windows of bacterial genomes, on either strand and at random places.
Both are of genomes that did not train the classifier: parts ``test`` and ``validation`` of its card, or the ids of
``--held-out``. Half of the clusters of phages and half of the bacterial genomes choose the rule's constants
(``--choose`` prints the grid), the other half reports. Phages are drawn by cluster, so that relatives count together.

- **recall, precision** by nucleotides and by region: a prophage is found, and a region right, where they share at least
  half of both. Natural prophages of a window are not known, and their regions count as false.
- **boundary error**: nucleotides from an end of a found prophage to that of its region; quartiles.
- **false regions** per Mb, and their share of the nucleotides, of the windows without a phage.
- **known**: prophages of the data's bacteria are told by 21-mers that they share with a phage of the data. Such windows
  hold a prophage of unknown ends, and most trained the classifier, as bacteria: their figures are no measure of it.
- **before**: runs of at least three windows from the classifier's threshold up that bridge at most two others.

The classifier has to score without embeddings. DATA is a folder of ``viral`` and ``genomes`` as in the shared data.

    python benchmarks/regions.py DATA [--classifier DIR] [--held-out FILE] [--number 200] [--choose] [--write]
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_common import machine, write_result

from virnucpro.calls import viral_regions
from virnucpro.calls.viral_regions import NEUTRAL_P, ViralRegion, find_regions
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.data.frames import chunk_bounds
from virnucpro.models.classifier_files.card import CARD_NAME, locate_classifier, read_card
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.models.contigs.nucleotide_codes import masked
from virnucpro.training.genomes.records import Record, read_records, source_of
from virnucpro.training.genomes.related import cluster, reverse_complement, sketch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virnucpro.models.contigs.contig_model import ContigModel

SEED = 20261123
PHAGES = ("viral/train_virus_prokaryotic_virus.fna.gz", "genomes/virus_phage_*.fna.gz")
BACTERIA = (
    "viral/train_nonviral_bacteria.fna.gz",
    *(f"genomes/nonviral_{name}*.fna.gz" for name in ("bac", "actino", "bdello", "campylo", "cyano", "pseudo")),
)
FRAGMENT = re.compile(r"_f(rag)?\d+")
"""Ids of cut phages."""
PHAGE_NT, LEAST_HOST_NT, FLANK_NT = (5_000, 60_000), 40_000, 5_000
SIZES_NT = (3_000, 5_000, 10_000, 20_000)
BLOCK_NT, MATCHING_SHARE, LEAST_BLOCKS = 2_000, 0.1, 2
"""A block matches where this share of its sketched 21-mers is in a phage; a window, where so many blocks do."""
MIN_OVERLAP = 0.5
SWITCH_COSTS, MOST_LOG_ODDS = (3, 4, 5, 6, 7, 8, 10, 12, 14), (1, 1.5, 2, 3, 4, 8)


@dataclass(frozen=True)
class Contig:
    """A bacterial window, with or without a phage."""

    name: str
    letters: str
    blocks: np.ndarray | None = None
    """int64: starts of its blocks that match a phage."""
    phage: tuple[int, int] | None = None
    """Where a phage was set, 0-based nt, half open."""


@dataclass(frozen=True)
class Scored:
    """A contig's chunks, and P(virus) of each with its two neighbours."""

    contig: Contig
    starts: np.ndarray
    ends: np.ndarray
    p_virus: np.ndarray


@dataclass(frozen=True)
class Genomes:
    """What contigs are made from."""

    phages: list[Record]
    clusters: np.ndarray
    """Of each phage."""
    windows: list[Record]
    """Of bacteria, without a match."""
    known: list[Contig]
    """Windows of all bacteria that match a phage."""
    known_held_out: int

    @classmethod
    def of(cls, data: Path, held_out: set[str]) -> Genomes:
        """Read phages and windows whose ids are in *held_out*, and all windows that match a phage."""
        every_phage = read(data, PHAGES)
        least, most = PHAGE_NT
        phages = [
            r
            for r in every_phage
            if r.accession in held_out and least <= len(r.letters) <= most and not FRAGMENT.search(r.accession)
        ]
        of_phages = np.unique(np.concatenate([sketch(r.letters) for r in every_phage]))
        windows, known, known_held_out = [], [], 0
        for r in read(data, BACTERIA):
            blocks = matching_blocks(r.letters, of_phages) if len(r.letters) >= LEAST_HOST_NT else []
            if len(blocks) >= LEAST_BLOCKS:
                known.append(Contig(r.accession, r.letters, blocks=blocks))
                known_held_out += r.accession in held_out
            elif r.accession in held_out and len(r.letters) >= LEAST_HOST_NT:
                windows.append(r)
        return cls(phages, cluster([sketch(r.letters) for r in phages]), windows, known, known_held_out)

    def half(self, number: int) -> Half:
        """Return half 0 or 1 of the clusters of phages and of the genomes of bacteria."""
        random = np.random.default_rng(SEED)
        chosen = random.permutation(np.unique(self.clusters))[number::2]
        hosts = set(random.permutation(sorted({source_of(r) for r in self.windows}))[number::2].tolist())
        return Half(
            [[r for r, c in zip(self.phages, self.clusters, strict=True) if c == one] for one in chosen],
            [Contig(r.accession, r.letters) for r in self.windows if source_of(r) in hosts],
        )

    def described(self) -> dict[str, int]:
        return {
            "phages": len(self.phages),
            "clusters of phages": len(np.unique(self.clusters)),
            "bacterial windows": len(self.windows),
            "genomes of bacteria": len({source_of(r) for r in self.windows}),
            "windows that match a phage": len(self.known),
            "of these, held out": self.known_held_out,
        }


@dataclass(frozen=True)
class Half:
    """Genomes of one half of the measurement."""

    phage_clusters: list[list[Record]]
    clean: list[Contig]

    def prophage(self, random: np.random.Generator, name: str, nt: int) -> Contig:
        """Set *nt* of a phage of a random cluster into a random window, at a random place and on either strand."""
        phage = ""
        while len(phage) < nt:
            some = self.phage_clusters[random.integers(len(self.phage_clusters))]
            phage = some[random.integers(len(some))].letters
        start = int(random.integers(len(phage) - nt + 1))
        phage = phage[start : start + nt]
        host = self.clean[random.integers(len(self.clean))].letters
        phage, host = (s if random.random() < 0.5 else reverse_complement(s) for s in (phage, host))
        at = int(random.integers(FLANK_NT, len(host) - FLANK_NT))
        return Contig(name, host[:at] + phage + host[at:], phage=(at, at + len(phage)))


def read(data: Path, patterns: Iterable[str]) -> list[Record]:
    """Return the records of all files, an id once."""
    records = (r for pattern in patterns for path in sorted(data.glob(pattern)) for r in read_records(path))
    return list({r.accession: r for r in records}.values())


def ids_of(path: Path) -> set[str]:
    return set(path.read_text().split())


def held_out_by(folder: Path) -> set[str]:
    """Return the ids that did not train the classifier, by its card."""
    accessions = json.loads((folder / CARD_NAME).read_text())["split"]["accessions"]
    bare = {part: {name.partition("#")[0] for name in names} for part, names in accessions.items()}
    return (bare["test"] | bare["validation"]) - bare["train"]


def matching_blocks(letters: str, of_phages: np.ndarray) -> np.ndarray:
    """Return the starts of blocks of which ``MATCHING_SHARE`` of the sketched 21-mers are in *of_phages*, int64."""
    starts = np.arange(0, len(letters) - BLOCK_NT + 1, BLOCK_NT)
    shared = np.intersect1d(sketch(letters), of_phages, assume_unique=True)
    shares = [np.isin(sketch(letters[at : at + BLOCK_NT]), shared) for at in starts.tolist()]
    return starts[[bool(len(one)) and one.mean() >= MATCHING_SHARE for one in shares]]


def scored(contig: Contig, model: ContigModel, chunk_nt: int) -> Scored:
    """Score each chunk with its two neighbours, as ``contig_scores`` does."""
    starts, ends = chunk_bounds(len(contig.letters), chunk_nt)
    codes = masked(contig.letters.encode())
    last = len(starts) - 1
    windows = [codes[starts[max(c - 1, 0)] : ends[min(c + 1, last)]] for c in range(len(starts))]
    features_CS = model.features.of_many(windows)
    none = np.empty((len(starts), 0), dtype=np.float32)
    counts = np.ones(len(starts), dtype=np.int64)
    return Scored(contig, starts, ends, model.probabilities(features_CS, none, none, counts, counts))


def runs_from_threshold(starts, ends, p_virus, threshold) -> list[ViralRegion]:
    """Return the regions of the rule before: runs of at least three windows, bridging at most two others."""
    viral = np.flatnonzero(p_virus >= threshold)
    runs = np.split(viral, np.flatnonzero(np.diff(viral) > 3) + 1)
    return [ViralRegion(int(starts[r[0]]), int(ends[r[-1]]), 0.0) for r in runs if len(r) >= 3]


def covered_nt(start: int, end: int, regions: list[ViralRegion]) -> int:
    return sum(max(0, min(end, r.end) - max(start, r.start)) for r in regions)


def agree(phage: tuple[int, int], region: ViralRegion) -> bool:
    """Whether both share at least half of either."""
    shared = covered_nt(*phage, [region])
    return shared >= MIN_OVERLAP * (phage[1] - phage[0]) and shared >= MIN_OVERLAP * (region.end - region.start)


def measures(prophages, clean, rule, threshold) -> dict[str, object]:
    """Return the figures of one rule on one half."""
    phage_nt = found_nt = region_nt = regions = found = split = 0
    errors: list[int] = []
    for one in prophages:
        of_contig = rule(one.starts, one.ends, one.p_virus, threshold)
        phage = one.contig.phage
        phage_nt += phage[1] - phage[0]
        found_nt += covered_nt(*phage, of_contig)
        region_nt += sum(r.end - r.start for r in of_contig)
        regions += len(of_contig)
        split += sum(covered_nt(*phage, [r]) > 0 for r in of_contig) > 1
        right = [r for r in of_contig if agree(phage, r)]
        found += bool(right)
        errors += [abs(a - b) for r in right for a, b in zip((r.start, r.end), phage, strict=True)]
    false = [r for one in clean for r in rule(one.starts, one.ends, one.p_virus, threshold)]
    false_nt, clean_nt = sum(r.end - r.start for r in false), sum(len(one.contig.letters) for one in clean)
    return {
        "prophages": len(prophages),
        "recall_nt": round(found_nt / phage_nt, 3),
        "precision_nt": round(found_nt / max(region_nt, 1), 3),
        "recall_regions": round(found / len(prophages), 3),
        "precision_regions": round(found / max(regions, 1), 3),
        "prophages_in_several_regions": split,
        "boundary_error_nt": [int(x) for x in np.percentile(errors, (25, 50, 75))] if errors else None,
        "bacteria_mb": round(clean_nt / 1e6, 2),
        "false_regions_per_mb": round(len(false) / clean_nt * 1e6, 2),
        "false_nt_share": round(false_nt / clean_nt, 4),
        "f1_nt": round(2 * found_nt / (phage_nt + region_nt + false_nt), 3),
        "f1_regions": round(2 * found / (len(prophages) + regions + len(false)), 3),
    }


def share_of_matching(known, rule, threshold) -> float:
    """Return the share of the matching blocks' nucleotides that lie in regions."""
    covered = blocks = 0
    for one in known:
        regions = rule(one.starts, one.ends, one.p_virus, threshold)
        covered += sum(covered_nt(at, at + BLOCK_NT, regions) for at in one.contig.blocks.tolist())
        blocks += len(one.contig.blocks)
    return round(covered / max(blocks * BLOCK_NT, 1), 3)


def choose(prophages, clean, threshold) -> list[dict[str, float]]:
    """Return the mean of both F1, of regions and of nucleotides, for each pair of constants, best first."""
    rows = []
    kept = viral_regions.MOST_LOG_ODDS, viral_regions.SWITCH_COST
    for most, cost in product(MOST_LOG_ODDS, SWITCH_COSTS):
        viral_regions.MOST_LOG_ODDS, viral_regions.SWITCH_COST = most, cost
        found = measures(prophages, clean, find_regions, threshold)
        mean = round((found["f1_nt"] + found["f1_regions"]) / 2, 4)
        rows.append({"most_log_odds": most, "switch_cost": cost, "mean_f1": mean})
    viral_regions.MOST_LOG_ODDS, viral_regions.SWITCH_COST = kept
    return sorted(rows, key=lambda row: -row["mean_f1"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--classifier", default=DEFAULT_CLASSIFIER)
    parser.add_argument("--held-out", type=Path, help="ids of genomes that did not train, if not the card's")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = locate_classifier(options.classifier)
    card = read_card(folder)
    model = load_contig_model(folder, card)
    if model.uses_embeddings:
        parser.error(f"{card.name} scores with embeddings of frames; this benchmark takes one that does not")
    held_out = ids_of(options.held_out) if options.held_out else held_out_by(folder)
    genomes = Genomes.of(options.data, held_out)
    print(json.dumps(genomes.described()))
    random = np.random.default_rng(SEED)
    sets = []
    for half in (genomes.half(0), genomes.half(1)):
        sizes = np.resize(SIZES_NT, options.number // 2).tolist()
        prophages = [half.prophage(random, f"prophage {n}", nt) for n, nt in enumerate(sizes)]
        sets.append([[scored(c, model, card.chunk_nt) for c in some] for some in (prophages, half.clean)])
    known = [scored(c, model, card.chunk_nt) for c in genomes.known]
    grid = choose(*sets[0], NEUTRAL_P) if options.choose else []
    for row in grid:
        print(json.dumps(row))
    rules = {"before": (runs_from_threshold, card.threshold), "now": (find_regions, NEUTRAL_P)}
    report = {
        half: {name: measures(*some, *rule) for name, rule in rules.items()}
        for half, some in zip(("half that chose", "half that reports"), sets, strict=True)
    }
    for nt in SIZES_NT:
        of_size = [one for some, _ in sets[-1:] for one in some if one.contig.phage[1] - one.contig.phage[0] == nt]
        report[f"half that reports, {nt:,} nt: share of nucleotides in regions"] = {
            name: measures(of_size, sets[-1][1], *rule)["recall_nt"] for name, rule in rules.items()
        }
    report["known: share of matching blocks in regions"] = {
        name: share_of_matching(known, *rule) for name, rule in rules.items()
    }
    print(json.dumps(report, indent=2))
    if options.write:
        whole = {
            "machine": machine("virnucpro", "numpy"),
            "classifier": {"name": card.name, "contig_model_sha256": card.contig_model.weights_sha256},
            "held out by": str(options.held_out or "its card"),
            "threshold": card.threshold,
            "constants": {"switch_cost": viral_regions.SWITCH_COST, "most_log_odds": viral_regions.MOST_LOG_ODDS},
            "best of the grid": grid[:5],
            "genomes": genomes.described(),
            **report,
        }
        print(write_result("regions", whole))


if __name__ == "__main__":
    main()
