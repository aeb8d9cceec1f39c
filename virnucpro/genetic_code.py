"""The standard genetic code, shared by the chunks and the models."""

BASES = b"TCAG"
"""In the order that tables of the genetic code have."""
STANDARD_CODE = b"FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
"""Residues of the codons TTT, TTC, TTA ... GGG (NCBI's translation table 1)."""
