"""A classifier's weights that give no sound score, behind a right sha256: refused before anything is embedded."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.settings import prediction_config
from virnucpro.errors import WeightsError
from virnucpro.models.classifier_files.card import CONTIG_WEIGHTS_NAME, WEIGHTS_NAME
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
