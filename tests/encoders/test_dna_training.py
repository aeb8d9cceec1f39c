"""Training on DNA: the split keeps relatives together, the loss falls, the held-out loss hides what it asks for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tools.encoders.dna_split import split_genomes
from tools.encoders.masked_dna import DnaObjective, load_masked_bert, save_masked_bert
from tools.encoders.training import TrainingSettings, train_encoder
from virnucpro.models.dnabert_s import load_dnabert_s
from virnucpro.training.genomes.records import Genome, read_genomes
from virnucpro.training.genomes.related import KMER_LIMIT, reverse_complement, sketch

pytestmark = pytest.mark.usefixtures("threads_as_before")

CPU = torch.device("cpu")
SETTINGS = TrainingSettings(
    num_layers=2, hidden_dim=32, attention_heads=2, steps=6, batch_tokens=512, window_tokens=60, threads=1
)


@pytest.fixture(scope="module")
def objective():
    return DnaObjective()


def _random_dna(seed, length):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), size=length))


def _mutated(letters, share, seed=0):
    random = np.random.default_rng(seed)
    changed = [random.choice(list("ACGT")) if random.random() < share else letter for letter in letters]
    return "".join(changed)


def _weights(model):
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_sketch_is_the_same_for_both_strands_and_leaves_unknown_letters_out():
    letters = _random_dna(1, 20_000)
    assert np.array_equal(sketch(letters), sketch(reverse_complement(letters)))
    assert len(sketch(letters)) == pytest.approx(1000, rel=0.15)
    assert len(sketch("N".join(letters[start : start + 20] for start in range(0, 20_000, 20)))) == 0
    assert len(sketch("ACGT")) == 0
    assert reverse_complement("AACGTN") == "NACGTT"


def test_relatives_and_windows_of_a_genome_stay_together():
    genomes = []
    for number in range(30):
        base = _random_dna(number, 6000)
        genomes.append(Genome(f"G{number}.1", f"G{number}.1", base, "a.fna"))
        genomes.append(Genome(f"R{number}.1", f"R{number}.1", reverse_complement(_mutated(base, 0.03)), "b.fna"))
        genomes += [
            Genome(f"W{number}.1:{part}", f"W{number}.1", _random_dna(1000 * number + part, 3000), "c.fna")
            for part in (1, 2)
        ]
    # what is in two files is never held out: its near copy would train
    with_copies = split_genomes(genomes, seed=3, held_out_share=0.2)
    assert {genome.file for genome in with_copies.held_out} == {"c.fna"}
    one_file = [replace(genome, file="all.fna") for genome in genomes]
    split = split_genomes(one_file, seed=3, held_out_share=0.2)
    held_out = {genome.accession.partition(":")[0] for genome in split.held_out}
    training = {genome.accession.partition(":")[0] for genome in split.training}
    assert held_out
    assert not held_out & training
    for number in range(30):
        assert (f"G{number}.1" in held_out) == (f"R{number}.1" in held_out)
    assert split.largest_share < KMER_LIMIT
    assert len(split.held_out) + len(split.training) == len(genomes)
    share = sum(len(genome.letters) for genome in split.held_out) / sum(len(genome.letters) for genome in genomes)
    assert 0.1 < share <= 0.2
    assert split == split_genomes(one_file, seed=3, held_out_share=0.2)


def test_windows_of_an_assembly_are_one_genome(tmp_path):
    path = tmp_path / "x.fna"
    path.write_text(
        ">NZ_1.1:0-4 GCF_000001 Bacillus\nACGT\n>NZ_2.1:0-4 GCF_000001 Bacillus\nACGA\n>NC_3.1:0-4 NC_3.1 phage\nAC\n"
    )
    assert [genome.source for genome in read_genomes([path])] == ["GCF_000001", "GCF_000001", "NC_3.1"]


def test_same_seed_gives_the_same_weights_and_a_checkpoint_goes_on(objective, tmp_path):
    genomes = [_random_dna(number, 3000) for number in range(8)]
    whole, state = train_encoder(genomes, SETTINGS, objective, device=CPU)
    assert state.step == SETTINGS.steps

    class StopsAfterThree(DnaObjective):
        calls = 0

        def loss(self, model, batch):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().loss(model, batch)

    checkpoint = tmp_path / "checkpoint.pt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.encoders.training._CHECKPOINT_EVERY_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            train_encoder(genomes, SETTINGS, StopsAfterThree(), device=CPU, checkpoint=checkpoint)
    resumed, _ = train_encoder(genomes, SETTINGS, objective, device=CPU, checkpoint=checkpoint)
    assert torch.equal(_weights(resumed), _weights(whole))
    other, _ = train_encoder(genomes, replace(SETTINGS, seed=2), objective, device=CPU)
    assert not torch.allclose(_weights(other), _weights(whole))


def test_loss_falls_on_genomes_with_a_pattern(objective):
    genomes = [_random_dna(5, 40) * 60] * 6
    settings = replace(SETTINGS, steps=60)
    nats_V = objective.unigram_nats(genomes)
    before = objective.held_out_loss(objective.new_encoder(settings), genomes, nats_V)
    model, _ = train_encoder(genomes, settings, objective, device=CPU)
    after = objective.held_out_loss(model, genomes, nats_V)
    assert before.encoder == pytest.approx(math.log(4096), abs=0.3)
    assert after.encoder < 0.6 * before.encoder
    assert after.num_masked == before.num_masked > 300


def test_unigram_loss_is_that_of_the_training_tokens_and_unknown_ones_are_never_asked_for(objective):
    genome = "ACGTT" * 600 + "N" * 300
    ids = objective.token_ids(genome)
    counts = np.bincount(ids, minlength=4096)[5:] + 1
    nats = -np.log(counts / counts.sum())
    loss = objective.held_out_loss(objective.new_encoder(SETTINGS), [genome], objective.unigram_nats([genome]))
    seen = nats[np.bincount(ids, minlength=4096)[5:] > 0]
    assert len(seen) > 1
    assert seen.min() - 1e-9 <= loss.unigram <= seen.max() + 1e-9
    assert loss.num_masked < 0.3 * len(ids)


def test_the_answer_is_hidden_from_the_encoder(objective):
    batch = next(objective._held_out_batches([_random_dna(9, 4000)]))
    assert (batch.tokens_BL.flatten()[batch.positions_M] == objective.tokenizer.mask_id).all()
    assert (batch.tokens_BL[:, 0] == objective.tokenizer.cls_id).all()
    assert (batch.tokens_BL[:, -1] == objective.tokenizer.sep_id).all()
    assert not (batch.targets_M < objective.tokenizer.num_special).any()


def test_saved_weights_are_what_was_trained_and_what_embeds(objective, tmp_path):
    model, _ = train_encoder([_random_dna(1, 3000)] * 4, SETTINGS, objective, device=CPU)
    path = tmp_path / "model.safetensors"
    save_masked_bert(model, path)
    again = load_masked_bert(path)
    assert torch.equal(_weights(again), _weights(model))
    packed, tokenizer = load_dnabert_s(path, "cpu")
    input_ids, lengths = tokenizer.encode(["ACGTTGACCA" * 12])
    starts = torch.tensor([0, *lengths], dtype=torch.int32)
    with torch.inference_mode():
        states_TD = model.eval().bert.last_states(torch.from_numpy(input_ids), starts, lengths.tolist())
    torch.testing.assert_close(
        packed(torch.from_numpy(input_ids), starts, lengths.tolist())[0], states_TD.mean(0), atol=1e-5, rtol=0
    )
