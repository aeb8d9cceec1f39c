"""
Residues to ESM-2's tokens: fair-esm's ESM-1b alphabet as one lookup table.

Gives the ids of fair-esm's ``BatchConverter`` for a sequence of one-letter codes, and an error for a letter without a
token, where fair-esm stops with a bare ``KeyError``. Does not upper-case, truncate or pad. Legend: T packed tokens, S
sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro.errors import SequenceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_ABSENT = -1


class ProteinTokenizer:
    """
    Turns residues into packed token ids.

    Attributes:
        alphabet: fair-esm's alphabet.
        letters: Every letter that has a token.
    """

    def __init__(self) -> None:
        # imported here: packed tokens without a tokenizer (benchmarks/gpu_check.py) need no fair-esm
        from esm.data import Alphabet  # noqa: PLC0415

        self.alphabet = Alphabet.from_architecture("ESM-1b")
        self.letters = frozenset(token for token in self.alphabet.all_toks if len(token) == 1)
        self._id_of_byte = np.full(256, _ABSENT, dtype=np.int64)
        for letter in self.letters:
            self._id_of_byte[ord(letter)] = self.alphabet.get_idx(letter)

    def encode(self, sequences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """
        Pack *sequences* of upper-case one-letter codes as tokens, each between BOS and EOS.

        Returns:
            ``input_ids_T`` int64, shape (T,), and the tokens of each sequence, BOS and EOS included, int32, shape (S,).

        Raises:
            SequenceError: A letter has no token; names the sequence by its number in the batch, from 1.
        """
        lengths_S = np.array([len(residues) + 2 for residues in sequences], dtype=np.int32)
        # latin-1 keeps one byte a letter; what it cannot hold ("?") has no token either
        raw = "\0".join(["", *(residues + "\0" for residues in sequences)]).encode("latin-1", "replace")
        letters_T = np.frombuffer(raw, dtype=np.uint8)
        input_ids_T = self._id_of_byte[letters_T]
        ends_S = np.cumsum(lengths_S)
        input_ids_T[ends_S - lengths_S] = self.alphabet.cls_idx
        input_ids_T[ends_S - 1] = self.alphabet.eos_idx
        absent = np.flatnonzero(input_ids_T == _ABSENT)
        if len(absent):
            number = int(np.searchsorted(ends_S, absent[0], side="right"))
            position = int(absent[0] - (ends_S[number] - lengths_S[number]))
            letter = sequences[number][position - 1]
            raise SequenceError(
                f"sequence {number + 1} of the batch",
                f"residue {position} is {letter!a}, which has no token in ESM-2's alphabet",
            )
        return input_ids_T, lengths_S
