"""
What the tiny encoders add to the contig score: frozen, and fine-tuned end to end.

Takes a training that kept its pieces and embeddings (``virnucpro train --keep-work``), and uses its split:

- **pretraining**: the protein encoder goes on predicting masked residues, on genes of training pieces and UniProt.
- **fine-tuning**: either encoder, with a linear layer on the mean over its tokens, learns groups of training pieces:
  the protein encoder by likely genes, the DNA encoder by chunks, half of them reverse complements. Pieces that are not
  viral and score high by letters are drawn more often. Validation's further pieces choose among four states.
- **frozen**: a logistic regression on the means of the embeddings, on the embedded training pieces.
- **join**: a logistic regression of the letters' log-odds, the logarithm of the length and the encoders' mean log-odds,
  fitted on validation's embedded pieces; the same with the complete score, letters and similarity, in place of letters.

Measured on contigs of known kind, and on the test part. ``--prediction`` is what ``virnucpro predict FASTA --cascade
off -o DIR`` gave: the frozen means of these contigs. The scores by letters are those of ``--classifier``, by default
the bundled one, which must be of the same split. Legend: B units of a batch, L tokens, T tokens of a batch, D width, G
groups, C contigs, J inputs.

    python benchmarks/fine_tuned_encoders.py TRAINING --contigs FASTA --truth TSV --prediction DIR --proteins FASTA
        [--pretraining-minutes 10] [--minutes 13] [--pieces 30000] [--measured N] [--keep DIR] [--write]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accuracy import chosen, pieces_as_records, read_contigs
from bench_common import machine, write_result
from esm.model.esm2 import ESM2
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.encoders.evaluation import held_out_loss
from tools.encoders.masked_dna import load_masked_bert
from tools.encoders.masked_residues import ResidueObjective, hidden_states
from tools.encoders.training import TrainingSettings, learning_rate_share, train_encoder
from virnucpro.models.classifier_files.card import read_card
from virnucpro.models.contigs.contig_model import load_contig_model, viral_log_odds
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import RESIDUES, reverse_complement
from virnucpro.models.contigs.pieces import Pieces
from virnucpro.models.encoders.dnabert_checkpoint import DnaTokenizer
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, locate_weights
from virnucpro.run_layout import TrainingLayout
from virnucpro.training.evaluation.metrics import bootstrap, counts_of
from virnucpro.training.fitting.embedded_pieces import read_embedded
from virnucpro.training.fitting.pieces import read_pieces
from virnucpro.training.fitting.similarity_fitting import fit_regression
from virnucpro.training.genomes.genome_split import TEST, TRAIN, VALIDATION
from virnucpro.training.genomes.records import read_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.contig_model import ContigModel
    from virnucpro.training.fitting.contig_training import LabelledRecords, TrainingContigs

SEED = 1
LENGTHS = {"up to 500": (0, 500), "501 to 1,000": (501, 1000), "1,001 to 4,999": (1001, 4999), "5,000+": (5000, 10**9)}
LEAST_OF_GROUP = 20
HARD_SHARE, HARD_WEIGHT = 0.2, 3.0
"""Of the pieces that are not viral: those with the highest scores by letters, and how often they are drawn."""
ROUND, BATCH_TOKENS, STEP_TOKENS = 500, 4096, 8
WINDOW_RESIDUES, CHUNK_NT = 254, 500
CHECKS, CHECKED_PIECES, HELD_OUT_GENES = (0.4, 0.6, 0.8, 1.0), 500, 1000
LEARNING_RATE, WEIGHT_DECAY, WARM_UP_SHARE = 1e-3, 0.01, 0.03
BASES = ("letters", "complete score", None)
LETTERS = np.frombuffer(b"ACGTN", np.uint8)
JOINED: tuple[list[str], ...] = ([], ["frozen"], ["DNA"], ["protein"], ["DNA", "protein"])


class GeneEncoder(nn.Module):
    """The protein encoder with a layer for the groups; its units are likely genes, long ones in parts."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.model = bundled_protein_encoder()
        self.head = nn.Linear(self.model.embed_dim, num_groups)
        alphabet = ProteinTokenizer().alphabet
        self.ends = (alphabet.cls_idx, alphabet.eos_idx)
        self.ids = np.array([alphabet.get_idx(chr(letter)) for letter in RESIDUES] + [alphabet.get_idx("X")])

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        logits_BG: torch.Tensor = self.head(hidden_states(self.model, tokens_BL).mean(dim=1))
        return logits_BG

    def units(self, contigs: LabelledRecords, random: np.random.Generator | None) -> Iterator[tuple[int, IntArray]]:
        """Yield contig and tokens of each unit."""
        del random  # genes have one direction
        for at in range(0, len(contigs.codes), 64):
            genes = Genes.of(Pieces(contigs.codes[at : at + 64]))
            residues = np.split(self.ids[genes.residues()], np.cumsum(genes.lengths_N)[:-1])
            for number, gene in zip(genes.groups.piece_X.tolist(), residues, strict=False):
                for part in np.array_split(gene, -(-len(gene) // WINDOW_RESIDUES)):
                    yield at + number, part


class ChunkEncoder(nn.Module):
    """The DNA encoder with a layer for the groups; its units are chunks."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.model = load_masked_bert(locate_weights("virnucpro-tiny-dna")).bert
        self.head = nn.Linear(self.model.hidden_dim, num_groups)
        self.tokenizer = DnaTokenizer()
        self.ends = (self.tokenizer.cls_id, self.tokenizer.sep_id)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        windows, length = tokens_BL.shape
        starts = torch.arange(windows + 1, dtype=torch.int32) * length
        with sdpa_kernel(SDPBackend.MATH):  # as in ``DnaObjective.loss``
            x_TD = self.model.last_states(tokens_BL.flatten(), starts, [length] * windows)
        logits_BG: torch.Tensor = self.head(x_TD.view(windows, length, -1).mean(dim=1))
        return logits_BG

    def units(self, contigs: LabelledRecords, random: np.random.Generator | None) -> Iterator[tuple[int, IntArray]]:
        """Yield contig and tokens of each unit; of a random strand, or of both strands without *random*."""
        for number, codes_L in enumerate(contigs.codes):
            for chunk in np.array_split(codes_L, -(-len(codes_L) // CHUNK_NT)):
                strands = [chunk, reverse_complement(chunk)]
                for strand in strands if random is None else [strands[int(random.integers(2))]]:
                    yield number, self.tokenizer.encode([LETTERS[strand].tobytes().decode()])[0][1:-1]


Encoder = GeneEncoder | ChunkEncoder


def bundled_protein_encoder() -> ESM2:
    model = ESM2(5, 128, 4)
    model.load_state_dict(load_file(locate_weights("virnucpro-tiny-protein")))
    return model


class ContinuedPretraining(ResidueObjective):
    """Masked residues, from the bundled weights on."""

    def new_encoder(self, settings: TrainingSettings) -> ESM2:
        del settings
        return bundled_protein_encoder()


def batches(
    encoder: Encoder, contigs: LabelledRecords, random: np.random.Generator | None
) -> Iterator[tuple[torch.Tensor, IntArray, float]]:
    """Yield tokens of units of one length, to which they are cut; their contigs; and how full the batch is."""
    by_length: dict[int, list[tuple[int, IntArray]]] = {}
    for contig, tokens in encoder.units(contigs, random):
        by_length.setdefault(len(tokens) // STEP_TOKENS * STEP_TOKENS, []).append((contig, tokens))
    found = []
    for length, units in by_length.items():
        size = max(BATCH_TOKENS // (length + 2), 1)
        order = range(len(units)) if random is None else random.permutation(len(units)).tolist()
        found += [[units[number] for number in order[at : at + size]] for at in range(0, len(units), size)]
    for at in range(len(found)) if random is None else random.permutation(len(found)).tolist():
        length = min(len(tokens) for _, tokens in found[at]) // STEP_TOKENS * STEP_TOKENS
        tokens_BL = np.empty((len(found[at]), length + 2), dtype=np.int64)
        tokens_BL[:, 0], tokens_BL[:, -1] = encoder.ends
        tokens_BL[:, 1:-1] = [tokens[:length] for _, tokens in found[at]]
        yield torch.from_numpy(tokens_BL), np.array([contig for contig, _ in found[at]]), tokens_BL.size / BATCH_TOKENS


def mean_log_odds(encoder: Encoder, contigs: LabelledRecords, is_viral_G: BoolArray) -> DoubleArray:
    """Return the mean log-odds of each contig's units by their tokens, 0 without any, float64 (C,)."""
    sums_C, tokens_C = np.zeros((2, len(contigs.codes)))
    encoder.eval()
    for tokens_BL, contig_B, _ in batches(encoder, contigs, None):
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            logits_BG = encoder(tokens_BL).double().numpy()
        np.add.at(sums_C, contig_B, tokens_BL.shape[1] * viral_log_odds(logits_BG, is_viral_G))
        np.add.at(tokens_C, contig_B, tokens_BL.shape[1])
    return np.asarray(sums_C / np.maximum(tokens_C, 1))


def fine_tune(
    encoder: Encoder, training: LabelledRecords, draw_C: DoubleArray, checked: LabelledRecords, minutes: float
) -> dict[str, Any]:
    """Train all of an encoder on the groups; keep the state that ranks *checked* best."""
    is_viral_G = np.array([is_virus for is_virus, _ in training.group_names()])
    group_C = training.group_numbers(training.group_names())
    random = np.random.default_rng(SEED)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    aurocs: dict[float, float] = {}
    best: dict[str, torch.Tensor] = {}
    share, steps, seen, trained_s, cpu_s = 0.0, 0, 0, 0.0, time.process_time()
    while share < 1:
        started = time.monotonic()
        numbers = random.choice(len(draw_C), ROUND, p=draw_C)
        encoder.train()
        for tokens_BL, contig_B, full in batches(encoder, training.take(numbers.tolist()), random):
            share = min((trained_s + time.monotonic() - started) / (60 * minutes), 1)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * learning_rate_share(share, WARM_UP_SHARE)
            with torch.autocast("cpu", torch.bfloat16):
                logits_BG = encoder(tokens_BL)
            loss = functional.cross_entropy(logits_BG.float(), torch.from_numpy(group_C[numbers[contig_B]]))
            optimizer.zero_grad()
            (loss * full).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            steps, seen = steps + 1, seen + tokens_BL.numel()
            if share == 1:
                break
        trained_s += time.monotonic() - started
        due = [check for check in CHECKS if check <= share and check not in aurocs]
        if due:
            found = counts_of(mean_log_odds(encoder, checked, is_viral_G), checked.is_virus_C).auroc()
            if found > max(aurocs.values(), default=0.0):
                best = {name: value.clone() for name, value in encoder.state_dict().items()}
            aurocs |= dict.fromkeys(due, found)
            print(f"{share:.0%}, {steps} steps, {seen} tokens: {float(loss.detach()):.3f} nats, AUROC {found:.4f}")
    encoder.load_state_dict(best)
    return {
        "training_s": round(trained_s, 1),
        "cpu_s_with_checks": round(time.process_time() - cpu_s, 1),
        "steps": steps,
        "tokens": seen,
        "auroc_at_checks": {f"{check:.0%}": round(found, 4) for check, found in aurocs.items()},
    }


def pretrain(
    encoder: GeneEncoder, training: LabelledRecords, held_out: LabelledRecords, proteins: Path, minutes: float
) -> dict[str, Any]:
    """Go on training the bundled protein encoder; tell the loss on genes of *held_out* before and after."""
    tokenizer, defaults = ProteinTokenizer(), TrainingSettings()
    genes, unseen = ([tokens for _, tokens in encoder.units(contigs, None)] for contigs in (training, held_out))
    others = [tokenizer.encode([record.letters])[0][1:-1] for record in read_records(proteins)]
    settings = replace(
        defaults,
        steps=10**6,
        limit_minutes=minutes,
        threads=1,
        matrix_learning_rate=defaults.matrix_learning_rate / 2,
        learning_rate=defaults.learning_rate / 2,
    )
    cpu_s = time.process_time()
    model, state = train_encoder([*genes, *others], settings, ContinuedPretraining(), device=torch.device("cpu"))
    cpu_s = time.process_time() - cpu_s
    losses = [
        held_out_loss(one.eval(), tokenizer, held_out=unseen[:HELD_OUT_GENES], training=genes)
        for one in (encoder.model, model)
    ]
    encoder.model.load_state_dict(model.state_dict())
    return {
        "residues_of_genes": sum(map(len, genes)),
        "residues_of_uniprot": sum(map(len, others)),
        "training_s": round(state.elapsed_s, 1),
        "cpu_s": round(cpu_s, 1),
        "steps": state.step,
        "tokens": state.tokens_seen,
        "nats_a_residue_of_validation_genes": {
            when: round(loss.encoder, 4) for when, loss in zip(("before", "after"), losses, strict=True)
        },
        "of_unigrams": round(losses[0].unigram, 4),
    }


def train_encoders(
    pool: LabelledRecords, model: ContigModel, checked: LabelledRecords, options: argparse.Namespace
) -> tuple[dict[str, Encoder], dict[str, Any]]:
    """Return both fine-tuned encoders, and how their trainings went; those in ``--keep`` are taken from there."""
    others = np.flatnonzero(~pool.is_virus_C)
    of_others = by_letters(model, pool.take(others.tolist()))
    draw_C = np.ones(len(pool.codes))
    draw_C[others[of_others >= np.quantile(of_others, 1 - HARD_SHARE)]] = HARD_WEIGHT
    for label in (True, False):
        draw_C[pool.is_virus_C == label] /= 2 * draw_C[pool.is_virus_C == label].sum()
    num_groups = len(pool.group_names())
    protein, dna = GeneEncoder(num_groups), ChunkEncoder(num_groups)
    trainings: dict[str, tuple[nn.Module, Callable[[], dict[str, Any]]]] = {
        "pretrained": (
            protein.model,
            lambda: pretrain(protein, pool, checked, options.proteins, options.pretraining_minutes),
        ),
        "protein": (protein, lambda: fine_tune(protein, pool, draw_C, checked, options.minutes)),
        "DNA": (dna, lambda: fine_tune(dna, pool, draw_C, checked, options.minutes)),
    }
    reports: dict[str, Any] = {}
    for name, (encoder, train) in trainings.items():
        path = options.keep and options.keep / f"{name}.pt"
        if path and path.exists():
            saved = torch.load(path, weights_only=True)
            encoder.load_state_dict(saved["state"])
            reports[name] = saved["report"]
        else:
            reports[name] = train()
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save({"state": encoder.state_dict(), "report": reports[name]}, path)
        print(name, reports[name], flush=True)
    return {"DNA": dna, "protein": protein}, reports


def by_letters(model: ContigModel, contigs: LabelledRecords) -> FloatArray:
    """Return P(virus) without similarity, float32 (C,)."""
    scores, none = [], np.zeros((0, 0), dtype=np.float32)
    for at in range(0, len(contigs.codes), 512):
        rows = model.features.of_many(contigs.codes[at : at + 512])
        zeros = np.zeros(len(rows), dtype=np.int64)
        scores.append(model.probabilities(rows, none, none, zeros, zeros))
    return np.concatenate(scores)


def lengths_nt(contigs: LabelledRecords) -> IntArray:
    return np.array([len(codes_L) for codes_L in contigs.codes])


def log_odds(scores_C: FloatArray) -> DoubleArray:
    of_score = np.clip(scores_C.astype(np.float64), 1e-7, 1 - 1e-7)
    return np.asarray(np.log(of_score / (1 - of_score)))


def with_one(*columns: DoubleArray) -> DoubleArray:
    return np.column_stack([*columns, np.ones(len(columns[0]))])


def measured(scores_C: DoubleArray, base_C: DoubleArray, contigs: LabelledRecords) -> dict[str, Any]:
    """Return AUROC (all, by length, by group against all of the other label), recall, and the gain over *base_C*."""
    is_virus_C, groups_C, nt = contigs.is_virus_C, np.array(contigs.groups), lengths_nt(contigs)

    def auroc(numbers: NDArray[Any], of_C: DoubleArray = scores_C) -> float:
        return counts_of(of_C[numbers], is_virus_C[numbers]).auroc()

    def gain(numbers: IntArray) -> dict[str, float]:
        return {"gain": auroc(numbers) - auroc(numbers, base_C)}

    found = bootstrap(gain, is_virus_C, seed=SEED, samples=1000)["gain"]
    by_group = {
        group: auroc((is_virus_C != label) | (groups_C == group))
        for (label, group), size in sorted(Counter(zip(is_virus_C.tolist(), contigs.groups, strict=True)).items())
        if size >= LEAST_OF_GROUP
    }
    by_length = {name: auroc((nt >= least) & (nt <= most)) for name, (least, most) in LENGTHS.items()}
    return {
        "auroc": round(auroc(np.arange(len(nt))), 4),
        "gain": [round(float(x), 4) for x in (found.value, found.low, found.high)],
        "recall_at_1_percent": round(counts_of(scores_C, is_virus_C).strict_recall(), 4),
        "by_length": {name: round(value, 4) for name, value in by_length.items()},
        "by_group": {name: round(value, 4) for name, value in by_group.items()},
    }


def compared(odds: dict[str, dict[str, DoubleArray]], sets: dict[str, TrainingContigs]) -> dict[str, Any]:
    """Return the figures of every join, on test and dev."""
    rows: dict[str, Any] = {}
    for base, parts in [(base, parts) for base in BASES for parts in JOINED if base or parts]:
        columns = [*([base] if base else []), "length", *parts]
        inputs = {where: with_one(*(odds[where][column] for column in columns)) for where in odds}
        weights_J = fit_regression(inputs[VALIDATION], sets[VALIDATION].is_virus_C)
        row: dict[str, Any] = {"weights": dict(zip([*columns, "1"], np.round(weights_J, 4).tolist(), strict=True))}
        for where in (TEST, "dev"):
            of_set, joined_C = odds[where], inputs[where] @ weights_J
            reference_C = of_set[base or "letters"]
            row[where] = measured(joined_C if parts else reference_C, reference_C, sets[where])
            if not parts:
                row[where]["joined_with_length"] = round(counts_of(joined_C, sets[where].is_virus_C).auroc(), 4)
            shown = [row[where][name] for name in ("auroc", "gain", "recall_at_1_percent", "by_length")]
            print(f"{base} + {parts}, {where}:", *shown, flush=True)
        rows[" + ".join([*([base] if base else []), *parts])] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", type=Path, help="folder of a training with --keep-work")
    parser.add_argument(
        "--classifier", type=Path, default=BUNDLED_WEIGHTS_DIR / "virnucpro-tiny", help="gives the letters' scores"
    )
    parser.add_argument("--contigs", type=Path, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--prediction", type=Path, required=True, help="folder of a prediction of these contigs")
    parser.add_argument("--proteins", type=Path, required=True, help="UniProt proteins, FASTA")
    parser.add_argument("--pretraining-minutes", type=float, default=10)
    parser.add_argument("--minutes", type=float, default=13, help="of fine-tuning each encoder")
    parser.add_argument("--pieces", type=int, default=30_000, help="training pieces that the encoders may see")
    parser.add_argument("--measured", type=int, default=10**6, help="pieces of validation and test, at most")
    parser.add_argument("--keep", type=Path, help="folder where trained encoders stay; a further call takes them")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    card = read_card(options.classifier)
    model = load_contig_model(options.classifier, card)
    layout = TrainingLayout(options.training)
    embedded = read_embedded(layout, card.chunk_nt, None)
    pieces = [*embedded.pieces, *read_pieces(layout.further_pieces, layout.further_pieces_table)]
    of_training = [piece for piece in pieces if piece.part == TRAIN]
    drawn = np.random.default_rng(SEED).permutation(len(of_training))[: options.pieces].tolist()
    pool = pieces_as_records([of_training[number] for number in drawn]).records
    unseen = [piece for piece in pieces[len(embedded.pieces) :] if piece.part == VALIDATION]
    checked = pieces_as_records(unseen[:CHECKED_PIECES]).records
    most = {TRAIN: len(pieces), VALIDATION: options.measured, TEST: options.measured}
    sets = {
        part: chosen(embedded, np.flatnonzero(embedded.of_part(part))[:count]).records for part, count in most.items()
    }
    sets["dev"] = read_contigs(options.contigs, options.truth, options.prediction).records
    encoders, trainings = train_encoders(pool, model, checked, options)
    is_viral_G = np.array([is_virus for is_virus, _ in pool.group_names()])
    frozen = {where: with_one(some.dna_CD, some.protein_CE, np.log1p(some.frames_C)) for where, some in sets.items()}
    frozen_J = fit_regression(frozen[TRAIN], sets[TRAIN].is_virus_C)
    odds: dict[str, dict[str, DoubleArray]] = {}
    cpu_s_per_mb: dict[str, float] = {}
    for where in (VALIDATION, TEST, "dev"):
        contigs, scores_C = sets[where], by_letters(model, sets[where])
        complete_C = model.similarity.refined(scores_C, contigs.codes) if model.similarity else scores_C
        odds[where] = {"letters": log_odds(scores_C), "complete score": log_odds(complete_C)}
        odds[where] |= {"length": np.log(lengths_nt(contigs)), "frozen": frozen[where] @ frozen_J}
        for name, encoder in encoders.items():
            start = time.process_time()
            odds[where][name] = mean_log_odds(encoder, contigs, is_viral_G)
            cpu_s_per_mb[name] = round((time.process_time() - start) / lengths_nt(contigs).sum() * 1e6, 2)
    report = {
        "machine": machine("numpy", "torch", "fair-esm", "tokenizers", "virnucpro"),
        "threads": 1,
        "contigs": {where: len(some.codes) for where, some in sets.items()} | {"drawn from": len(pool.codes)},
        "hard_negatives": {"share": HARD_SHARE, "weight": HARD_WEIGHT},
        "trainings": trainings,
        "cpu_s_per_mb": cpu_s_per_mb,
        "rows": compared(odds, sets),
    }
    if options.write:
        print(write_result("fine_tuned_encoders", report))


if __name__ == "__main__":
    main()
