"""
The organism that a record's header names, so that a split can keep its records together.

Headers of INSDC and RefSeq say after the accession what the record is of: an organism's name, then the strain, then
which piece of the genome it is. The rule reads the name without the strain, since strains of one species are no
independent genomes. It reads headers only: an organism under two names counts as two, and a header that begins with no
name of that form says nothing.
"""

from __future__ import annotations

import re

_BEFORE_NAME = re.compile(
    r"(?:TPA\w*|MAG|UNVERIFIED):|\|?(?:gi\|\S*|GC[AF]_\d+(?:\.\d+)?|[A-Z]{1,6}_?[A-Z]{0,6}\d{4,}(?:\.\d+)?)"
)
_END_OF_NAME = re.compile(
    r"[,;|(\[<]|\b(?:(?:sub)?str(?:ain|\.)|isolate|clone|subsp\.|subspecies|serovar|biovar|bv\.|pv\.|subtype|genotype"
    r"|subgroup|lineage|segment|scaffold|contig|ctg|scf|supercont|NODE_|chromosome|plasmid|mitochondri|chloroplast"
    r"|plastid|complete|partial|genom|whole|DNA\b|[a-z]?RNA\b|gene\b)",
    re.IGNORECASE,
)
_VIRUS = re.compile(r"(?P<name>.+ \S*virus\S*(?: type)?(?: (?:\d+\w?|[A-Z]))?)(?: |$)", re.IGNORECASE)
_FIRST_WORD = re.compile(r"[A-Z][A-Za-z'-]*")
_UNNAMED_SPECIES = ("sp.", "spp.", "cf.", "bacterium", "archaeon")


def organism_of(description: str) -> str:
    """
    Return the organism that a header names, without its strain; empty where it names none.

    The name ends before a word that tells strain or piece (``strain``, ``segment``, ``scaffold``, ``chromosome``,
    ``complete``, ...) and before punctuation. Of it, a virus keeps what goes up to ``virus`` and a number or letter
    behind it, a phage everything, and everything else genus and species; a species without a name (``sp.``) keeps its
    strain. ``Influenza A virus (A/Puerto Rico/8/1934(H1N1)) segment 5`` is ``Influenza A virus``.

    Args:
        description: What stands in the header behind the id.
    """
    words = description.split()
    while words and _BEFORE_NAME.fullmatch(words[0]):
        words.pop(0)
    name = _END_OF_NAME.split(" ".join(words).removeprefix("|"), maxsplit=1)[0].split()
    if len(name) <= 1 or not _FIRST_WORD.fullmatch(name[0]):
        return ""
    whole = " ".join(name)
    if found := _VIRUS.match(whole):
        return found["name"]
    if any(word in whole.lower() for word in ("phage", "virus", "satellite")):
        return whole
    is_candidate = name[0] == "Candidatus"
    genus, species = name[: 1 + is_candidate], name[1 + is_candidate : 2 + is_candidate]
    if species and species[0] in _UNNAMED_SPECIES:
        return whole
    return " ".join([*genus, *species]) if species and re.fullmatch(r"[a-z][a-z-]+", species[0]) else ""
