"""Opening checkpoints, and what needs no real data of the packed forward pass; parity is in ``tests/parity``."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from esm.rotary_embedding import RotaryEmbedding
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tools.encoders.card import save_weights
from tools.encoders.masked_residues import new_encoder
from tools.encoders.training import TrainingSettings
from virnucpro.data.collators import PackedBatch
from virnucpro.errors import SequenceError, UnknownModelError, WeightsError
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer, load_pickled
from virnucpro.models.esm2_flash import load_esm2_model
from virnucpro.pipeline.async_inference import AsyncInferenceRunner

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ", "W", "GGLVPRGSHM", "ACDEFGHIKL", "MX", "M" * 300]


class Planted:
    """Does harm when a pickle of it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("harm done",)


@pytest.fixture(scope="module")
def encoder():
    settings = TrainingSettings(num_layers=3, hidden_dim=48, attention_heads=4, seed=5)
    model = new_encoder(settings).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    return model


@pytest.fixture(scope="module")
def published(encoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("published") / "model.safetensors"
    save_weights(encoder, path)
    return path


def _packed(tokenizer, sequences):
    input_ids_T, lengths_S = tokenizer.encode(sequences)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
    return torch.from_numpy(input_ids_T), torch.from_numpy(cu_seqlens), tuple(lengths_S.tolist())


def _fair_esm_checkpoint(encoder, path, **changes):
    stated = {"encoder_layers": 3, "encoder_embed_dim": 48, "encoder_attention_heads": 4, "token_dropout": True}
    settings = argparse.Namespace(**{**stated, **changes})
    state = {f"encoder.sentence_encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    torch.save({"cfg": {"model": settings}, "model": state}, path)
    return path


def test_embeddings_are_those_of_fair_esm(encoder, published):
    model, tokenizer = load_esm2_model(published, "cpu")
    found = model(*_packed(tokenizer, SEQUENCES))
    assert model.hidden_dim == 48
    assert found.shape == (len(SEQUENCES), 48)
    for residues, row in zip(SEQUENCES, found, strict=True):
        tokens = torch.from_numpy(tokenizer.encode([residues])[0])[None]
        with torch.inference_mode():
            expected = encoder(tokens, repr_layers=[3])["representations"][3][0, 1:-1].mean(0)
        assert float((row - expected).abs().max()) < 1e-5


def test_pt_and_safetensors_of_one_model_give_the_same_bits(encoder, published, tmp_path):
    pt_path = _fair_esm_checkpoint(encoder, tmp_path / "same.pt")
    first, second = (load_esm2_model(path, "cpu") for path in (published, str(pt_path)))
    assert torch.equal(first[0](*_packed(first[1], SEQUENCES)), second[0](*_packed(second[1], SEQUENCES)))


def test_a_pt_is_mapped_while_it_is_read_and_not_afterwards(encoder, tmp_path):
    path = _fair_esm_checkpoint(encoder, tmp_path / "mapped.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        contents = load_pickled(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    del contents
    model, _ = load_esm2_model(path, "cpu")
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_pt_that_was_compressed_is_refused_since_mapped_it_gives_other_numbers(encoder, tmp_path):
    plain, compressed = _fair_esm_checkpoint(encoder, tmp_path / "plain.pt"), tmp_path / "compressed.pt"
    with ZipFile(plain) as before, ZipFile(compressed, "w", ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, before.read(name))
    with pytest.raises(WeightsError, match="compressed"):
        load_esm2_model(compressed, "cpu")


def test_rotary_frequencies_are_the_checkpoints_own(encoder, tmp_path):
    # published checkpoints hold them rounded to half precision; computed anew they would give other embeddings
    rounded = copy.deepcopy(encoder)
    for layer in rounded.layers:
        layer.self_attn.rot_emb = RotaryEmbedding(layer.self_attn.head_dim)  # without the table of an earlier test
        layer.self_attn.rot_emb.inv_freq = layer.self_attn.rot_emb.inv_freq.half().float()
    model, tokenizer = load_esm2_model(_fair_esm_checkpoint(rounded, tmp_path / "rounded.pt"), "cpu")
    tokens = torch.from_numpy(tokenizer.encode([SEQUENCES[-1]])[0])[None]
    with torch.inference_mode():
        first_layers = [x(tokens, repr_layers=[1])["representations"][1][0] for x in (rounded, encoder)]
        _, found, *_ = (x.clone() for x in model._states(*_packed(tokenizer, SEQUENCES[-1:]), torch.float32))
    assert float((found - first_layers[0]).abs().max()) < 1e-5
    assert float((found - first_layers[1]).abs().max()) > 1e-4


def test_row_of_a_sequence_does_not_depend_on_what_it_is_packed_with(published):
    model, tokenizer = load_esm2_model(published, "cpu")
    together = model(*_packed(tokenizer, SEQUENCES))
    alone = torch.cat([model(*_packed(tokenizer, [residues])) for residues in SEQUENCES])
    assert float((together - alone).abs().max()) < 1e-5
    backwards = model(*_packed(tokenizer, SEQUENCES[::-1])).flip(0)
    assert float((together - backwards).abs().max()) < 1e-5


def test_bf16_keeps_rotation_in_float32_and_gives_float32_rows(published):
    model, tokenizer = load_esm2_model(published, "cpu", precision="bf16")
    assert model.rotary_frequencies.dtype == torch.float32
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert model(*_packed(tokenizer, SEQUENCES)).dtype == torch.float32


def overflows_at_tryptophan(path):
    """Change a checkpoint: values of W, and of no other residue, are too large for fp16."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tryptophan = ProteinTokenizer().alphabet.get_idx("W")
    tensors["embed_tokens.weight"].mul_(0.01)[:, 0] = 0
    tensors["embed_tokens.weight"][tryptophan, 0] = 10
    layer = "layers.0.self_attn_layer_norm"
    tensors[f"{layer}.weight"].fill_(1)
    tensors[f"{layer}.bias"].zero_()
    tensors["layers.0.self_attn.v_proj.weight"][0, 0] = 2e4  # of W the norm is the root of 48, of others at most 1
    save_file(tensors, path, metadata=metadata)


def test_what_overflows_in_fp16_is_computed_in_float32_and_named(published, tmp_path):
    path = Path(shutil.copy(published, tmp_path / "model.safetensors"))
    overflows_at_tryptophan(path)
    model, tokenizer = load_esm2_model(path, "cpu", precision="fp16")
    batch = PackedBatch(tuple(range(6)), tuple("abcdef"), *_packed(tokenizer, SEQUENCES))
    rows = model(*_packed(tokenizer, SEQUENCES))
    assert (~torch.isfinite(rows).all(dim=1)).tolist() == ["W" in residues for residues in SEQUENCES]
    (result,) = AsyncInferenceRunner(model, "cpu").run([batch])
    assert (result.widened, result.failed, result.is_resplit) == (("b",), (), False)
    assert result.sequence_ids == batch.sequence_ids
    assert np.array_equal(np.delete(result.embeddings, 1, axis=0), np.delete(rows.numpy(), 1, axis=0))

    weights = {name: tensor.half().float() for name, tensor in load_file(path).items()}
    with safe_open(path, "pt") as file:
        save_file(weights, tmp_path / "rounded.safetensors", metadata=file.metadata())
    exact = load_esm2_model(tmp_path / "rounded.safetensors", "cpu", precision="fp32")[0]
    packed = _packed(tokenizer, SEQUENCES)
    assert torch.allclose(model.in_float32(*packed), exact(*packed), rtol=1e-4, atol=1e-4)
    assert np.allclose(result.embeddings[1], exact(*packed)[1], rtol=1e-4, atol=1e-4)


def test_unknown_name_is_an_error():
    with pytest.raises(UnknownModelError, match="esm2_t7_8M"):
        load_esm2_model("esm2_t7_8M", "cpu")


def test_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"cfg": Planted(), "model": {}}, tmp_path / "planted.pt")
    with pytest.raises(WeightsError, match="cannot be read"):
        load_esm2_model(tmp_path / "planted.pt", "cpu")
    assert not Path("harm done").exists()


def test_damaged_file_is_refused(encoder, tmp_path):
    whole = _fair_esm_checkpoint(encoder, tmp_path / "whole.pt").read_bytes()
    for name, content in (("cut.pt", whole[: len(whole) // 2]), ("empty.pt", b""), ("cut.safetensors", whole[:100])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=r"cannot be read .*: fetch it again"):
            load_esm2_model(tmp_path / name, "cpu")


def test_file_of_something_else_is_refused(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(WeightsError, match="not an ESM-2 checkpoint in fair-esm's layout"):
        load_esm2_model(tmp_path / "other.pt", "cpu")
    save_file({"weight": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match="not an ESM-2 checkpoint"):
        load_esm2_model(tmp_path / "other.safetensors", "cpu")


def test_checkpoint_whose_tensors_do_not_fit_its_settings_is_refused(encoder, tmp_path):
    path = _fair_esm_checkpoint(encoder, tmp_path / "odd.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        contents = torch.load(path, weights_only=True)
    contents["cfg"]["model"].encoder_layers = 4
    torch.save(contents, path)
    with pytest.raises(WeightsError, match=r"does not hold the ESM-2 encoder that it states .*layers\.3\."):
        load_esm2_model(path, "cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_heads": 0}, "attention_heads is not between 0 and 2147483648"),
        ({"attention_heads": -4}, "attention_heads is not between 0 and 2147483648"),
        ({"attention_heads": 5}, "its width, 48, is no multiple of 10"),
        ({"attention_heads": 4.0}, "attention_heads is not between 0 and 2147483648"),
        ({"num_layers": True}, "num_layers is not between 0 and 2147483648"),
        ({"hidden_dim": 10**30}, "hidden_dim is not between 0 and 2147483648"),
        ({"vocabulary": "33"}, "vocabulary is not between 0 and 2147483648"),
        ({"num_layers": 10**5}, r"does not hold the ESM-2 encoder that it states .*num_layers=100000,"),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.usefixtures("little_memory")
def test_numbers_of_a_checkpoint_that_cannot_be_are_refused(encoder, published, tmp_path, suffix, changes, says):
    path = tmp_path / f"odd.{suffix}"
    if suffix == "safetensors":
        with safe_open(published, "pt") as file:
            architecture = {**json.loads(file.metadata()["architecture"]), **changes}
        save_file(load_file(published), path, metadata={"architecture": json.dumps(architecture)})
    elif "vocabulary" in changes:
        return  # counted there, not stated
    else:
        names = {"num_layers": "encoder_layers", "hidden_dim": "encoder_embed_dim"}
        names["attention_heads"] = "encoder_attention_heads"
        _fair_esm_checkpoint(encoder, path, **{names[name]: value for name, value in changes.items()})
    with pytest.raises(WeightsError, match=says):
        load_esm2_model(path, "cpu")


def test_tensors_larger_than_the_file_are_refused(encoder, tmp_path):
    """One number that is repeated without being stored; a whole model of them takes any memory."""
    state = {name: torch.zeros(1).expand(x.shape) for name, x in encoder.state_dict().items()}
    path = _fair_esm_checkpoint(SimpleNamespace(state_dict=lambda: state), tmp_path / "few.pt")
    with pytest.raises(WeightsError, match="states more numbers than it holds"):
        load_esm2_model(path, "cpu")


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
def test_metadata_that_is_nested_too_deep_is_refused(published, tmp_path, nested):
    save_file(load_file(published), tmp_path / "deep.safetensors", metadata={"architecture": nested})
    with pytest.raises(WeightsError, match="cannot be read"):
        load_esm2_model(tmp_path / "deep.safetensors", "cpu")


def test_letter_without_a_token_is_an_error_that_names_it():
    with pytest.raises(SequenceError, match="sequence 2 of the batch: residue 3 is 'J', which has no token"):
        ProteinTokenizer().encode(["MK", "MKJ"])


def test_no_sequence_gives_no_token():
    input_ids_T, lengths_S = ProteinTokenizer().encode([])
    assert (input_ids_T.shape, lengths_S.shape) == ((0,), (0,))
