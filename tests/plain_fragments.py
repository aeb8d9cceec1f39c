"""
Chunks and frames once more, as plainly as the rules can be written: one chunk, one frame, one codon at a time.

It shares nothing with ``virnucpro.data.fragments`` and knows no arrays, so that the two can be compared.
"""

from __future__ import annotations

FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")
COMPLEMENT = {"A": "T", "C": "G", "G": "C", "T": "A"}
CODE = {
    "F": "TTT TTC",
    "L": "TTA TTG CTT CTC CTA CTG",
    "I": "ATT ATC ATA",
    "M": "ATG",
    "V": "GTT GTC GTA GTG",
    "S": "TCT TCC TCA TCG AGT AGC",
    "P": "CCT CCC CCA CCG",
    "T": "ACT ACC ACA ACG",
    "A": "GCT GCC GCA GCG",
    "Y": "TAT TAC",
    "*": "TAA TAG TGA",
    "H": "CAT CAC",
    "Q": "CAA CAG",
    "N": "AAT AAC",
    "K": "AAA AAG",
    "D": "GAT GAC",
    "E": "GAA GAG",
    "C": "TGT TGC",
    "W": "TGG",
    "R": "CGT CGC CGA CGG AGA AGG",
    "G": "GGT GGC GGA GGG",
}
RESIDUE_OF = {codon: residue for residue, codons in CODE.items() for codon in codons.split()}


def plain_bounds(length: int, chunk_length: int) -> list[tuple[int, int]]:
    """Start and end of every chunk of a contig."""
    number = 0
    while number * chunk_length < length:
        number += 1
    too_many = number * chunk_length - length
    quotient, remainder = divmod(too_many, number)
    k = quotient + remainder
    shifts = [quotient + 1] * k + [quotient] * max(0, number - 1 - k) + [0]
    shifts = shifts[:number]
    bounds = []
    for i in range(number):
        start = i * chunk_length - sum(shifts[:i])
        bounds.append((start, min(start + chunk_length, length)))
    return bounds


def plain_frames(chunk: str) -> list[tuple[str, str, str]]:
    """Name, protein and nucleotides of every open frame of a chunk."""
    forward = chunk.upper()
    reverse = ""
    for letter in forward:
        reverse = COMPLEMENT.get(letter, letter) + reverse
    found = []
    for name in FRAMES:
        strand = forward if name[0] == "F" else reverse
        offset = int(name[1]) - 1
        protein = ""
        for at in range(offset, len(strand) - 2, 3):
            protein += RESIDUE_OF.get(strand[at : at + 3], "")
        if protein and "*" not in protein:
            found.append((name, protein, strand[offset : offset + 3 * len(protein) + 1]))
    return found


def plain_files(records: list[tuple[str, str]], chunk_length: int) -> tuple[str, str, str, list[int]]:
    """The text of the files of chunks, nucleotides and proteins, and the bits of the open frames of each chunk."""
    chunks, nucleotides, proteins, bits = [], [], [], []
    for contig, sequence in records:
        for number, (start, end) in enumerate(plain_bounds(len(sequence), chunk_length), start=1):
            name, chunk = f"{contig}_chunk_{number}", sequence[start:end]
            chunks.append(f">{name}\n")
            chunks += [chunk[at : at + 60] + "\n" for at in range(0, len(chunk), 60)]
            frames = plain_frames(chunk)
            for frame, protein, nucleotide in frames:
                nucleotides.append(f">{name}{frame}\n{nucleotide}\n")
                proteins.append(f">{name}{frame}\n{protein}\n")
            bits.append(sum(1 << FRAMES.index(frame) for frame, _, _ in frames))
    return "".join(chunks), "".join(nucleotides), "".join(proteins), bits
