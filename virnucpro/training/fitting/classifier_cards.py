"""The descriptive part of a classifier's card: data, split, training, limits."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from virnucpro.training.evaluation.strata import FEW_CONTIGS
from virnucpro.training.fitting.training_fragments import MOST_AMBIGUOUS
from virnucpro.training.genomes.artificial_genomes import GROUP as ARTIFICIAL
from virnucpro.training.genomes.genome_split import SPLITS, TEST, TRAIN, training_data_of
from virnucpro.training.genomes.labelled_genomes import NAMES
from virnucpro.training.genomes.related import KMER_LIMIT
from virnucpro.training.training_settings import ERROR_SHARE, MEASURED_COVERAGE, TRAINING_COVERAGE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virnucpro.training.fitting.training_fragments import TrainingFragment
    from virnucpro.training.genomes.genome_split import SplitGenomes
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome
    from virnucpro.training.training_run import TrainingRun

LINK_RULE = (
    "Two records are linked if they belong to the same genome (by the table, or by the header: an assembly after the "
    "id, or the id without its range) or to the same organism (by the header, without its strain), or if one has "
    f"{KMER_LIMIT:.0%} or more of the other's 21-mers of either strand (one in twenty is used, by hash). Links of "
    "links count."
)
SPLIT_RULE = (
    "{links} Whole clusters of linked records go to one part: in a random order, each if it still fits, up to "
    "{share:.0%} of each group's nucleotides to test and as much to validation. A group of three clusters or more has "
    "at least one in each part; a cluster that belongs to several groups trains, and so does one that the DNA encoder "
    "has seen a record or organism of, as far as its card says. Training learns from the training "
    "part alone; validation stops it, calibrates it and sets the threshold; test only measures."
)
FRAGMENTS_RULE = (
    "Fragments are cut at random places, as many viral ones as others. A label's fragments come from its groups by "
    "weight (the root of a group's nucleotides, unless it was given), a group's from its genomes by the root of their "
    "size. Lengths are drawn from {lengths} nt ({weights} to one another); a shorter record gives itself as a whole. "
    f"A genome's letters are used at most {TRAINING_COVERAGE:g} times for training and {MEASURED_COVERAGE:g} times "
    "in the other parts. Augmentation: half of the fragments are reverse complements. "
    f"Fragments with more than {MOST_AMBIGUOUS:.0%} ambiguous letters are dropped; {ERROR_SHARE:.0%} of all get errors "
    f"of sequencing. The group {ARTIFICIAL!r} is made with the seed: random sequences, and shuffled genomes of either "
    "label. Low complexity is masked."
)
FRAMES_RULE = (
    "A fragment is cut into chunks, and its open frames are embedded, as a prediction does it. The frame classifier "
    "learns from every open frame of chunks without ambiguous letters; of records with annotated proteins, only from "
    "frames whose protein is part of one."
)
SHUFFLED = (
    "THE LABELS WERE SHUFFLED: whole clusters of genomes got either label by turns, so that nothing can be learnt. "
    "This is a check that the evaluation does not leak (AUROC near 0.5), and no classifier to be used."
)

PURPOSE = "A classifier that tells viral contigs from others, on the two encoders named below."


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained classifier and everything that its card reports."""

    run: TrainingRun
    split: SplitGenomes
    fragments: Sequence[TrainingFragment]
    outcome: dict[str, Any]
    evaluation: dict[str, Any]


def worth_of(trained: Trained) -> str:
    """Return the sentence that is printed with a classifier's calls."""
    name, evaluation = trained.run.config.asked.name, trained.evaluation
    overall = evaluation["overall"]
    shortest = next(iter(evaluation["by_length"].items()), None)
    short = ""
    if shortest and min(shortest[1]["viral"], shortest[1]["others"]) >= FEW_CONTIGS:
        short = f" ({shortest[0]}: {shortest[1]['auroc']['value']:.2f})"
    warning = "its labels were shuffled, it knows nothing: " if trained.run.config.asked.shuffle_labels else ""
    num_organisms = len({name for names in organisms_of(trained.split, TEST).values() for name in names})
    auroc = f"AUROC {overall['auroc']['value']:.2f} on {overall['contigs']:,} fragments of {num_organisms:,} organisms"
    left_out = _worth_left_out(trained.outcome["groups_left_out"])
    return f"{name}: {warning}{auroc} that did not train it{short}; {left_out}"


def _worth_left_out(left_out: Mapping[str, Mapping[str, Any]]) -> str:
    if not left_out:
        return "groups left out of training were not measured"
    auroc = {group: float(row["auroc"]) for group, row in left_out.items()}
    worst = min(auroc, key=lambda group: auroc[group])
    mean = sum(auroc.values()) / len(auroc)
    return f"{mean:.2f} on groups left out of training (mean; {worst}: {auroc[worst]:.2f})"


def organisms_of(split: SplitGenomes, part: str) -> dict[str, list[str]]:
    """Return the organisms of each group in a part; for records without one, their genomes."""
    names: dict[str, set[str]] = {}
    for genome in split.of_part(part):
        names.setdefault(genome.group, set()).add(genome.organism or genome.source)
    return {group: sorted(names[group]) for group in sorted(names)}


def limits_of(trained: Trained) -> list[str]:
    """Return the limits of the figures, a sentence each."""
    split, config = trained.split, trained.run.config
    tested = organisms_of(split, TEST)
    limits = []
    if unmeasured := sorted({genome.group for genome in split.genomes} - set(tested)):
        limits.append(f"nothing is measured on {', '.join(unmeasured)}, which only train")
    records = split.of_part(TEST)
    for model in (config.dna, config.protein):
        seen = training_data_of(model)
        if seen is None:
            limits.append(f"the training data of {model.model_name} are not known here: it may have seen the test part")
        else:
            seen_of = f"{sum(map(seen.has, records)):,} of the {len(records):,} test records or their organisms"
            limits.append(f"{model.model_name} was trained on {seen_of}")
    return [*limits, "kinds of genomes that are not in the test part may do much worse"]


def card_values(trained: Trained, *, threshold_rule: str) -> dict[str, Any]:
    """Return the part of ``card.json`` that readers need and programs do not."""
    run, split, config = trained.run, trained.split, trained.run.config
    keep = ("overall", "by_length", "by_group", "calibration", "notes", "bootstrap_samples", "seed")
    return {
        "purpose": SHUFFLED if config.asked.shuffle_labels else PURPOSE,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("virnucpro", "torch", "numpy", "scipy", "safetensors")},
        },
        "data": {
            "note": config.asked.data_note,
            "files": _files(trained),
            "other_files": [
                {"file": Path(one["path"]).name, "sha256": one["sha256"]}
                for one in run.manifest.inputs[len(run.files) :]
            ],
            "notes": [*run.labelled.notes, *split.notes],
            "link_rule": LINK_RULE,
            "left_out": split.left_out,
        },
        "split": {
            "rule": SPLIT_RULE.format(links=LINK_RULE, share=config.asked.held_out_share),
            "seed": config.asked.seed,
            "clusters": len(set(split.clusters)),
            "largest_share": split.largest_share,
            "groups": _groups(trained),
            "organisms": {part: organisms_of(split, part) for part in SPLITS},
            "accessions": {part: [genome.accession for genome in split.of_part(part)] for part in SPLITS},
        },
        "fragments_rule": FRAGMENTS_RULE.format(
            lengths=", ".join(f"{length:,}" for length in sorted(config.lengths_nt)),
            weights=", ".join(f"{weight:g}" for _, weight in sorted(config.lengths_nt.items())),
        ),
        "frames_rule": FRAMES_RULE,
        "training": {
            "settings": run.manifest.settings,
            "fragments": {part: sum(fragment.part == part for fragment in trained.fragments) for part in SPLITS},
            "nucleotides": sum(len(fragment.letters) for fragment in trained.fragments if fragment.part == TRAIN),
            **trained.outcome,
            "threshold_rule": threshold_rule,
            "seconds": {name: stage.seconds for name, stage in run.manifest.stages.items()},
            "embedded_on": sorted(set(run.manifest.devices)),
            "hardware": hardware(torch.device("cpu"), 1),
            "command": config.asked.command,
            "repeatable": "The same command gives the same weights on the same kind of CPU, whatever --workers is.",
        },
        "evaluation": {
            **{name: trained.evaluation[name] for name in keep},
            "limits": limits_of(trained),
            "other_chunks": {
                chunk_nt: {name: measured[name] for name in ("overall", "by_length")}
                for chunk_nt, measured in trained.evaluation["other_chunks"].items()
            },
        },
    }


def _files(trained: Trained) -> list[dict[str, Any]]:
    run, rows = trained.run, []
    for path, about in zip(run.files, run.manifest.inputs, strict=False):
        mine = [genome for genome in trained.split.genomes if genome.file == str(path)]
        rows.append(
            {
                "file": path.name,
                "sha256": about["sha256"],
                "groups": sorted({genome.group for genome in mine}),
                "records": len(mine),
                "nucleotides": _num_nt(mine),
            }
        )
    return rows


def _groups(trained: Trained) -> dict[str, dict[str, Any]]:
    split = trained.split
    fragments = Counter((fragment.group, fragment.part) for fragment in trained.fragments)
    described = {}
    for group in sorted({genome.group for genome in split.genomes}):
        labels = {genome.is_virus for genome in split.genomes if genome.group == group}
        described[group] = {
            "label": " and ".join(NAMES[label] for label in sorted(labels, reverse=True)),
            **{part: _in_part(split, group, part) | {"fragments": fragments[group, part]} for part in SPLITS},
        }
    return described


def _in_part(split: SplitGenomes, group: str, part: str) -> dict[str, int]:
    rows = zip(split.genomes, split.parts, split.clusters, strict=True)
    mine = [(genome, number) for genome, its_part, number in rows if genome.group == group and its_part == part]
    genomes = [genome for genome, _ in mine]
    return {
        "clusters": len({number for _, number in mine}),
        "records": len(genomes),
        "nucleotides": _num_nt(genomes),
    }


def _num_nt(genomes: Sequence[LabelledGenome]) -> int:
    return sum(len(genome.letters) for genome in genomes)


def hardware(device: torch.device, threads: int) -> str:
    """Return a description of the device that the training ran on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpu_info.read_text().splitlines() if "model name" in line]
    name, instructions = names[0] if names else platform.machine(), torch.backends.cpu.get_cpu_capability()
    return f"CPU {name} ({instructions}), {threads} threads"
