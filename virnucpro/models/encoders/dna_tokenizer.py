"""
Nucleotides to the BPE tokens of DNABERT-2 and DNABERT-S, by the ``tokenizers`` library.

The published ``tokenizer.json`` is bundled; its 4,096 tokens are the vocabulary of every DNA model here. Gives the ids
of the published tokenizer, [CLS] and [SEP] included; an IUPAC letter besides A, C, G and T is [UNK], as there, and a
letter of no nucleotide is an error. Never truncates, pads or upper-cases. Legend: T packed tokens, S sequences.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from virnucpro.choices import DEFAULT_DNA_MODEL
from virnucpro.errors import SequenceError, WeightsError
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BUNDLED_TOKENIZER = BUNDLED_WEIGHTS_DIR / DEFAULT_DNA_MODEL / "tokenizer.json"
"""DNABERT-S's published file, truncation and padding switched off."""
TOKENIZER_NAME = "tokenizer.json"
"""The same beside a published checkpoint."""

NUCLEOTIDE_LETTERS = "ACGTRYSWKMBDHVN"
_NO_NUCLEOTIDE = re.compile(f"[^{NUCLEOTIDE_LETTERS}]")


class DnaTokenizer:
    """
    Turns nucleotides into packed token ids.

    Attributes:
        vocabulary: Number of tokens.
        cls_id: Id of [CLS], before every sequence.
        sep_id: Id of [SEP], after every sequence.
        mask_id: Id of [MASK].
        num_special: Ids below this are special tokens.
    """

    def __init__(self) -> None:
        self._bpe = Tokenizer.from_file(str(BUNDLED_TOKENIZER))
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.vocabulary: int = self._bpe.get_vocab_size()
        ids = self._bpe.get_vocab()
        self.cls_id, self.sep_id, self.mask_id = (ids[name] for name in ("[CLS]", "[SEP]", "[MASK]"))
        self.num_special = 1 + max(number for name, number in ids.items() if name.startswith("["))

    @classmethod
    def of_checkpoint(cls, weights_path: Path) -> DnaTokenizer:
        """Return the tokenizer for *weights_path*: the bundled one, which a file beside the weights must equal."""
        beside = weights_path.parent / TOKENIZER_NAME
        if beside.is_file() and _model_of(beside) != _model_of(BUNDLED_TOKENIZER):
            what = f"{beside} differs from the tokens of DNABERT-2 and DNABERT-S, the only supported vocabulary"
            raise WeightsError(weights_path.stem, what)
        return cls()

    def encode(self, sequences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """
        Pack *sequences* of upper-case IUPAC letters as tokens, each between [CLS] and [SEP].

        Returns:
            ``input_ids_T`` int64, shape (T,), and the tokens of each sequence, [CLS] and [SEP] included, int32, (S,).

        Raises:
            SequenceError: A letter of no nucleotide; names the sequence by its number in the batch, from 1.
        """
        for number, letters in enumerate(sequences, start=1):
            if wrong := _NO_NUCLEOTIDE.search(letters):
                raise SequenceError(f"sequence {number} of the batch", _not_dna(wrong))
        # one call a sequence: a batch call of the library would start threads of its own
        ids_of = [self._bpe.encode(letters).ids for letters in sequences]
        lengths_S = np.array([len(ids) for ids in ids_of], dtype=np.int32)
        return np.concatenate([np.array(ids, dtype=np.int64) for ids in ids_of]), lengths_S


def _not_dna(wrong: re.Match[str]) -> str:
    letter = wrong.group()
    advice = "write T for U" if letter == "U" else "is this a protein? This model takes DNA"
    return f"letter {wrong.start() + 1} is {letter!a}, which stands for no nucleotide of DNA: {advice}"


def _model_of(path: Path) -> object:
    """Return what decides the ids; merges are written as one text or as two, depending on the library's version."""
    try:
        model = json.loads(path.read_text("utf-8"))["model"]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        return model["type"], model["vocab"], merges, model["unk_token"], model.get("fuse_unk", False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise WeightsError(path.parent.name, f"{path} cannot be read ({type(error).__name__}: {error})") from error
