"""
What each part of the contig model is worth: against gradient boosting, part by part, and on kinds it has not seen.

Takes a training that kept its pieces and embeddings (``virnucpro train --keep-work``), and uses its split: models are
fitted on its training pieces, stopped by validation, and measured on its test pieces. With ``--contigs`` the parts are
measured on these contigs, too; the result counts each such evaluation.

- **gradient boosting** of scikit-learn (its histogram kind) on 3-mers, 4-mers, codons and open runs, from all pieces.
- **parts**, from ``--pieces``: the same gradient boosting; the networks on the same numbers, on genes, on log-odds of
  k-mers, on DNA embeddings, on protein embeddings, on all but the embeddings, and on all.
- **left out**: without one kind of virus each time, in tables and networks; how its pieces then rank against test's
  other pieces. The data name no families, so tailed phages are parted by the host in their name.
- **learning curve**: a share of the training genomes, by whole clusters.
- **shuffled labels**: clusters of genomes take either label by turns; the score should be 0.5.

    python benchmarks/accuracy.py TRAINING [--contigs FASTA --truth TSV --prediction DIR] [--pieces 9000] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from bench_common import machine, write_result

from virnucpro.calls.frame_rules import probability
from virnucpro.models.classifier_files.card import read_card
from virnucpro.models.contigs.contig_model import load_contig_model, mean_log_odds, network_logits
from virnucpro.models.contigs.nucleotide_codes import encode
from virnucpro.models.contigs.pieces import Pieces
from virnucpro.models.contigs.sequence_features import (
    COMPOSITION_COUNT,
    GENES_COUNT,
    SequenceFeatures,
    composition,
    open_runs,
)
from virnucpro.run_layout import PredictionLayout, RunLayout, TrainingLayout
from virnucpro.store.reader import read_embeddings
from virnucpro.training.classifier_training import read_split
from virnucpro.training.evaluation.metrics import bootstrap, counts_of
from virnucpro.training.evaluation.tables import read_truth
from virnucpro.training.fitting.contig_training import (
    EMBEDDINGS,
    SEQUENCE,
    LabelledRecords,
    TrainingContigs,
    count_kmers,
    features_out_of_fold,
)
from virnucpro.training.fitting.embedded_pieces import read_embedded
from virnucpro.training.fitting.network_fitting import Examples, fit_networks
from virnucpro.training.fitting.pieces import PieceRules, cut_pieces
from virnucpro.training.genomes.genome_split import TEST, TRAIN, VALIDATION, split_labelled
from virnucpro.training.genomes.labelled_genomes import files_of, read_labelled
from virnucpro.training.genomes.records import read_records
from virnucpro.training.training_knobs import LENGTHS_NT
from virnucpro.training.training_settings import MEASURED_COVERAGE, TRAINING_COVERAGE, ContigSettings

BOUNDS_NT = {"up to 500": (0, 500), "800 to 1,000": (501, 1000), "2,000 and more": (1001, 10**9)}
KINDS = {
    "microviruses": lambda genome: genome.group == "microvirus",
    "eukaryotic viruses": lambda genome: genome.group == "eukaryotic_virus",
    "phages of mycobacteria": lambda genome: is_phage_of(genome, ("Mycobacter",)),
    "phages of cyanobacteria": lambda genome: is_phage_of(genome, ("Cyanophage", "Synechococcus", "Prochlorococcus")),
    "other phages": lambda genome: (
        genome.group == "prokaryotic_virus" and not any(KINDS[kind](genome) for kind in HOSTS)
    ),
}
HOSTS = ("phages of mycobacteria", "phages of cyanobacteria")
CURVE = (0.1, 0.25, 0.5, 1.0)
QUICK = ContigSettings(members=1)
SHUFFLES, SHUFFLED_SHARE = range(1, 7), 0.4
UNSHUFFLED = ("organelle", "microvirus", "eukaryotic_virus")
"""Groups with too few clusters for shuffled labels."""
DESCRIPTIONS: dict[str, str] = {}


def is_phage_of(genome, words):
    """Tell by the description of a phage."""
    return genome.group == "prokaryotic_virus" and any(word in DESCRIPTIONS.get(genome.accession, "") for word in words)


@dataclass
class Contigs:
    """Contigs to measure on."""

    records: TrainingContigs
    lengths_nt: np.ndarray

    def measures(self, scores, *, is_probability=True):
        """Return the figures of the report, each with its interval."""
        is_virus = self.records.is_virus_C
        return {
            "all": measured(scores, is_virus, is_probability=is_probability),
            **{
                name: measured(scores[inside], is_virus[inside], is_probability=False)
                for name, (least, most) in BOUNDS_NT.items()
                if (inside := (self.lengths_nt >= least) & (self.lengths_nt <= most)).any()
            },
        }


def measured(scores, is_virus, *, is_probability):
    """Return AUROC, recall at 1 % false positives, and, of probabilities, the calibration error."""

    def of(numbers):
        some, truth = scores[numbers], is_virus[numbers]
        found = {"auroc": counts_of(some, truth).auroc(), "recall_at_1_percent": counts_of(some, truth).strict_recall()}
        return found | ({"calibration_error": counts_of(some, truth).calibration_error()} if is_probability else {})

    intervals = bootstrap(of, is_virus, seed=1, samples=300)
    return {name: [round(float(x), 4) for x in (i.value, i.low, i.high)] for name, i in intervals.items()}


def scores_of(networks, x, is_viral, temperature=1.0):
    """Return P(virus) by networks that were not put into a file."""
    logits = network_logits(x, networks.mean_I, networks.deviation_I, networks.members)
    return probability(mean_log_odds(logits, is_viral) / temperature)


def chosen(embedded, numbers):
    """Return pieces as contigs to train or measure on."""
    pieces = [embedded.pieces[number] for number in numbers.tolist()]
    records = TrainingContigs(
        codes=[encode(piece.letters.encode()) for piece in pieces],
        is_virus_C=embedded.is_virus_C[numbers],
        groups=[piece.group for piece in pieces],
        sources=[piece.source for piece in pieces],
        dna_CD=embedded.dna_CD[numbers],
        protein_CE=embedded.protein_CE[numbers],
        frames_C=embedded.frames_C[numbers],
        chunks_C=embedded.chunks_C[numbers],
        places=[f"{piece.accession}:{piece.start}-{piece.end}" for piece in pieces],
    )
    return Contigs(records, np.array([len(piece.letters) for piece in pieces]))


def genomes_as_records(genomes):
    return LabelledRecords(
        codes=[encode(genome.letters.encode()) for genome in genomes],
        is_virus_C=np.array([genome.is_virus for genome in genomes]),
        groups=[genome.group for genome in genomes],
        sources=[genome.source for genome in genomes],
    )


def pieces_as_records(pieces):
    return Contigs(
        LabelledRecords(
            codes=[encode(piece.letters.encode()) for piece in pieces],
            is_virus_C=np.array([piece.is_virus for piece in pieces]),
            groups=[piece.group for piece in pieces],
            sources=[piece.source for piece in pieces],
        ),
        np.array([len(piece.letters) for piece in pieces]),
    )


def read_contigs(fasta, truth, prediction):
    """Return contigs of known kind, with the embeddings of their prediction run."""
    known = read_truth(truth)
    letters = {record.accession: record.letters for record in read_records(fasta)}
    layout = PredictionLayout(prediction)
    pooled, frames = [], Counter()
    places = {name: number for number, name in enumerate(known.contigs)}
    for folder in (layout.dna_dir, layout.protein_dir):
        rows = read_embeddings(RunLayout(folder).output_dir)
        sums, frames = None, np.zeros(len(known), dtype=np.int64)
        for name in rows:
            row, place = rows[name], places[name.rpartition("_chunk_")[0]]
            sums = np.zeros((len(known), len(row))) if sums is None else sums
            sums[place] += row
            frames[place] += 1
        pooled.append((sums / np.maximum(frames, 1)[:, None]).astype(np.float32))
    lengths = np.array([len(letters[name]) for name in known.contigs])
    records = TrainingContigs(
        codes=[encode(letters[name].encode()) for name in known.contigs],
        is_virus_C=known.is_virus_C,
        groups=known.groups,
        sources=known.contigs,
        dna_CD=pooled[0],
        protein_CE=pooled[1],
        frames_C=frames,
        chunks_C=-(-lengths // 500),
        places=known.contigs,
    )
    return Contigs(records, lengths)


def features_by(counts, is_viral, contigs):
    features = SequenceFeatures(counts.log_odds(), is_viral)
    return features.of_many(contigs.records.codes)


def gradient_boosting(of_training, is_virus, of_sets):
    """Return the scores of scikit-learn's histogram gradient boosting for every set of contigs."""
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415

    boosting = HistGradientBoostingClassifier(max_iter=200, learning_rate=0.08, l2_regularization=1.0, random_state=1)
    boosting.fit(of_training, is_virus)
    return {where: boosting.predict_proba(numbers)[:, 1] for where, numbers in of_sets.items()}


def boosting_on_all(training, sets):
    """Return what gradient boosting reaches with as many training pieces as the classifier."""

    def of(contigs):
        pieces = [Pieces([codes]) for codes in contigs.records.codes]
        return np.concatenate([np.concatenate([composition(p), open_runs(p)], axis=1) for p in pieces])

    scores = gradient_boosting(
        of(training), training.records.is_virus_C, {name: of(some) for name, some in sets.items()}
    )
    return {where: sets[where].measures(found) for where, found in scores.items()}


def parts_of_the_model(split, training, validation, sets):
    """Return what every kind of input reaches on every set of contigs."""
    genomes = genomes_as_records(split.of_part(TRAIN))
    names = genomes.group_names()
    is_viral = np.array([is_virus for is_virus, _ in names])
    groups = training.records.group_numbers(names)
    counts, folds = count_kmers(genomes, groups, names, QUICK)
    of_training = features_out_of_fold(training.records, counts, folds, is_viral)
    of_sets = {
        name: features_by(counts, is_viral, contigs) for name, contigs in {**sets, VALIDATION: validation}.items()
    }
    report = {}

    def note(name, seconds, scores_by_set):
        report[name] = {"fit_cpu_s": round(seconds, 1)} | {
            where: sets[where].measures(scores) for where, scores in scores_by_set.items()
        }
        print(name, {where: report[name][where]["all"]["auroc"] for where in sets}, flush=True)

    start = time.process_time()
    scores = gradient_boosting(
        of_training[:, :COMPOSITION_COUNT],
        training.records.is_virus_C,
        {where: of_sets[where][:, :COMPOSITION_COUNT] for where in sets},
    )
    note("gradient boosting on composition and open runs", time.process_time() - start, scores)
    inputs = {
        "composition and open runs": lambda _, x: x[:, :COMPOSITION_COUNT],
        "genes": lambda _, x: x[:, COMPOSITION_COUNT : COMPOSITION_COUNT + GENES_COUNT],
        "log-odds of k-mers": lambda _, x: x[:, COMPOSITION_COUNT + GENES_COUNT :],
        "DNA embedding": lambda r, _: np.column_stack([r.dna_CD, r.frames_C]),
        "protein embedding": lambda r, _: np.column_stack([r.protein_CE, r.frames_C]),
        "all of the sequence": lambda r, x: r.inputs(x, SEQUENCE),
        "all": lambda r, x: r.inputs(x, EMBEDDINGS),
    }
    for name, take in inputs.items():
        start = time.process_time()
        networks = fit_networks(
            Examples(x_CI=take(training.records, of_training).astype(np.float32), group_C=groups),
            Examples(
                x_CI=take(validation.records, of_sets[VALIDATION]).astype(np.float32),
                group_C=validation.records.group_numbers(names),
            ),
            is_viral,
            QUICK,
        )
        seconds = time.process_time() - start
        scores = {
            where: scores_of(networks, take(sets[where].records, of_sets[where]).astype(np.float32), is_viral)
            for where in sets
        }
        note(name, seconds, scores)
    return report


def fit_on(genomes, validation_genomes, num_pieces, seed=1):
    """Fit networks on pieces of genomes, and return what scores contigs."""
    rules = PieceRules(lengths_nt=LENGTHS_NT, group_weights={}, most_coverage=TRAINING_COVERAGE)
    held_out_rules = replace(rules, most_coverage=MEASURED_COVERAGE)
    training = pieces_as_records(cut_pieces(genomes, num_pieces, rules, part=TRAIN, seed=seed))
    validation = pieces_as_records(
        cut_pieces(validation_genomes, num_pieces // 6, held_out_rules, part=VALIDATION, seed=seed)
    )
    records = genomes_as_records(genomes)
    names = records.group_names()
    is_viral = np.array([is_virus for is_virus, _ in names])
    counts, folds = count_kmers(records, training.records.group_numbers(names), names, QUICK)
    networks = fit_networks(
        Examples(
            x_CI=features_out_of_fold(training.records, counts, folds, is_viral),
            group_C=training.records.group_numbers(names),
        ),
        Examples(x_CI=features_by(counts, is_viral, validation), group_C=validation.records.group_numbers(names)),
        is_viral,
        QUICK,
    )
    return lambda contigs: scores_of(networks, features_by(counts, is_viral, contigs), is_viral)


def left_out_kinds(split, test, num_pieces):
    """Return how pieces of each kind rank when that kind did not train, against test's pieces that are not viral."""
    report = {}
    rules = PieceRules(lengths_nt=LENGTHS_NT, group_weights={}, most_coverage=MEASURED_COVERAGE)
    of_others = [piece for piece in test if not piece.is_virus]
    for kind, is_of_kind in KINDS.items():
        train, validation = ([g for g in split.of_part(part) if not is_of_kind(g)] for part in (TRAIN, VALIDATION))
        unseen = [genome for genome in split.genomes if is_of_kind(genome)]
        others = [genome for genome in split.of_part(TEST) if not genome.is_virus]
        drawn = cut_pieces([*unseen, *others], 2 * len(of_others), rules, part="unseen", seed=1)
        contigs = pieces_as_records([*(piece for piece in drawn if piece.is_virus), *of_others])
        scores = fit_on(train, validation, num_pieces)(contigs)
        report[kind] = {"genomes": len(unseen), "pieces": int(contigs.records.is_virus_C.sum())}
        report[kind] |= contigs.measures(scores, is_probability=False)
        print("without", kind, report[kind]["all"], flush=True)
    return report


def learning_curve(split, test, num_pieces):
    """Return what a share of the training genomes reaches, taken by whole clusters of each group."""
    report = {}
    rows = [
        (genome, number)
        for genome, part, number in zip(split.genomes, split.parts, split.clusters, strict=True)
        if part == TRAIN
    ]
    random = np.random.default_rng(1)
    for share in CURVE:
        kept = set()
        for group in sorted({genome.group for genome, _ in rows}):
            numbers = sorted({number for genome, number in rows if genome.group == group})
            kept |= set(random.permutation(numbers)[: max(2, round(share * len(numbers)))].tolist())
        genomes = [genome for genome, number in rows if number in kept]
        scores = fit_on(genomes, split.of_part(VALIDATION), num_pieces)(test)
        report[f"{share:.0%}"] = {"nucleotides": sum(len(genome.letters) for genome in genomes)} | test.measures(scores)
        print("with", f"{share:.0%}", report[f"{share:.0%}"]["all"], flush=True)
    return report


def shuffled_labels(genomes, num_pieces):
    """Return the AUROC after training on shuffled labels of clusters, for some shuffles."""
    rules = PieceRules(lengths_nt=LENGTHS_NT, group_weights={}, most_coverage=MEASURED_COVERAGE)
    found = []
    for seed in SHUFFLES:
        split = split_labelled(genomes, seed=seed, share=SHUFFLED_SHARE, shuffle_labels=True)
        test = pieces_as_records(cut_pieces(split.of_part(TEST), num_pieces // 3, rules, part=TEST, seed=seed))
        scores = fit_on(split.of_part(TRAIN), split.of_part(VALIDATION), num_pieces, seed=seed)(test)
        found.append(round(test.measures(scores)["all"]["auroc"][0], 4))
        print("shuffled labels", seed, found[-1], flush=True)
    mean = round(float(np.mean(found)), 4)
    return {"held_out_share": SHUFFLED_SHARE, "seeds": list(SHUFFLES), "auroc": found, "mean": mean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", type=Path, help="folder of a training with --keep-work")
    parser.add_argument("--genomes", type=Path, nargs="+", required=True, help="what it was trained on")
    parser.add_argument("--contigs", type=Path)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--prediction", type=Path, help="folder of a prediction of these contigs")
    parser.add_argument("--pieces", type=int, default=9000, help="training pieces of every row")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    card, layout = read_card(options.training), TrainingLayout(options.training)
    files = files_of(options.genomes)
    genomes = read_labelled(files, None).genomes
    DESCRIPTIONS.update({r.accession: r.description for path in files for r in read_records(path)})
    embedded = read_embedded(layout, card.chunk_nt, None)
    split = read_split(SimpleNamespace(labelled=SimpleNamespace(genomes=genomes), layout=layout))
    numbers = {part: np.flatnonzero(embedded.of_part(part)) for part in (TRAIN, VALIDATION, TEST)}
    training, validation, test = (
        chosen(embedded, numbers[part][: options.pieces]) for part in (TRAIN, VALIDATION, TEST)
    )
    sets = {"test": test}
    if options.contigs:
        sets["contigs"] = read_contigs(options.contigs, options.truth, options.prediction)
    report = {
        "machine": machine("numpy", "torch", "scikit-learn"),
        "pieces": {part: len(number) for part, number in numbers.items()} | {"of every row": options.pieces},
        "contigs": str(options.contigs.name) if options.contigs else None,
    }
    report["shuffled labels"] = shuffled_labels([g for g in genomes if g.group not in UNSHUFFLED], options.pieces)
    print("shuffled labels", report["shuffled labels"])
    model = load_contig_model(options.training, card)
    report["the classifier itself"] = {}
    for where, contigs in sets.items():
        records = contigs.records
        rows = np.stack([model.features.of(codes) for codes in records.codes])
        scores = model.probabilities(rows, records.dna_CD, records.protein_CE, records.frames_C, records.chunks_C)
        report["the classifier itself"][where] = contigs.measures(scores.astype(np.float64))
        print("the classifier itself", where, report["the classifier itself"][where], flush=True)
    report["gradient boosting on all pieces"] = boosting_on_all(chosen(embedded, numbers[TRAIN]), sets)
    report["parts"] = parts_of_the_model(split, training, validation, sets)
    test_pieces = [embedded.pieces[number] for number in numbers[TEST].tolist()]
    report["left out"] = left_out_kinds(split, test_pieces, options.pieces)
    report["learning curve"] = learning_curve(split, test, options.pieces)
    if options.write:
        print(write_result("accuracy", report))


if __name__ == "__main__":
    main()
