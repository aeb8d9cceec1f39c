"""
Texts that a setting takes: the usual ones, which a form lists, and the pattern of all.

Which devices, clusters and files exist only the worker knows.
"""

from virnucpro.choices import CLASSIFIERS, DNA_MODELS, PROTEIN_MODELS
from virnucpro.knobs import Text

_UUID = r"(GPU|MIG)-[0-9A-Za-z/-]+"

RUNNER = Text(
    usual=("threads", "ray", "dask", "dask://slurm"),
    other="Running cluster",
    pattern=r"^(threads|ray|ray://[^\s/]+:\d+|dask|dask://slurm|dask://[^\s/]+:\d+)$",
    sentence="choose threads, ray, ray://HOST:PORT, dask, dask://HOST:PORT or dask://slurm",
    kind="usage",
)
"""What does the work: this machine, or a cluster of Ray or Dask."""
DEVICES = Text(
    usual=("auto", "cpu", "auto:1", "auto:2", "auto:4"),
    other="Some GPUs",
    pattern=rf"^\s*(auto(:[1-9][0-9]*)?|cpu|[0-9]+(\s*,\s*[0-9]+)*|{_UUID}(\s*,\s*{_UUID})*)\s*$",
    sentence="choose auto, auto:N, cpu, or a list such as 0,1",
)
NETWORK = Text(
    pattern=r"^(\d{1,3}(\.\d{1,3}){3}(/\d{1,2})?)?$", sentence="give an IPv4 network such as 10.1.0.0/16, or an address"
)
ADDRESS = Text(
    pattern=r"^(https?://\S+)?$", sentence="give an http:// or https:// address, such as http://gateway:9091"
)
PRIOR = Text(
    usual=("auto", "off"),
    other="Share",
    pattern=r"^(auto|off|0?\.[0-9]*[1-9][0-9]*)?$",
    sentence="choose auto, off, or a share of viruses such as 0.05",
    kind="usage",
)
"""Share of viruses in a sample: estimated, not used, or a number above 0 and below 1."""
CASCADE = Text(
    usual=("auto", "off"),
    other="Two scores",
    pattern=r"^(auto|off|(0|0?\.[0-9]+),(1|0?\.[0-9]+))$",
    sentence="choose auto, off, or two scores such as 0.02,0.98",
    kind="usage",
)
"""Which contigs are embedded: those that the classifier needs, all, or those with a composition score in between."""
CLASSIFIER = Text(usual=CLASSIFIERS, other="Folder")
DNA_MODEL = Text(usual=DNA_MODELS, other="Path")
PROTEIN_MODEL = Text(usual=PROTEIN_MODELS, other="Path")
MODEL = Text(usual=(*PROTEIN_MODELS, *DNA_MODELS), other="Path")
