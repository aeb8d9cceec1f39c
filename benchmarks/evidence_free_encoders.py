"""
Whether a fine-tuned protein encoder adds to composition where homology has nothing, and where it has something.

Takes a training that kept its fragments (``virnucpro train --keep-work``). The encoder, with a linear layer on the mean
over its tokens, learns groups from likely genes of training fragments that have no hit in proteins of other groups; the
best of four states on 500 of validation's contigs without a hit is kept. A logistic regression joins its mean log-odds
with composition (or, of contigs with a hit, the complete score) and the length, fitted on validation; test part and
development contigs report.

    python benchmarks/evidence_free_encoders.py TRAINING DATA [--checkpoint PT] [--minutes 10] [--write]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import esm
import numpy as np
import torch
from bench_common import machine, write_result
from esm.model.esm2 import ESM2
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from virnucpro.models.contigs import homology
from virnucpro.models.contigs.contig_model import ContigModel, ContigWeights, viral_log_odds
from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import RESIDUES, masked
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer
from virnucpro.models.registry import locate_weights
from virnucpro.run_layout import TrainingLayout
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.evaluation.tables import read_truth
from virnucpro.training.fitting.embedded_fragments import read_embedded
from virnucpro.training.fitting.homology_fitting import fit_regression
from virnucpro.training.fitting.training_fragments import read_training_fragments
from virnucpro.training.genomes.labelled_genomes import read_labelled
from virnucpro.training.genomes.records import read_records

TABLE = Path(__file__).parent.parent / "tools" / "default_classifier" / "genomes.tsv.gz"
POOL, ROUND, BATCH_TOKENS, WINDOW, STEP, SEED = 32_000, 500, 4096, 254, 8, 1
CHECKS, SAMPLES = (0.4, 0.6, 0.8, 1.0), 1000


class Encoder(nn.Module):
    """A protein encoder with a layer for the groups; its units are likely genes, long ones in parts."""

    def __init__(self, num_groups: int, checkpoint: Path | None) -> None:
        super().__init__()
        if checkpoint is None:
            self.model = ESM2(5, 128, 4)
            self.model.load_state_dict(load_file(locate_weights("virnucpro-tiny-protein")))
        else:
            torch.serialization.add_safe_globals([argparse.Namespace])
            self.model, _ = esm.pretrained.load_model_and_alphabet_local(str(checkpoint))
        self.head = nn.Linear(self.model.embed_dim, num_groups)
        alphabet = ProteinTokenizer().alphabet
        self.ends = (alphabet.cls_idx, alphabet.eos_idx)
        self.ids = np.array([alphabet.get_idx(chr(letter)) for letter in RESIDUES] + [alphabet.get_idx("X")])

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        last = self.model.num_layers
        return self.head(self.model(tokens_BL, repr_layers=[last])["representations"][last].mean(1))

    def batches(self, codes, random):
        """Yield tokens of units of one length, to which they are cut; their contigs; and how full the batch is."""
        by_length: dict[int, list] = {}
        for at in range(0, len(codes), 64):
            genes = Genes.of(Fragments(codes[at : at + 64]))
            residues = np.split(self.ids[genes.residues()], np.cumsum(genes.lengths_N)[:-1])
            for number, gene in zip(genes.groups.fragment_X.tolist(), residues, strict=False):
                for part in np.array_split(gene, -(-len(gene) // WINDOW)):
                    by_length.setdefault(len(part) // STEP * STEP, []).append((at + number, part))
        found = []
        for length, units in by_length.items():
            size = max(BATCH_TOKENS // (length + 2), 1)
            order = range(len(units)) if random is None else random.permutation(len(units)).tolist()
            found += [[units[i] for i in order[at : at + size]] for at in range(0, len(units), size) if length]
        for at in range(len(found)) if random is None else random.permutation(len(found)).tolist():
            length = min(len(part) for _, part in found[at]) // STEP * STEP
            tokens = np.empty((len(found[at]), length + 2), np.int64)
            tokens[:, 0], tokens[:, -1] = self.ends
            tokens[:, 1:-1] = [part[:length] for _, part in found[at]]
            yield torch.from_numpy(tokens), np.array([contig for contig, _ in found[at]]), tokens.size / BATCH_TOKENS

    def log_odds(self, codes, is_viral_G):
        sums, tokens_of = np.zeros((2, len(codes)))
        self.eval()
        for tokens, contigs, _ in self.batches(codes, None):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                logits = self(tokens).double().numpy()
            np.add.at(sums, contigs, tokens.shape[1] * viral_log_odds(logits, is_viral_G))
            np.add.at(tokens_of, contigs, tokens.shape[1])
        return sums / np.maximum(tokens_of, 1)


def judged(model: ContigModel, letters, is_virus) -> dict[str, Any]:
    """Return codes, scores by composition and complete ones, and which have a hit."""
    codes, scores = [masked(one.encode()) for one in letters], []
    for at in range(0, len(codes), 512):
        none = np.zeros((len(codes[at : at + 512]), 0), np.float32)
        zeros = np.zeros(len(none), np.int64)
        scores.append(model.probabilities(model.features.of_many(codes[at : at + 512]), none, none, zeros, zeros + 1))
    composition = np.concatenate(scores)
    found = model.homology.judge(composition, codes)
    has_hit = np.zeros(len(codes), bool)
    has_hit[found.searched] = (found.hits.proteins >= 0).any(axis=1)
    is_virus = np.array(is_virus)
    nt = np.array([len(one) for one in codes])
    return {
        "codes": codes,
        "virus": is_virus,
        "composition": composition,
        "complete": found.scores,
        "hit": has_hit,
        "nt": nt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="of ESM-2 in fair-esm's layout; the bundled encoder without it")
    parser.add_argument("--minutes", type=float, default=10, help="CPU minutes of fine-tuning")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    layout = TrainingLayout(asked.training)
    model = ContigModel(ContigWeights.of_bytes((asked.training / "contig_model.safetensors.gz").read_bytes()))
    embedded = read_embedded(layout, 500, None)
    fragments = [
        *embedded.fragments,
        *read_training_fragments(layout.further_fragments, layout.further_fragments_table),
    ]
    of_part = {part: [one for one in fragments if one.part == part] for part in ("train", "validation")}
    of_part["test"] = [one for one in embedded.fragments if one.part == "test"]
    sets = {
        part: judged(model, [one.letters for one in of_part[part]], [one.is_virus for one in of_part[part]])
        for part in ("validation", "test")
    }
    truth = read_truth(asked.data / "genomes" / "dev_truth.tsv")
    is_virus = dict(zip(truth.contigs, truth.is_virus_C.tolist(), strict=True))
    dev = list(read_records(asked.data / "genomes" / "dev_contigs.fa.gz"))
    sets["dev"] = judged(model, [one.letters for one in dev], [is_virus[one.accession] for one in dev])
    pool = [of_part["train"][at] for at in random.permutation(len(of_part["train"]))[:POOL].tolist()]
    codes = [masked(one.letters.encode()) for one in pool]
    groups = np.array([one.group for one in pool])
    files = sorted(path for kind in ("viral", "genomes", "kinds") for path in (asked.data / kind).glob("*.fna.gz"))
    group_of = {genome.accession: genome.group for genome in read_labelled(files, TABLE).genomes}
    proteins = model.homology.proteins
    group_N = np.array([group_of.get(name.split(" ")[0], "artificial sequence") for name in proteins.records])
    group_N = group_N[proteins.record_N]
    free = np.zeros(len(pool), bool)
    for group in sorted(set(groups)):
        mine = np.flatnonzero(groups == group)
        hits = proteins.take(group_N != group).search([homology.ends_of(codes[at]) for at in mine])
        free[mine] = ~(hits.proteins >= 0).any(axis=1)
    free_C = np.flatnonzero(free)
    labels = np.array([one.is_virus for one in pool])
    names = sorted(set(zip(labels.tolist(), groups.tolist(), strict=True)))
    is_viral_G = np.array([label for label, _ in names])
    group_C = np.array([names.index(one) for one in zip(labels.tolist(), groups.tolist(), strict=True)])
    draw = np.where(labels[free_C], 0.5 / labels[free_C].sum(), 0.5 / (~labels[free_C]).sum())
    encoder = Encoder(len(names), asked.checkpoint)
    rate = 1e-3 if asked.checkpoint is None else 4e-4
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate, weight_decay=0.01)
    checked = random.permutation(np.flatnonzero(~sets["validation"]["hit"]))[:500]
    share, spent, seen, best, state, checks = 0.0, 0.0, 0, 0.0, encoder.state_dict(), list(CHECKS)
    while share < 1:
        began = time.process_time()
        numbers = free_C[random.choice(len(free_C), ROUND, p=draw)]
        encoder.train()
        for tokens, contigs, full in encoder.batches([codes[at] for at in numbers], random):
            share = min((spent + time.process_time() - began) / (60 * asked.minutes), 1)
            optimizer.param_groups[0]["lr"] = rate * min(share / 0.03, 1) * max(1 - share, 0.02)
            with torch.autocast("cpu", torch.bfloat16):
                logits = encoder(tokens)
            loss = functional.cross_entropy(logits.float(), torch.from_numpy(group_C[numbers[contigs]]))
            optimizer.zero_grad()
            (loss * full).backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()
            seen += tokens.numel()
            if share >= 1:
                break
        spent += time.process_time() - began
        while checks and share >= checks[0]:
            chosen = [sets["validation"]["codes"][at] for at in checked]
            ranked = counts_of(encoder.log_odds(chosen, is_viral_G), sets["validation"]["virus"][checked]).auroc()
            print(f"{checks.pop(0):.0%}: {seen:,} tokens, loss {float(loss):.3f}, AUROC {ranked:.4f}", flush=True)
            if ranked > best:
                best, state = ranked, {name: value.clone() for name, value in encoder.state_dict().items()}
    encoder.load_state_dict(state)
    odds = {part: encoder.log_odds(one["codes"], is_viral_G) for part, one in sets.items()}
    report: dict[str, Any] = {
        "machine": machine("numpy", "torch", "fair-esm", "virnucpro"),
        "encoder": str(asked.checkpoint.name if asked.checkpoint else "virnucpro-tiny-protein"),
        "minutes": asked.minutes,
        "tokens": seen,
        "training_fragments_without_a_hit": len(free_C),
    }

    def inputs(part: str, numbers, base: str, joined: bool):
        p = np.clip(sets[part][base][numbers].astype(float), 1e-7, 1 - 1e-7)
        columns = [np.log(p / (1 - p)), np.log(sets[part]["nt"][numbers])]
        return np.stack([*columns, *[odds[part][numbers]] * joined, np.ones(len(numbers))], axis=1)

    for has_hit, base in ((False, "composition"), (True, "complete")):
        numbers = {
            part: np.flatnonzero(~np.isnan(one["composition"]) & (one["hit"] == has_hit)) for part, one in sets.items()
        }
        virus = sets["validation"]["virus"][numbers["validation"]]
        weight = np.where(virus, 0.5 / virus.sum(), 0.5 / (~virus).sum())
        fits = [
            fit_regression(inputs("validation", numbers["validation"], base, joined), virus, weight)
            for joined in (False, True)
        ]
        for part in ("test", "dev"):
            mine, virus = numbers[part], sets[part]["virus"][numbers[part]]
            before, after = (
                inputs(part, mine, base, joined) @ fit for joined, fit in zip((False, True), fits, strict=True)
            )
            gains = []
            for _ in range(SAMPLES):
                drawn = np.concatenate(
                    [random.choice(np.flatnonzero(virus == label), (virus == label).sum()) for label in (True, False)]
                )
                gains.append(
                    counts_of(after[drawn], virus[drawn]).auroc() - counts_of(before[drawn], virus[drawn]).auroc()
                )
            row = {
                "viral": int(virus.sum()),
                "others": int((~virus).sum()),
                "encoder": round(counts_of(odds[part][mine], virus).auroc(), 4),
                "before": round(counts_of(before, virus).auroc(), 4),
                "joined": round(counts_of(after, virus).auroc(), 4),
                "gain": [round(float(np.quantile(gains, q)), 4) for q in (0.025, 0.975)],
            }
            report[f"{'with' if has_hit else 'without'} a hit, {part}"] = row
            print(part, has_hit, row, flush=True)
    if asked.write:
        print(write_result("evidence_free_encoders", report))


if __name__ == "__main__":
    main()
