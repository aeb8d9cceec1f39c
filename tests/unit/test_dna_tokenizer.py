"""DNABERT-S's tokens: the ids of the published tokenizer itself, nothing cut, nothing padded, proteins refused."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from virnucpro.errors import SequenceError, WeightsError
from virnucpro.models.encoders.dnabert_checkpoint import BUNDLED_TOKENIZER, NUCLEOTIDE_LETTERS, DnaTokenizer

CLS, SEP, UNK = 1, 2, 0


@pytest.fixture(scope="module")
def tokenizer():
    return DnaTokenizer()


def _genomes(data_dir):
    for name in ("train_nonviral_bacteria", "train_virus_eukaryotic_virus", "train_nonviral_eukaryote"):
        text = gzip.decompress((data_dir / "viral" / f"{name}.fna.gz").read_bytes()).decode()
        records = ["".join(record.split("\n")[1:]) for record in text.split(">")[1:]]
        with_n = [letters for letters in records if "N" in letters]
        yield from [*records[:3], *with_n[:3]]


@pytest.mark.data
def test_ids_of_real_genomes_are_the_published_tokenizers(data_dir, tokenizer):
    published = Tokenizer.from_file(str(data_dir / "dnabert_s" / "tokenizer.json"))
    genomes = list(_genomes(data_dir))
    assert sum("N" * 20 in letters for letters in genomes) >= 2
    assert any(set(letters) - set("ACGTN") for letters in genomes)
    input_ids, lengths = tokenizer.encode(genomes)
    expected = [published.encode(letters) for letters in genomes]
    assert lengths.tolist() == [len(encoding.ids) for encoding in expected]
    assert input_ids.tolist() == [token for encoding in expected for token in encoding.ids]
    assert all(encoding.tokens[0] == "[CLS]" and encoding.tokens[-1] == "[SEP]" for encoding in expected)
    assert max(lengths) > 8000


@pytest.mark.data
def test_bundled_tokenizer_is_the_published_one(data_dir):
    published = json.loads((data_dir / "dnabert_s" / "tokenizer.json").read_text())
    assert json.loads(BUNDLED_TOKENIZER.read_text()) == published


def test_every_sequence_is_between_cls_and_sep_and_none_is_padded(tokenizer):
    input_ids, lengths = tokenizer.encode(["A", "ACGT" * 700, "TT"])
    assert (input_ids.dtype, lengths.dtype) == (np.int64, np.int32)
    ends = np.cumsum(lengths)
    assert input_ids[ends - 1].tolist() == [SEP] * 3
    assert input_ids[ends - lengths].tolist() == [CLS] * 3
    assert lengths[0] == 3
    assert lengths[1] > 512
    assert len(input_ids) == lengths.sum()
    assert tokenizer.mask_id not in input_ids.tolist()


def test_a_letter_that_stands_for_several_nucleotides_is_one_unknown_token(tokenizer):
    for letter in set(NUCLEOTIDE_LETTERS) - set("ACGT"):
        assert tokenizer.encode([letter * 3])[0].tolist() == [CLS, UNK, UNK, UNK, SEP]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("MKTAYIAK", "sequence 2 of the batch: letter 5 is 'Y'"),
        ("ACGU", "letter 4 is 'U'.*write T for U"),
        ("A-C", "'-'"),
    ],
)
def test_a_letter_that_stands_for_no_nucleotide_is_an_error(tokenizer, wrong, says):
    says = says.replace("letter 5 is 'Y'", "letter 6 is 'I'")
    with pytest.raises(SequenceError, match=says):
        tokenizer.encode(["ACGT", wrong])


def test_another_vocabulary_beside_the_weights_is_refused_and_the_same_one_is_not(tmp_path):
    beside = tmp_path / "tokenizer.json"
    contents = json.loads(BUNDLED_TOKENIZER.read_text())
    contents["truncation"] = {"max_length": 512, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    contents["model"]["merges"] = [pair.split(" ") for pair in contents["model"]["merges"]]
    beside.write_text(json.dumps(contents))
    assert len(DnaTokenizer.of_checkpoint(tmp_path / "w.bin").encode(["ACGTTGCA" * 999])[0]) > 600
    contents["model"]["merges"].reverse()
    beside.write_text(json.dumps(contents))
    with pytest.raises(WeightsError, match="differs from the tokens of DNABERT-2"):
        DnaTokenizer.of_checkpoint(tmp_path / "w.bin")
    beside.write_text("{}")
    with pytest.raises(WeightsError, match="cannot be read"):
        DnaTokenizer.of_checkpoint(tmp_path / "w.bin")
