"""
VirNucPro tells which contigs or reads of a metagenome are viral, and embeds proteins and DNA on every GPU.

    import virnucpro

    for contig in virnucpro.predict_fasta("contigs.fasta", "out"):
        print(contig.contig, contig.call, contig.score)
    table = virnucpro.read_prediction("out").to_pandas()   # or to_polars()

    embeddings = virnucpro.embed_fasta("proteins.fasta", "out", model="esm2_t33_650M_UR50D")
    embeddings = virnucpro.read_embeddings("out")
    embeddings["sp|P12345|AATM_RABIT"]   # float32 (width,)
    rows = virnucpro.embed_sequences(["MSLVKDPRV", "MKKIAF"], model="esm2_t33_650M_UR50D")   # float32 (2, 1280)

Names are looked up when they are first used, so that ``import virnucpro`` costs nothing in a worker.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virnucpro.api import embed_fasta, embed_sequences, predict_fasta
    from virnucpro.store.contig_table import ContigCall
    from virnucpro.store.reader import Embeddings, Prediction, read_embeddings, read_prediction

    __version__: str

__all__ = [
    "ContigCall",
    "Embeddings",
    "Prediction",
    "embed_fasta",
    "embed_sequences",
    "predict_fasta",
    "read_embeddings",
    "read_prediction",
]

_HOMES = {
    "ContigCall": "virnucpro.store.contig_table",
    "Embeddings": "virnucpro.store.reader",
    "Prediction": "virnucpro.store.reader",
    "embed_fasta": "virnucpro.api",
    "embed_sequences": "virnucpro.api",
    "predict_fasta": "virnucpro.api",
    "read_embeddings": "virnucpro.store.reader",
    "read_prediction": "virnucpro.store.reader",
}


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", "__doc__"})


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  a twentieth of a second, and rarely wanted

        return version("virnucpro")
    if name not in _HOMES:
        raise AttributeError(f"module 'virnucpro' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
