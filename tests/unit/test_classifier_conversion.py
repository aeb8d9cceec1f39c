"""The published file becomes safetensors with torch's own numbers; a hostile or damaged one is refused unrun."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from virnucpro.errors import ClassifierFileError, ConfigurationError, ExitCode
from virnucpro.models.classifier import load_classifier
from virnucpro.models.classifier_files.card import read_card
from virnucpro.models.classifier_files.conversion import convert_classifier
from virnucpro.models.registry import MODELS

# as the published training script saves: the class is of __main__, and the file holds the module itself
TRAINING_SCRIPT = """
import sys, torch
from torch import nn
import torch.nn.functional as F

class MLPClassifier(nn.Module):
    def __init__(self, input_dim, hidden_dim, num_class):
        super().__init__()
        self.hidden_layer = nn.Linear(input_dim, hidden_dim)
        self.bn1 = nn.BatchNorm1d(hidden_dim)
        self.output_layer = nn.Linear(hidden_dim, num_class)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.output_layer(self.dropout(F.relu(self.bn1(self.hidden_layer(x)))))

folder = sys.argv[1]
torch.manual_seed(5)
model = MLPClassifier(3328, 512, 2)
x = torch.randn(2000, 3328) * 0.2 + 0.05
for _ in range(2):
    model(x)  # in training mode: the batch norm gets statistics of its own
model.output_layer.weight.data *= 10
torch.save(model, f"{folder}/500_model.pth")
torch.save(model.state_dict(), f"{folder}/300_weights.pth")
torch.save(model.double(), f"{folder}/500_double.pth")
torch.save(model.float(), f"{folder}/500_old.pth", _use_new_zipfile_serialization=False)
probabilities = torch.softmax(model.eval()(x[:300]), dim=1).detach()
torch.save({"x": x[:300], "probabilities": probabilities}, f"{folder}/expected.pt")
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with files as the published script writes them, and what torch's own module says."""
    folder = tmp_path_factory.mktemp("published")
    script = folder / "train.py"
    script.write_text(TRAINING_SCRIPT)
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder


def _assert_equal_to_torch(classifier_folder, published):
    expected = torch.load(published / "expected.pt", weights_only=True)
    found = load_classifier(classifier_folder).probabilities(expected["x"].numpy())
    np.testing.assert_allclose(found, expected["probabilities"].numpy(), rtol=0, atol=1e-6)
    assert found.std() > 0.1


def test_the_published_layout_converts_and_gives_the_numbers_of_torch(published, tmp_path):
    card = convert_classifier(published / "500_model.pth", tmp_path / "mine")
    _assert_equal_to_torch(tmp_path / "mine", published)
    assert card == read_card(tmp_path / "mine")
    assert (card.name, card.chunk_nt, card.input_dim, card.hidden_dim) == ("500_model", 500, 3328, 512)
    assert (card.dna_model.name, card.protein_model.name) == ("dnabert-s", "esm2_t36_3B_UR50D")
    sha256 = subprocess.run(["sha256sum", published / "500_model.pth"], capture_output=True, text=True, check=True)
    assert card.source_sha256 == sha256.stdout.split()[0]
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["card.json", "model.safetensors"]


def test_a_dictionary_of_tensors_is_read_too_and_the_name_gives_the_chunk_length(published, tmp_path):
    card = convert_classifier(published / "300_weights.pth", tmp_path / "mine")
    assert card.chunk_nt == 300
    _assert_equal_to_torch(tmp_path / "mine", published)


def test_converting_again_gives_the_same_bytes(published, tmp_path):
    for name in ("one", "two"):
        convert_classifier(published / "500_model.pth", tmp_path / name)
    for file in ("card.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


# --- settings --------------------------------------------------------------------------------------------------------


def test_another_classifier_in_the_folder_is_not_replaced(published, tmp_path):
    convert_classifier(published / "500_model.pth", tmp_path / "mine")
    before = (tmp_path / "mine/model.safetensors").read_bytes()
    with pytest.raises(ConfigurationError, match="holds another classifier"):
        convert_classifier(published / "300_weights.pth", tmp_path / "mine")
    assert (tmp_path / "mine/model.safetensors").read_bytes() == before


def test_weights_of_the_models_that_are_here_are_pinned(published, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/esm2_t36_3B_UR50D.pt").write_bytes(b"of the 3B model")
    card = convert_classifier(published / "500_model.pth", tmp_path / "mine", weights_dir=tmp_path / "weights")
    assert card.protein_model.sha256 == hashlib.sha256(b"of the 3B model").hexdigest()
    assert card.dna_model.sha256 is None
    assert load_classifier(tmp_path / "mine").card == card


def test_without_a_length_in_the_name_it_is_asked_for(published, tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes((published / "500_model.pth").read_bytes())
    with pytest.raises(ConfigurationError, match="--chunk"):
        convert_classifier(path, tmp_path / "mine")
    assert convert_classifier(path, tmp_path / "mine", chunk_nt=450).chunk_nt == 450


def test_models_of_other_widths_are_refused_in_words(published, tmp_path):
    says = r"takes 3,328 features, dnabert-s \(768\) and esm2_t33_650M_UR50D \(1,280\) give 2,048"
    with pytest.raises(ClassifierFileError, match=says):
        convert_classifier(published / "500_model.pth", tmp_path / "mine", protein_model="esm2_t33_650M_UR50D")


def test_unknown_models_and_models_of_the_other_kind_are_refused(published, tmp_path):
    with pytest.raises(ConfigurationError, match=r"'dnabert' is no registered model: name one of .*dnabert-s") as error:
        convert_classifier(published / "500_model.pth", tmp_path / "mine", dna_model="dnabert")
    assert all((name in str(error.value)) is ("dna" in name) for name in MODELS)
    with pytest.raises(ConfigurationError, match="esm2_t36_3B_UR50D embeds protein: name a model of DNA"):
        convert_classifier(published / "500_model.pth", tmp_path / "mine", dna_model="esm2_t36_3B_UR50D")
    assert not (tmp_path / "mine").exists()


# --- files that would do something -----------------------------------------------------------------------------------


class Calls:
    """Calls *function* with *arguments* when it is unpickled by somebody trusting."""

    def __init__(self, function, *arguments, state=None):
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.call


def _archive(path, pickled, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **entries}.items():
            archive.writestr(f"model/{name}", data)


def _refusal(path, tmp_path):
    with pytest.raises(ClassifierFileError) as error:
        convert_classifier(path, tmp_path / "mine", chunk_nt=500)
    assert error.value.exit_code is ExitCode.BAD_INPUT
    assert not (tmp_path / "mine").exists()
    return error.value.what


def _payloads(canary):
    touch = f"open({canary!r}, 'w')"
    return {
        "os.system": Calls(os.system, f"touch {canary}"),
        "builtins.eval": Calls(eval, touch),
        "builtins.exec": Calls(exec, touch),
        "builtins.getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "builtins.__import__": Calls(__import__, "os"),
        "io.open": Calls(io.open, canary, "w"),
        "subprocess.Popen": Calls(subprocess.Popen, ["touch", canary]),
        "torch.serialization.load": Calls(torch.load, canary, None, None),
        "torch.storage._load_from_bytes": Calls(torch.storage._load_from_bytes, b"bytes"),
        "torch.jit._serialization.load": Calls(torch.jit.load, canary),
        "numpy.load": Calls(np.load, canary),
    }


PLACES = {
    "alone": lambda payload: payload,
    "as a weight": lambda payload: {"hidden_layer.weight": payload},
    "beside": lambda payload: {"extra": [({"deep": payload},)]},
    "as a state": lambda payload: Calls(torch.nn.Dropout, state={"p": payload}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", _payloads(""))
def test_a_file_that_asks_for_anything_else_is_refused_by_name(name, place, tmp_path):
    canary = tmp_path / "canary"
    payload = PLACES[place](_payloads(str(canary))[name])
    path = tmp_path / "500_evil.pth"
    torch.save(payload, path)
    what = _refusal(path, tmp_path)
    names = {"os.system": "posix.system", "io.open": f"{open.__module__}.open", "subprocess.Popen": "commands.Popen"}
    asked = names.get(name, name).removeprefix("builtins.")  # Python 2's names, as pickles of protocol 2 have them
    assert f"refused: it asks for {asked}; nothing in it was run" in what
    assert not canary.exists()


def test_the_payloads_do_run_in_hands_that_trust_them(tmp_path):
    canary = tmp_path / "canary"
    torch.save(_payloads(str(canary))["os.system"], tmp_path / "evil.pth")
    torch.load(tmp_path / "evil.pth", weights_only=False)
    assert canary.exists()


REFUSED = "nothing in it was run"
BAD_PICKLES = {
    "os named outright": ("cos\nsystem\n(Vtouch CANARY\ntR.", f"it asks for os.system; {REFUSED}"),
    "INST": ("(Vtouch CANARY\nios\nsystem\n.", REFUSED),
    "INST of an admitted class": ("(icollections\nOrderedDict\n.", REFUSED),
    "OBJ": ("(ccollections\nOrderedDict\no.", REFUSED),
    "EXT1": ("\x82\x01.", REFUSED),
    "a dotted name": ("c__main__\nMLPClassifier.__init__\n.", "asks for __main__.MLPClassifier.__init__"),
    "a class of another module": ("cevil\nMLPClassifier\n.", "asks for evil.MLPClassifier"),
    "a name that never ends": ("c" + "a" * 5000 + "\nb\n.", "asks for a{100};"),
    "a global": ("ccollections\nOrderedDict\n.", "is not a published classifier"),
    "a call of what was made": ("ccollections\nOrderedDict\n)R)R.", REFUSED),
    "a state that sets a class": (
        "c__main__\nMLPClassifier\n)\x81}X\x0c\x00\x00\x00__setstate__c__builtin__\nset\nsb.",
        "is not a published classifier",
    ),
    "a state that is no dictionary": ("c__main__\nMLPClassifier\n)\x81]b.", "is not a published classifier"),
    "a key that is no text": ("}K\x01K\x01s.", "is not a published classifier"),
    "items of a list": ("]X\x01\x00\x00\x00aK\x01s.", REFUSED),
    "too little on the stack": ("R.", "is not a published classifier"),
    "a memo that is empty": ("h\x05.", "is not a published classifier"),
    "nothing": ("", "cannot be read"),
    "cut short": ("X\x0c\x00\x00\x00abc", "cannot be read"),
    "letters that are no UTF-8": ("X\x01\x00\x00\x00\xff.", "is not a published classifier"),
    "a huge text": ("X\xff\xff\xff\x7fabc.", "cannot be read"),
    "a huge number": ("\x8b\xff\xff\xff\x7f1.", REFUSED),
}


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_a_pickle_written_by_hand_is_refused_too(name, tmp_path):
    text, says = BAD_PICKLES[name]
    canary = tmp_path / "canary"
    _archive(tmp_path / "500_evil.pth", text.replace("CANARY", str(canary)).encode("latin-1"))
    assert re.search(says, _refusal(tmp_path / "500_evil.pth", tmp_path))
    assert not canary.exists()


# --- files that are damaged or something else ------------------------------------------------------------------------


class Reference:
    """A persistent id."""

    def __init__(self, reference):
        self.reference = reference


class Pickler(pickle.Pickler):
    """Writes ``Reference`` as torch writes storages."""

    def persistent_id(self, obj):
        return obj.reference if isinstance(obj, Reference) else None


def _state(weight_reference, *, offset=0, shape=(512, 3328), strides=(3328, 1)):
    """The state of a classifier whose first weight has this reference; the other tensors are as they should be."""
    shapes = {"hidden_layer.bias": (512,), "output_layer.weight": (2, 512), "output_layer.bias": (2,)}
    shapes |= {f"bn1.{name}": (512,) for name in ("weight", "bias", "running_mean", "running_var")}
    described = {"hidden_layer.weight": _tensor(weight_reference, offset, shape, strides)}
    for number, (name, its_shape) in enumerate(shapes.items(), 1):
        numel = int(np.prod(its_shape))
        reference = ("storage", torch.FloatStorage, str(number), "cpu", numel)
        described[name] = _tensor(reference, 0, its_shape, (512, 1)[-len(its_shape) :])
    return described


def _tensor(reference, *place):
    return Calls(torch._utils._rebuild_tensor_v2, Reference(reference), *place, False, {})


def _archive_of(path, contents, first=None, **entries):
    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(contents)
    sizes = [512, 1024, 2, 512, 512, 512, 512]
    data = {f"data/{number}": np.ones(size, "<f4").tobytes() for number, size in enumerate(sizes, 1)}
    first = np.zeros(512 * 3328, "<f4").tobytes() if first is None else first
    _archive(path, buffer.getvalue(), **{"data/0": first, **data, **entries})


GOOD = ("storage", torch.FloatStorage, "0", "cpu", 512 * 3328)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_an_archive_made_by_hand_converts_so_that_the_refusals_below_mean_something(device, tmp_path):
    _archive_of(tmp_path / "500_hand.pth", _state((*GOOD[:3], device, GOOD[4])))
    convert_classifier(tmp_path / "500_hand.pth", tmp_path / "mine")
    features = np.ones((3, 3328), np.float32)
    np.testing.assert_array_equal(load_classifier(tmp_path / "mine").probabilities(features), np.full((3, 2), 0.5))


@pytest.mark.parametrize(
    ("reference", "place", "says"),
    [
        (7, {}, "is not a published classifier"),
        ((), {}, "is not a published classifier"),
        (("module", torch.nn.Linear, "source.py", "import os"), {}, "nothing in it was run"),
        (("storage", "torch.FloatStorage", "0", "cpu", 512 * 3328), {}, "is not a published classifier"),
        (("storage", torch.FloatStorage, "0", "cpu", "many"), {}, "is not a published classifier"),
        (("storage", torch.FloatStorage, "../../etc/passwd", "cpu", 10), {}, "cannot be read"),
        (("storage", torch.FloatStorage, "9", "cpu", 512 * 3328), {}, "cannot be read"),
        (("storage", torch.FloatStorage, "0", "cpu", 100), {}, "cannot be read"),
        (("storage", torch.FloatStorage, "0", "cpu", -1), {}, "cannot be read"),
        (("storage", torch.HalfStorage, "0", "cpu", 512 * 3328), {}, "is not of finite numbers in float32"),
        (("storage", torch.LongStorage, "0", "cpu", 512 * 3328), {}, "cannot be read"),
        (GOOD, {"offset": 1}, "cannot be read"),
        (GOOD, {"offset": -1}, "cannot be read"),
        (GOOD, {"shape": (1 << 40, 3328)}, "cannot be read"),
        (GOOD, {"shape": (1 << 40, 3328), "strides": (0, 1)}, "does not hold the published classifier"),
        (GOOD, {"shape": (512, 1 << 40), "strides": (1, 0)}, "states more numbers than it holds"),
        (GOOD, {"shape": (3328, 512), "strides": (1, 3328)}, "does not hold the published classifier"),
        (GOOD, {"shape": (512, 3328, 1), "strides": (3328, 1, 1)}, "is not a published classifier"),
        (GOOD, {"shape": (512 * 3328,), "strides": (1,)}, "is not a published classifier"),
        (GOOD, {"shape": (511, 3328)}, "does not hold the published classifier"),
        (GOOD, {"shape": (512, 3000), "strides": (3000, 1)}, "takes 3,000 features"),
        (GOOD, {"shape": (0, 3328)}, "does not hold the published classifier"),
        (GOOD, {"shape": (512, 0)}, "is not of finite numbers"),
    ],
)
def test_a_tensor_that_is_not_what_torch_saves_is_refused(reference, place, says, tmp_path):
    _archive_of(tmp_path / "500_odd.pth", _state(reference, **place))
    assert says in _refusal(tmp_path / "500_odd.pth", tmp_path)


@pytest.mark.parametrize("name", ["hidden_layer.bias", "bn1.running_var"])
def test_a_missing_tensor_and_one_too_many_are_named(name, tmp_path):
    state = _state(GOOD)
    other = {**state, "second_layer.weight": state.pop(name)}
    _archive_of(tmp_path / "500_odd.pth", state)
    assert f"see ['{name}']" in _refusal(tmp_path / "500_odd.pth", tmp_path)
    _archive_of(tmp_path / "500_odd.pth", {**other, **_state(GOOD)})
    assert "see ['second_layer.weight']" in _refusal(tmp_path / "500_odd.pth", tmp_path)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    numbers = np.zeros(512 * 3328, "<f4")
    numbers[77] = np.nan
    _archive_of(tmp_path / "500_odd.pth", _state(GOOD), numbers.tobytes())
    assert "hidden_layer.weight is not of finite numbers" in _refusal(tmp_path / "500_odd.pth", tmp_path)


def test_a_module_of_doubles_is_refused(published, tmp_path):
    assert "is not of finite numbers in float32" in _refusal(published / "500_double.pth", tmp_path)


@pytest.mark.parametrize("kept", [0, 1, 30, 1000, 100_000, -1000, -22, -1])
def test_a_file_cut_short_is_refused(published, tmp_path, kept):
    (tmp_path / "500_cut.pth").write_bytes((published / "500_model.pth").read_bytes()[:kept])
    assert "cut short" in _refusal(tmp_path / "500_cut.pth", tmp_path)


def test_flipped_bytes_give_a_refusal_or_the_same_classifier(published, tmp_path):
    original = (published / "300_weights.pth").read_bytes()
    chooser, refused = np.random.default_rng(9), 0
    places = [*chooser.integers(0, 2000, 30), *chooser.integers(len(original) - 3000, len(original), 30)]
    convert_classifier(published / "300_weights.pth", tmp_path / "good")
    for place in [*places, len(original) // 2]:
        changed = bytearray(original)
        changed[place] ^= 1 << int(chooser.integers(8))
        (tmp_path / "300_bad.pth").write_bytes(changed)
        try:
            shutil.rmtree(tmp_path / "bad", ignore_errors=True)
            convert_classifier(tmp_path / "300_bad.pth", tmp_path / "bad")
        except ClassifierFileError:
            refused += 1
        else:
            weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("good", "bad")]
            assert weights[0] == weights[1]
    assert refused > 10


def test_formats_before_1_6_and_other_files_are_refused(published, tmp_path):
    assert "no archive of torch.save" in _refusal(published / "500_old.pth", tmp_path)
    path = tmp_path / "500_other.pth"
    path.write_bytes(b"<html>log in first</html>")
    assert "no archive of torch.save" in _refusal(path, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "")
    assert "cannot be read" in _refusal(path, tmp_path)
    _archive_of(path, _state(GOOD), **{"constants.pkl": b""})
    assert "cannot be read" in _refusal(path, tmp_path)


def test_an_archive_that_unpacks_to_more_than_memory_is_refused(tmp_path):
    path = tmp_path / "500_bomb.pth"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/version", "3\n")
        with archive.open("model/data.pkl", "w") as entry:
            for _ in range(16):
                entry.write(b"N" * (1 << 26))
    assert "damaged: reading it crashes, or takes more time or memory" in _refusal(path, tmp_path)


@pytest.mark.timeout(20)
def test_a_value_that_would_take_forever_to_print_is_refused_at_once(published, tmp_path):
    with zipfile.ZipFile(published / "500_model.pth") as archive:
        entries = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    eps = b"G" + struct.pack(">d", 1e-5)
    assert entries["data.pkl"].count(eps) == 1
    doubled = b"N" + b"q\xfah\xfa\x86" * 60  # a pair of a pair of a pair
    pickled = entries.pop("data.pkl").replace(eps, doubled)
    _archive(tmp_path / "500_long.pth", pickled, **entries)
    assert "its batch norm adds a tuple to the variance" in _refusal(tmp_path / "500_long.pth", tmp_path)


def test_a_file_that_is_absent_or_a_folder_is_one_sentence(tmp_path):
    assert "No such file" in _refusal(tmp_path / "500_absent.pth", tmp_path)
    (tmp_path / "500_folder.pth").mkdir()
    assert "directory" in _refusal(tmp_path / "500_folder.pth", tmp_path)


@pytest.mark.timeout(20)
def test_a_named_pipe_is_one_sentence(tmp_path):
    os.mkfifo(tmp_path / "500_pipe.pth")
    assert "not a regular file" in _refusal(tmp_path / "500_pipe.pth", tmp_path)


# --- the recorded run ------------------------------------------------------------------------------------------------


def _golden(data_dir):
    merged = torch.load(data_dir / "golden" / "test_with_orfs_merged_output_1_merged.pt", weights_only=True)
    lines = (data_dir / "golden" / "test_with_orfs_merged_prediction_results.txt").read_text().splitlines()[1:]
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in lines}
    assert sorted(merged["ids"]) == sorted(rows)
    return merged["data"].numpy(), [rows[name] for name in merged["ids"]]


def test_golden_features_are_taken_as_they_are(data_dir, published, tmp_path):
    convert_classifier(published / "500_model.pth", tmp_path / "mine")
    features, rows = _golden(data_dir)
    found = load_classifier(tmp_path / "mine").probabilities(features)
    assert found.shape == (len(rows), 2) == (4, 2)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


PUBLISHED_VARIABLE = "VIRNUCPRO_PUBLISHED_CLASSIFIER"


@pytest.mark.data
@pytest.mark.may_skip
def test_the_published_classifier_gives_the_recorded_scores(data_dir, tmp_path):
    if PUBLISHED_VARIABLE not in os.environ:
        pytest.skip(f"the published 500_model.pth is not to be had here: name yours in {PUBLISHED_VARIABLE}")
    convert_classifier(os.environ[PUBLISHED_VARIABLE], tmp_path / "mine", chunk_nt=500)
    features, rows = _golden(data_dir)
    found = load_classifier(tmp_path / "mine").probabilities(features)
    np.testing.assert_allclose(found, [[float(x) for x in row[1:]] for row in rows], rtol=0, atol=1e-5)
    assert ["virus" if row[1] > row[0] else "others" for row in found] == [row[0] for row in rows]
