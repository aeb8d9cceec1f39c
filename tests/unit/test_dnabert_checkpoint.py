"""DNABERT-S's checkpoints: which file is one, and what is said of a damaged, foreign or contradictory one."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from virnucpro.choices import DEFAULT_PROTEIN_MODEL
from virnucpro.errors import WeightsError
from virnucpro.models.dnabert_s import PackedMosaicBert, load_dnabert_s
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig, open_dnabert_checkpoint
from virnucpro.models.registry import DNABERT_S, ESM2, MODELS, family_of, resolve_model

CONFIG = MosaicBertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)


@pytest.fixture
def tensors():
    torch.manual_seed(3)
    return {name: tensor.detach() for name, tensor in PackedMosaicBert(CONFIG).state_dict().items()}


@pytest.fixture
def checkpoint(tmp_path, tensors):
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path)
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    return path


def test_heads_and_buffers_of_published_files_are_left_out(checkpoint, tensors):
    extra = {
        "encoder.alibi": torch.zeros(1, 2, 8, 8),
        "embeddings.position_ids": torch.arange(4),
        "classifier.bias": torch.zeros(2),
    }
    torch.save({**{f"bert.{name}": x for name, x in {**tensors, **extra}.items()}, "cls.x": torch.zeros(1)}, checkpoint)
    config, found = open_dnabert_checkpoint(checkpoint, vocabulary=4096)
    assert config == CONFIG
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_without_a_config_the_published_shape_is_expected(checkpoint):
    (checkpoint.parent / "config.json").unlink()
    with pytest.raises(
        WeightsError,
        match=r"does not hold the DNABERT-S encoder that it states.*hidden_size=768.*as no config\.json is beside it",
    ):
        load_dnabert_s(checkpoint, "cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, "does not hold the DNABERT-S encoder"),
        ({"intermediate_size": 25}, "mlp"),
        ({"vocab_size": 4095}, "word_embeddings"),
        ({"hidden_act": "relu"}, "only gelu is known"),
        ({"alibi_starting_size": None}, "not a MosaicBERT"),
        ({"model_type": "esm"}, "not a MosaicBERT"),
        ({"num_attention_heads": 0}, r"config.json.*num_attention_heads is not between 0 and 2147483648"),
        ({"num_attention_heads": 3}, "its width, 16, is no multiple of 3"),
        ({"type_vocab_size": 1.5}, "type_vocab_size is not between 0 and 2147483648"),
        ({"layer_norm_eps": -1e-5}, "layer_norm_eps is not between 0 and 1"),
        ({"layer_norm_eps": int("9" * 400)}, "layer_norm_eps is not between 0 and 1"),
        ({"num_hidden_layers": 10**5}, "does not hold the DNABERT-S encoder"),
    ],
)
@pytest.mark.usefixtures("little_memory")
def test_a_config_that_contradicts_the_tensors_or_is_of_another_architecture_is_refused(checkpoint, changes, says):
    values = {**json.loads(CONFIG.to_json()), **changes}
    values = {name: value for name, value in values.items() if value is not None}
    (checkpoint.parent / "config.json").write_text(json.dumps(values))
    with pytest.raises(WeightsError, match=says):
        load_dnabert_s(checkpoint, "cpu")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"model": ' * 100_000, None])
def test_a_file_beside_the_weights_that_is_nested_too_deep_or_a_pipe_is_refused(checkpoint, name, text):
    beside = checkpoint.parent / name
    beside.unlink(missing_ok=True)
    os.mkfifo(beside) if text is None else beside.write_text(text)
    with pytest.raises(WeightsError, match=rf"^weights of \w+: \S+{name} cannot be read"):
        load_dnabert_s(resolve_model(checkpoint).weights_path, "cpu")


@pytest.mark.parametrize("content", [{7: torch.zeros(1)}, {"bert.x": 7}, [torch.zeros(1)], 7, {}])
def test_a_pickle_of_something_else_is_refused(checkpoint, content):
    torch.save(content, checkpoint)
    with pytest.raises(WeightsError, match=r"is not a DNABERT-S checkpoint|does not hold"):
        load_dnabert_s(checkpoint, "cpu")


def test_another_vocabulary_is_refused(checkpoint):
    with pytest.raises(WeightsError, match="has 4096 tokens, the tokenizer has 33"):
        open_dnabert_checkpoint(checkpoint, vocabulary=33)


def test_a_damaged_file_is_one_sentence(checkpoint):
    checkpoint.write_bytes(checkpoint.read_bytes()[:2000])
    with pytest.raises(WeightsError, match="cannot be read"):
        load_dnabert_s(checkpoint, "cpu")


def test_nothing_of_a_pickle_is_run(checkpoint, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    for save in (torch.save, lambda contents, path: path.write_bytes(pickle.dumps(contents))):
        save({"bert.embeddings.word_embeddings.weight": Evil()}, checkpoint)
        with pytest.raises(WeightsError):
            load_dnabert_s(checkpoint, "cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("config", [CONFIG.to_json(), None, "[" * 100_000])
def test_a_dnabert_s_is_recognised_by_its_tensors_in_any_file(tmp_path, tensors, prefix, config):
    tensors = {f"{prefix}{name}": x for name, x in tensors.items()}
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    for is_zip in (True, False):
        torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        assert family_of(tmp_path / "pytorch_model.bin") is DNABERT_S
    save_file(tensors, tmp_path / "model.safetensors")
    assert family_of(tmp_path / "model.safetensors") is DNABERT_S
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"config": CONFIG.to_json()})
    assert family_of(tmp_path / "model.safetensors") is DNABERT_S


def test_an_esm2_is_recognised_in_fair_esms_file_and_in_ours(checkpoint, tmp_path):
    rotary = "encoder.sentence_encoder.layers.0.self_attn.rot_emb.inv_freq"
    path = checkpoint.parent / "a.pt"  # beside the config.json of a BERT
    for is_zip in (True, False):
        contents = {"cfg": argparse.Namespace(), "model": {rotary: torch.zeros(4)}}
        torch.save(contents, path, _use_new_zipfile_serialization=is_zip)
        assert family_of(path) is ESM2
    assert family_of(resolve_model(DEFAULT_PROTEIN_MODEL).weights_path) is ESM2
    save_file({rotary: torch.zeros(1)}, tmp_path / "theirs.safetensors")
    with pytest.raises(WeightsError, match="neither an ESM-2"):  # it does not state its architecture
        family_of(tmp_path / "theirs.safetensors")


FOREIGN = {
    "esm": ["esm.encoder.layer.0.attention.self.query.weight", "esm.encoder.layer.0.attention.self.rotary.inv_freq"],
    "ESMplusplus": ["embed.weight", "transformer.blocks.0.attn.layernorm_qkv.0.weight"],
    "t5": ["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"],
    "bert": ["bert.embeddings.position_embeddings.weight", "bert.encoder.layer.0.attention.self.query.weight"],
}


@pytest.mark.parametrize("model_type", FOREIGN)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
def test_another_model_is_refused_before_a_run_with_what_it_looks_like(tmp_path, model_type, name):
    tensors = {tensor: torch.zeros(1) for tensor in FOREIGN[model_type]}
    path = tmp_path / name
    save_file(tensors, path, metadata={"format": "pt"}) if name.endswith("tensors") else torch.save(tensors, path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(WeightsError, match='"Add an encoder" in the documentation') as caught:
        resolve_model(path)
    assert f"its config.json has model_type {model_type})" in str(caught.value)
    assert FOREIGN[model_type][0] in str(caught.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("config", ["[" * 100_000, '{"model_type": "\\u001b[31m' + "x" * 10_000 + '"}', None])
def test_a_hostile_file_of_no_model_is_one_short_sentence(tmp_path, config):
    path, beside = tmp_path / "model.safetensors", tmp_path / "config.json"
    os.mkfifo(beside) if config is None else beside.write_text(config)
    save_file({"\x1b[2J" + "y" * 10_000: torch.zeros(1)}, path)
    with pytest.raises(WeightsError, match="neither an ESM-2") as caught:
        family_of(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000 + len(str(tmp_path))
    for content, what in ((b"", "cannot be read"), (path.read_bytes()[:30], "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(WeightsError, match=what):
            family_of(path)
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(WeightsError, match="it names no tensors"):
        family_of(tmp_path / "model.pt")


def test_nothing_of_a_pickle_is_run_to_recognise_it(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"layers.0.self_attn.rot_emb.inv_freq": Evil()}, tmp_path / "model.pt")
    assert family_of(tmp_path / "model.pt") is ESM2
    assert not (tmp_path / "ran").exists()


def test_a_path_gets_the_right_loader(checkpoint):
    found = resolve_model(checkpoint)
    assert found.family is DNABERT_S
    model, tokenizer = load_dnabert_s(found.weights_path, "cpu")
    assert model.hidden_dim == 16
    assert tokenizer.vocabulary == 4096


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)]
)
def test_a_model_computes_in_the_precision_that_was_asked_for(checkpoint, precision, dtype):
    model, _ = load_dnabert_s(checkpoint, "cpu", precision=precision)
    ids = torch.tensor([1, 17, 99, 2])
    batch = ids, torch.tensor([0, 4], dtype=torch.int32), [4]
    with torch.inference_mode():
        assert model.last_states(*batch).dtype == dtype
    assert model(*batch).dtype == torch.float32


def test_published_weights_have_a_folder_of_their_own(tmp_path):
    spec = MODELS["dnabert-s"]
    (tmp_path / "dnabert-s").mkdir()
    (tmp_path / "dnabert-s" / "pytorch_model.bin").write_bytes(b"weights")
    (tmp_path / "pytorch_model.bin").write_bytes(b"of something else")
    assert resolve_model("dnabert-s", weights_dir=tmp_path).weights_path.read_bytes() == b"weights"
    assert (spec.num_layers, spec.hidden_dim, spec.attention_heads) == (12, 768, 12)
    with torch.device("meta"):
        encoder = PackedMosaicBert(MosaicBertConfig())
    pooler = 768 * 768 + 768
    assert sum(parameter.numel() for parameter in encoder.parameters()) + pooler == spec.num_parameters


def test_the_configuration_survives_json():
    assert MosaicBertConfig.from_json(replace(CONFIG, layer_norm_eps=1e-6).to_json()).layer_norm_eps == 1e-6
