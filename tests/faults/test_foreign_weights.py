"""Weights from somebody hostile: a classifier's that give no sound score, checkpoints that take any time or memory."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import struct
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from tests.settings import prediction_config
from virnucpro.errors import WeightsError
from virnucpro.models.classifier_files.card import CONTIG_WEIGHTS_NAME, WEIGHTS_NAME
from virnucpro.models.dnabert_s import load_dnabert_s
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig
from virnucpro.models.esm2_flash import load_esm2_model
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR

BUNDLED = BUNDLED_WEIGHTS_DIR / "virnucpro-tiny"
GZIP = 31


def spoilt(name, x):
    """Yield what can be wrong with one tensor of numbers; None: it is absent."""
    yield None
    yield x[None]
    yield x[:-1]
    if x.dtype in (np.float32, np.float64):
        for number in (np.nan, np.inf, -np.inf):
            changed = x.copy()
            changed.flat[x.size // 2] = number
            yield changed
    if name.endswith(("running_var", "deviation")):
        for number in (0, -1):
            changed = x.copy()
            changed.flat[x.size // 2] = number
            yield changed


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_tensor_of_a_classifier_that_is_spoilt_in_any_way_is_refused(tmp_path, soak_table):
    taken, tries = [], 0
    folder = shutil.copytree(BUNDLED, tmp_path / "classifier")
    prediction_config(classifier=folder)  # as it is, it is good
    card = json.loads((folder / "card.json").read_text())
    for file_name in (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME):
        plain, is_packed = (BUNDLED / file_name).read_bytes(), file_name == CONTIG_WEIGHTS_NAME
        tensors = load(zlib.decompress(plain, GZIP) if is_packed else plain)
        for name, x in tensors.items():
            for changed in spoilt(name, x):
                others = {other: tensors[other] for other in tensors if other != name}
                data = save(others if changed is None else {**others, name: changed})
                data = zlib.compress(data, 1, GZIP) if is_packed else data
                own = {"weights_sha256": hashlib.sha256(data).hexdigest()}
                if file_name == CONTIG_WEIGHTS_NAME:
                    own = {"contig_model": {**card["contig_model"], **own}}
                (folder / file_name).write_bytes(data)
                (folder / "card.json").write_text(json.dumps({**card, **own}))
                tries += 1
                with suppress(WeightsError):
                    prediction_config(classifier=folder)
                    taken.append((file_name, name, None if changed is None else changed.shape))
        shutil.copy(BUNDLED / file_name, folder / file_name)
    soak_table("a corrupt tensor of a classifier, with a matching sha256", tries=tries, differing=len(taken))
    assert taken == []
    assert tries > 50


GETS = b"N" + b"q\x01h\x01\x86" * 60
GREEDY = {
    "a dictionary whose key takes 2^60 steps to hash": b"}" + GETS + b"K\x01s.",
    "a byte array of 6 GB": b"c__builtin__\nbytearray\n(\x8a\x08" + struct.pack("<q", 6 << 30) + b"tR.",
}


@pytest.mark.parametrize("load_model", [load_esm2_model, load_dnabert_s])
@pytest.mark.parametrize("greedy", GREEDY.values(), ids=GREEDY)
def test_a_checkpoint_of_400_bytes_that_asks_for_any_time_or_memory_is_refused(tmp_path, load_model, greedy):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"data.pkl": greedy, "byteorder": b"little", "version": b"3\n"}.items():
            archive.writestr(f"model/{name}", data)
    (tmp_path / "config.json").write_text(MosaicBertConfig().to_json())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsError, match="takes more time or memory than a sound file"):
        load_model(path, torch.device("cpu"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
