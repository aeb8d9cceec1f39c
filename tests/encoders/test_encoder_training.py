"""The training loop: same seed, same weights; a checkpoint goes on as if nothing had happened; fair-esm's module."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tools.encoders.masked_residues import (
    STANDARD_RESIDUES,
    ResidueObjective,
    hidden_states,
    mask_residues,
    masked_loss,
    new_encoder,
)
from tools.encoders.masked_tokens import SHORTEST_WINDOW, epoch_windows
from tools.encoders.training import (
    TrainingSettings,
    TrainingState,
    learning_rate_share,
    progress,
    train_encoder,
)
from virnucpro.errors import ConfigurationError
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer

pytestmark = pytest.mark.usefixtures("threads_as_before")

CPU = torch.device("cpu")
SETTINGS = TrainingSettings(
    num_layers=2, hidden_dim=32, attention_heads=2, steps=6, batch_tokens=512, window_tokens=60, threads=1
)


@pytest.fixture(scope="module")
def tokenizer():
    return ProteinTokenizer()


@pytest.fixture(scope="module")
def proteins(tokenizer):
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list(STANDARD_RESIDUES), size=length)) for length in random.integers(20, 200, 40)]
    return [tokenizer.encode([text])[0][1:-1] for text in texts]


def _weights(model):
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_same_seed_gives_the_same_weights_and_another_seed_others(proteins):
    first, again, other = (
        _weights(train_encoder(proteins, replace(SETTINGS, seed=seed), ResidueObjective(), device=CPU)[0])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_run_from_a_checkpoint_ends_like_one_that_was_not_interrupted(proteins, tmp_path, monkeypatch):
    whole, _ = train_encoder(proteins, SETTINGS, ResidueObjective(), device=CPU)
    calls = []

    class StopsAfterThree(ResidueObjective):
        def loss(self, model, batch):
            calls.append(batch)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return super().loss(model, batch)

    checkpoint = tmp_path / "checkpoint.pt"
    with monkeypatch.context() as context:
        context.setattr("tools.encoders.training._CHECKPOINT_EVERY_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            train_encoder(proteins, SETTINGS, StopsAfterThree(), device=CPU, checkpoint=checkpoint)
    resumed, state = train_encoder(proteins, SETTINGS, ResidueObjective(), device=CPU, checkpoint=checkpoint)
    assert state.step == SETTINGS.steps
    assert torch.equal(_weights(resumed), _weights(whole))


def test_checkpoint_of_other_settings_is_refused(proteins, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    train_encoder(proteins, replace(SETTINGS, steps=1), ResidueObjective(), device=CPU, checkpoint=checkpoint)
    with pytest.raises(ConfigurationError, match="other settings"):
        train_encoder(proteins, SETTINGS, ResidueObjective(), device=CPU, checkpoint=checkpoint)


def test_loss_falls_on_proteins_with_a_pattern(tokenizer):
    patterned = [tokenizer.encode(["ACDEFGHIKL" * 12])[0][1:-1]] * 20
    settings = replace(SETTINGS, steps=60)
    batch = mask_residues(patterned, tokenizer, np.random.default_rng(9))
    before = float(masked_loss(new_encoder(settings), batch).detach())
    model, _ = train_encoder(patterned, settings, ResidueObjective(), device=CPU)
    assert float(masked_loss(model, batch).detach()) < 0.8 * before


def test_states_are_those_of_fair_esms_own_forward(proteins, tokenizer):
    model = new_encoder(replace(SETTINGS, hidden_dim=64, attention_heads=4)).eval()
    tokens_BL = mask_residues([residues[:20] for residues in proteins], tokenizer, np.random.default_rng(1)).tokens_BL
    assert (tokens_BL == tokenizer.alphabet.mask_idx).any()
    with torch.inference_mode():
        expected = model(tokens_BL, repr_layers=[2])["representations"][2]
        torch.testing.assert_close(hidden_states(model, tokens_BL), expected, atol=1e-5, rtol=1e-5)


def test_windows_cover_long_proteins_and_fit_the_batch(proteins):
    batches = list(epoch_windows(proteins, window_tokens=60, batch_tokens=512, random=np.random.default_rng(0)))
    assert all(len({len(window) for window in batch}) == 1 for batch in batches)
    assert all(sum(len(window) + 2 for window in batch) <= 512 for batch in batches)
    lengths = [len(window) for batch in batches for window in batch]
    assert min(lengths) >= SHORTEST_WINDOW
    assert max(lengths) <= 60
    assert sum(lengths) > 0.7 * sum(len(residues) for residues in proteins)


def test_masking_follows_the_recipe(proteins, tokenizer):
    long = [np.concatenate(proteins)[:2000]] * 10
    batch = mask_residues(long, tokenizer, np.random.default_rng(2))
    tokens = batch.tokens_BL.flatten()[batch.positions_M]
    truth = torch.from_numpy(np.pad(np.stack(long), ((0, 0), (1, 1)))).flatten()
    assert torch.equal(truth[batch.positions_M], batch.targets_M)
    assert len(tokens) / 20_000 == pytest.approx(0.15, abs=0.01)
    is_mask = tokens == tokenizer.alphabet.mask_idx
    assert float(is_mask.float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((tokens == batch.targets_M).float().mean()) == pytest.approx(0.105, abs=0.03)
    assert (batch.tokens_BL[:, 0] == tokenizer.alphabet.cls_idx).all()
    assert (batch.tokens_BL[:, -1] == tokenizer.alphabet.eos_idx).all()
    untouched = torch.ones(len(truth), dtype=torch.bool)
    untouched[batch.positions_M] = False
    inner = untouched.view(10, -1)[:, 1:-1]
    assert torch.equal(batch.tokens_BL[:, 1:-1][inner], truth.view(10, -1)[:, 1:-1][inner])


def test_learning_rate_rises_then_falls_to_nothing():
    shares = [learning_rate_share(step / 100, 0.1) for step in range(101)]
    assert max(shares) == shares[10] == 1.0
    assert shares[100] == 0.0
    assert shares[:11] == sorted(shares[:11])
    assert shares[10:] == sorted(shares[10:], reverse=True)


def test_time_limit_hastens_the_decay_and_never_delays_it():
    settings = replace(SETTINGS, steps=100, limit_minutes=1.0)
    assert progress(TrainingState(step=20, elapsed_s=30.0), settings) == 0.5
    assert progress(TrainingState(step=80, elapsed_s=30.0), settings) == 0.8
    assert progress(TrainingState(step=20, elapsed_s=90.0), settings) == 1.0
