"""An encoder of another package: found by its entry point, run over padded groups, with the rows of the model alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from tests import fake_cuda
from tests.conftest import REPOSITORY
from tests.settings import changed, embedding_config
from tests.strategies import write_fasta
from tests.unit.test_windows import mean_of_windows
from virnucpro.errors import ConfigurationError, UnknownModelError
from virnucpro.models.padded_encoder import ListTokenizer, PaddedEncoder
from virnucpro.models.registry import MODELS, models_table, resolve_model
from virnucpro.store.reader import read_embeddings

SPEC = """
    from dataclasses import replace

    from virnucpro.choices import Precision, SequenceKind
    from virnucpro.models.registry import ModelFamily, ModelSpec

    FAMILY = ModelFamily(
        loader="small_encoder.loading:load",
        sequence_kind=SequenceKind.PROTEIN,
        letters_per_token=1.0,
        max_letters=100,
        gpu_precision=Precision.FP16,
    )
    SPEC = ModelSpec(
        name="small",
        family=FAMILY,
        num_layers=2,
        hidden_dim=16,
        attention_heads=2,
        num_parameters=10_000,
        source="http://127.0.0.1:9/resolve/main/model.safetensors",
        licence="MIT",
    )
    WITHOUT_FAMILY = replace(SPEC, family=FAMILY.loader)
    WITHOUT_ADDRESS = replace(SPEC, source="model.safetensors")
    """
LOADING = """
    from types import SimpleNamespace

    import torch
    from safetensors.torch import load_file
    from torch import nn

    from virnucpro.models.padded_encoder import ListTokenizer, PaddedEncoder


    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(40, 16), nn.Embedding(110, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, input_ids, attention_mask):
            x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
            x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
            return SimpleNamespace(last_hidden_state=x)


    def ids_of(sequences):
        return [[1, *(ord(letter) - 60 for letter in sequence), 2, 3] for sequence in sequences]


    def load(weights_path, device, *, precision):
        model = Small()
        model.load_state_dict(load_file(weights_path))
        encoder = PaddedEncoder(model.to(device), hidden_dim=16, padding_id=0, special_tokens=(1, 2))
        return encoder, ListTokenizer(ids_of)
    """


def make_package(folder, package, names, version="1.2"):
    """Write a package as an installer does, with an entry point for each of *names*."""
    info = folder / f"{package}-{version}.dist-info"
    for path, text in (
        (info / "METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"),
        (info / "entry_points.txt", "[virnucpro.models]\n" + "".join(f"{name} = {at}\n" for name, at in names.items())),
        (folder / package / "__init__.py", textwrap.dedent(SPEC)),
        (folder / package / "loading.py", textwrap.dedent(LOADING)),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages with one that has a model, and its weights; on the path only while it is imported."""
    folder = tmp_path_factory.mktemp("site")
    make_package(folder, "small_encoder", {"small": "small_encoder:SPEC"})
    weights = folder / "weights" / "small" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    sys.path.insert(0, str(folder))
    try:
        from small_encoder.loading import Small
    finally:
        sys.path.remove(str(folder))
    torch.manual_seed(7)
    save_file(Small().state_dict(), weights)
    return folder


@pytest.fixture(scope="module")
def model(site):
    """Give the row of a sequence that is computed alone, without our code."""
    from small_encoder.loading import load

    encoder, tokenizer = load(site / "weights" / "small" / "model.safetensors", "cpu", precision="fp32")

    @torch.inference_mode()
    def row(sequence):
        ids = torch.tensor(tokenizer.ids_of([sequence]))
        return encoder.model(ids, torch.ones_like(ids)).last_hidden_state[0, 1:-2].mean(0).numpy()

    return SimpleNamespace(encoder=encoder, tokenizer=tokenizer, row=row)


def embed(site, folder, sequences, *options):
    records = [(f"p{number}", sequence) for number, sequence in enumerate(sequences)]
    source = write_fasta(folder / "in.fasta", records)
    command = [sys.executable, "-m", "virnucpro", "embed", source, "-o", folder / "out", "--model", "small", *options]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}",
        "VIRNUCPRO_WEIGHTS": str(site / "weights"),
    }
    done = subprocess.run([*command, "--devices", "cpu"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = read_embeddings(folder / "out")
    return [rows[name] for name, _ in records]


def sequences_of(lengths):
    generator = np.random.default_rng(11)
    return ["".join(generator.choice(list("ACDEFGHIKLMNPQRSTVWY"), length)) for length in lengths]


@pytest.mark.parametrize(
    "lengths",
    [[1, 2, 3, 15, 16, 17, 31, 33, 50, 64, 77, 99, 100, 5, 12, 100], [37], [40] * 9],
    ids=["odd lengths", "one sequence", "equal lengths"],
)
def test_rows_of_worker_processes_are_those_of_the_model_alone(tmp_path, site, model, lengths):
    sequences = sequences_of(lengths)
    found = embed(site, tmp_path, sequences, "--workers", "2")
    assert np.abs(np.array(found) - np.array([model.row(sequence) for sequence in sequences])).max() < 1e-5
    assert found[0].dtype == np.float32
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["provider"] == "small_encoder 1.2"


def test_rows_of_windows_are_the_mean_of_the_models_own(tmp_path, site, model):
    sequences = sequences_of([300, 20, 100, 101, 7])
    found = embed(site, tmp_path, sequences, "--long", "window", "--loader-processes", "1")
    expected = [mean_of_windows(sequence, 100, model.row) for sequence in sequences]
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-5


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_any_batch_has_the_rows_of_each_sequence_alone(model, lengths):
    sequences = sequences_of(lengths)
    ids, lengths_S = model.tokenizer.encode(sequences)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths_S)], dtype=torch.int32)
    found_SD = model.encoder(torch.from_numpy(ids), cu_seqlens, lengths_S.tolist())
    assert np.abs(found_SD.numpy() - np.array([model.row(sequence) for sequence in sequences])).max() < 1e-5


class Noted(nn.Module):
    """Gives states that tell tokens from padding, in bfloat16; keeps what it was called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, input_ids, attention_mask):
        self.calls.append((input_ids, attention_mask))
        return torch.where(attention_mask == 0, torch.nan, input_ids)[:, :, None].expand(-1, -1, 4).bfloat16()


def test_padding_has_its_token_is_masked_and_never_reaches_a_row():
    lengths, noted = [3, 9, 4, 8], Noted()
    encoder = PaddedEncoder(noted, hidden_dim=4, padding_id=99, special_tokens=(0, 0))
    ids_T = torch.cat([torch.full((length,), length) for length in lengths])
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    rows_SD = encoder(ids_T, bounds, lengths)
    assert rows_SD.tolist() == [[length] * 4 for length in lengths]
    assert rows_SD.dtype is torch.float32
    for input_ids, mask in noted.calls:
        assert ((input_ids == 99) == (mask == 0)).all()
        assert input_ids.shape[1] == mask.sum(dim=1).max()  # a model may have no more positions
    assert sum(int(mask.sum()) for _, mask in noted.calls) == sum(lengths)
    assert encoder.attention.name == "padded Noted"


def test_little_is_padded_where_lengths_differ_much():
    lengths, noted = [*range(10, 1000, 7)], Noted()
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    PaddedEncoder(noted, hidden_dim=4, padding_id=0)(torch.ones(sum(lengths), dtype=torch.int64), bounds, lengths)
    assert sum(input_ids.numel() for input_ids, _ in noted.calls) < 1.25 * sum(lengths)
    assert len(noted.calls) < 15


def test_on_a_gpu_the_host_never_waits():
    encoder = PaddedEncoder(Noted(), hidden_dim=4, padding_id=0)
    with fake_cuda.fake_cuda():
        for lengths in ([168] * 5, [1024, 700, 64, 33, 3], [90, 130, 3000]):
            bounds = torch.empty(len(lengths) + 1, dtype=torch.int32, device=fake_cuda.DEVICE)
            ids_T = torch.empty(sum(lengths), dtype=torch.int64, device=fake_cuda.DEVICE)
            rows_SD = encoder(ids_T, bounds, lengths)
            assert (rows_SD.shape, rows_SD.device) == ((len(lengths), 4), fake_cuda.DEVICE)


def test_token_lists_are_packed_in_order():
    ids, lengths = ListTokenizer(lambda texts: [[len(text)] * len(text) for text in texts]).encode(["abc", "d", "ef"])
    assert (ids.tolist(), ids.dtype) == ([3, 3, 3, 1, 2, 2], np.int64)
    assert (lengths.tolist(), lengths.dtype) == ([3, 1, 2], np.int32)


def test_a_model_of_a_package_is_found_listed_and_suggested(site, monkeypatch):
    monkeypatch.setenv("VIRNUCPRO_WEIGHTS", str(site / "weights"))
    monkeypatch.syspath_prepend(site)
    found = resolve_model("small")
    assert (found.name, found.hidden_dim, found.provider) == ("small", 16, "small_encoder 1.2")
    assert found.weights_path == site / "weights" / "small" / "model.safetensors"
    rows = {spec.name: path for spec, path in models_table()}
    assert list(rows) == [*MODELS, "small"]
    assert rows["small"] == found.weights_path
    with pytest.raises(UnknownModelError, match="choose one of small, "):
        resolve_model("smal")


def test_packages_are_not_looked_at_for_our_own_models(monkeypatch):
    monkeypatch.setattr("virnucpro.models.registry.entry_points", pytest.fail)
    assert resolve_model("virnucpro-tiny-protein").provider == ""


def test_a_name_of_ours_stays_ours(tmp_path, monkeypatch):
    make_package(tmp_path, "greedy", {"virnucpro-tiny-protein": "greedy:SPEC"})
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model("virnucpro-tiny-protein").provider == ""
    assert [spec.provider for spec, _ in models_table() if spec.name == "virnucpro-tiny-protein"] == [""]
    with pytest.raises(UnknownModelError) as caught:
        resolve_model("virnucpro-tiny")
    assert len(caught.value.known) == len(set(caught.value.known))


@pytest.mark.parametrize("use", [lambda: resolve_model("twice"), models_table])
def test_a_name_that_two_packages_claim_is_a_sentence(tmp_path, monkeypatch, use):
    make_package(tmp_path, "one", {"twice": "one:SPEC"})
    make_package(tmp_path, "other", {"twice": "other:SPEC"}, version="3")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        use()
    packages, both = str(caught.value).split(" each add a model twice: ")
    assert (sorted(packages.split(" and ")), both) == (["one 1.2", "other 3"], "uninstall all but one")


@pytest.mark.parametrize(
    "at",
    [
        "absent.module:SPEC",
        "broken:ABSENT",
        "broken:FAMILY",
        "broken",
        "broken:WITHOUT_FAMILY",
        "broken:WITHOUT_ADDRESS",
    ],
)
def test_a_broken_package_is_a_sentence_that_names_it(tmp_path, monkeypatch, at):
    make_package(tmp_path, "broken", {"bad": at})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"^model bad of broken 1\.2 cannot be used \({at}: \w+Error: "):
        resolve_model("bad")
    broken = []
    assert [spec.name for spec, _ in models_table(on_broken=broken.append)] == list(MODELS)
    assert [str(error).partition(" of ")[0] for error in broken] == ["model bad"]


def test_another_version_of_the_package_is_another_run_and_another_cache():
    configs = [changed(embedding_config(), provider=provider) for provider in ("", "small 1", "small 2")]
    assert len({config.cache_space() for config in configs}) == 3
    assert [config.result_settings().get("provider") for config in configs] == [None, "small 1", "small 2"]
