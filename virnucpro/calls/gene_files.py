"""
``genes.gff3`` and ``genes.faa``: the genes of complete contigs, by the rules of the composition model.

The genes are open reading frames that ``gene_finding`` chooses, not those of a trained gene finder. Names and headers
are Prodigal's, which other programs read: gene n of contig c is ``c_n``; ``partial`` has a digit for the gene's left
and for its right end, 1 where the gene runs out of the contig or into unknown nucleotides.
"""

from __future__ import annotations

import io
from itertools import product
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np

from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import MAX_SHARED_NT, Genes
from virnucpro.models.contigs.nucleotide_codes import LETTERS, OTHER, RESIDUES, encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from virnucpro.models.contigs.nucleotide_codes import CodeArray

WINDOW_NT, OVERLAP_NT = 2_000_000, 600_000
"""Longer contigs are read in overlapping windows: memory is some 50 bytes for each nucleotide of one. A gene is
taken from the window that has its start in its middle; it is complete there up to half of ``OVERLAP_NT``."""
PASS_NT = 200_000
"""Least nucleotides of contigs that are read together, as far as there are any."""

GFF_HEADER = b"##gff-version 3\n"

_LINE = 60
_PLAIN = ".:^*$@!+?|"
"""Characters, beside letters, digits, ``_`` and ``-``, that a GFF3 file holds as they are."""
_RESIDUE_LETTERS = np.frombuffer(RESIDUES, dtype=np.uint8)
EDGE = "Edge"
_CODON_NAMES = ["".join(letters) for letters in product(LETTERS.decode(), repeat=3)]


class Gene(NamedTuple):
    first: int
    """First nucleotide on the forward strand, 1-based; *last* is the last one, the stop codon included."""
    last: int
    strand: str
    """``+`` or ``-``."""
    start: str
    """The start codon, or ``Edge`` where the gene begins before it can be read."""
    has_stop: bool
    genetic_code: int
    """Number of NCBI's table."""
    protein: str
    """Residues, without a stop; a start codon is M."""

    @property
    def partial(self) -> str:
        """Whether the left and the right end are beyond what can be read, a digit each."""
        ends = (self.start == EDGE, not self.has_stop)
        left, right = ends if self.strand == "+" else ends[::-1]
        return f"{left:d}{right:d}"


class GeneLines(NamedTuple):
    """The genes of some contigs, as they are in the files."""

    gff: bytes
    """Lines of ``genes.gff3`` after ``GFF_HEADER``."""
    proteins: bytes
    """Records of ``genes.faa``."""
    genes: int


def gene_lines(contigs: Iterable[tuple[str, str]]) -> GeneLines:
    """Return the genes of *contigs*, given as names and upper-case sequences; each contig's depend on it alone."""
    gff, proteins, number = io.BytesIO(), io.BytesIO(), 0
    for some in _passes(contigs):
        names, codes = zip(*some, strict=True)
        for contig, codes_L, genes in zip(names, codes, find_genes(codes), strict=True):
            gff.write("".join(_gff_lines(contig, len(codes_L), genes)).encode())
            proteins.write("".join(_fasta_records(contig, genes)).encode())
            number += len(genes)
    return GeneLines(gff.getvalue(), proteins.getvalue(), number)


def _passes(contigs: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, CodeArray]]]:
    """Yield contigs that are read together, and the codes of their nucleotides."""
    some: list[tuple[str, CodeArray]] = []
    some_nt = 0
    for contig, sequence in contigs:
        some.append((contig, encode(sequence.encode())))
        some_nt += len(sequence)
        if some_nt >= PASS_NT:
            yield some
            some, some_nt = [], 0
    if some:
        yield some


def find_genes(codes: Sequence[CodeArray]) -> Iterator[list[Gene]]:
    """Yield the genes of each contig, from left to right, from the codes of its nucleotides; at least one contig."""
    short = [codes_L for codes_L in codes if len(codes_L) <= WINDOW_NT]
    of_short = _genes_of(short) if short else iter(())
    for codes_L in codes:
        yield next(of_short) if len(codes_L) <= WINDOW_NT else list(_in_windows(codes_L))


def _in_windows(codes_L: CodeArray) -> Iterator[Gene]:
    step = WINDOW_NT - OVERLAP_NT
    last = 0
    for begin in range(0, len(codes_L) - OVERLAP_NT, step):
        is_last = begin + WINDOW_NT >= len(codes_L)
        low = begin + OVERLAP_NT // 2 if begin else 0
        high = len(codes_L) if is_last else begin + step + OVERLAP_NT // 2
        (found,) = _genes_of([codes_L[begin : begin + WINDOW_NT]])
        for one in found:
            gene = one._replace(first=one.first + begin, last=one.last + begin)
            if low < gene.first <= high and gene.first > last - MAX_SHARED_NT:
                last = gene.last
                yield gene


def _genes_of(codes: Sequence[CodeArray]) -> Iterator[list[Gene]]:
    genes = Genes.of(Fragments(codes))
    residues = _RESIDUE_LETTERS[genes.residues()].tobytes().decode()
    ends = np.cumsum(genes.lengths_N)
    columns = zip(
        genes.groups.fragment_X.tolist(),
        (genes.starts_N + 1).tolist(),
        genes.ends_N.tolist(),
        genes.is_reverse_N.tolist(),
        genes.start_codons_N.tolist(),
        genes.has_stop_N.tolist(),
        (ends - genes.lengths_N).tolist(),
        ends.tolist(),
        strict=True,
    )
    found: list[list[Gene]] = [[] for _ in codes]
    numbers = [code.number for code in genes.genetic_codes]
    for fragment, first, last, is_reverse, codon, has_stop, begin, end in columns:
        start = EDGE if codon < 0 else _CODON_NAMES[codon]
        protein = residues[begin:end] if start == EDGE else f"M{residues[begin + 1 : end]}"
        strand = "-" if is_reverse else "+"
        for at in (np.flatnonzero(codes[fragment][first - 1 : last] == OTHER) // 3).tolist():
            place = (last - first) // 3 - at if is_reverse else at
            protein = f"{protein[:place]}X{protein[place + 1 :]}" if place < len(protein) else protein
        found[fragment].append(Gene(first, last, strand, start, has_stop, numbers[fragment], protein))
    for of_contig in found:
        yield sorted(of_contig)


def _escaped(contig: str) -> str:
    return quote(contig, safe=_PLAIN).replace("~", "%7E")  # which quote() never escapes


def _gff_lines(contig: str, length_nt: int, genes: Sequence[Gene]) -> Iterator[str]:
    name = _escaped(contig)
    yield f"##sequence-region {name} 1 {length_nt}\n"
    for number, gene in enumerate(genes, start=1):
        place = f"{gene.first}\t{gene.last}\t.\t{gene.strand}\t0"  # a gene begins with a whole codon
        yield f"{name}\tvirnucpro\tCDS\t{place}\t{_attributes(name, number, gene)};length_aa={len(gene.protein)}\n"


def _fasta_records(contig: str, genes: Sequence[Gene]) -> Iterator[str]:
    name = _escaped(contig)
    for number, gene in enumerate(genes, start=1):
        lines = "\n".join([gene.protein[at : at + _LINE] for at in range(0, len(gene.protein), _LINE)])
        place = f"{gene.first} # {gene.last} # {gene.strand}1".replace("+", "")
        yield f">{contig}_{number} # {place} # {_attributes(name, number, gene)}\n{lines}\n"


def _attributes(name: str, number: int, gene: Gene) -> str:
    what = f"partial={gene.partial};start_type={gene.start};transl_table={gene.genetic_code}"
    return f"ID={name}_{number};{what}"
