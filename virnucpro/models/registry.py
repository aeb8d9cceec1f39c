"""
The models that VirNucPro knows, and where their weights are on this machine.

Imports neither torch nor esm, so that the parent process stays light. Weights are searched in the given folder, in
``VIRNUCPRO_WEIGHTS`` and in torch hub's cache, in this order; only ``resolve_model`` downloads, and only a named model.
A path to an ESM-2 or DNABERT-S needs no entry. Other packages add models by entry points, read for unknown names only.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.allowed_roots import open_model
from virnucpro.choices import (
    DEFAULT_DNA_MODEL,
    DEFAULT_MAX_RESIDUES,
    DEFAULT_PROTEIN_MODEL,
    UNLIMITED_LETTERS,
    Precision,
    SequenceKind,
)
from virnucpro.errors import ConfigurationError, UnknownModelError, WeightsError, printable
from virnucpro.run_folders import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.models.download import DownloadProgress

WEIGHTS_VARIABLE = "VIRNUCPRO_WEIGHTS"
ENTRY_POINTS = "virnucpro.models"  # each has a model's name, and leads to a ModelSpec

CHECKPOINT_SUFFIXES = (".pt", ".bin", ".safetensors")
BUNDLED_WEIGHTS_DIR = Path(__file__).parent / "weights"
BUNDLED = "bundled with virnucpro"
"""Source of the models in the package."""

_MAX_BYTES_PER_PARAMETER = 8
"""Twice fp32: the limit for a downloaded file, besides a small allowance."""
_MAX_OTHER_BYTES = 1 << 26
_PICKLED_BYTES = 1 << 20  # searched for names of tensors: torch writes all names first, uncompressed
_PICKLED_NAME = re.compile(rb"[A-Za-z_][\w.]*\.(?:weight|bias|inv_freq)")


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    loader: str
    """``module:function`` that makes (model, tokenizer) from (path, device, precision=...)."""
    sequence_kind: SequenceKind
    letters_per_token: float
    """Residues or nucleotides that a plan counts as one token."""
    max_letters: int
    """Residues or nucleotides of a sequence that are embedded by default."""
    gpu_precision: Precision
    """Number format on a GPU by default."""


ESM2 = ModelFamily(
    loader="virnucpro.models.esm2_flash:load_esm2_model",
    sequence_kind=SequenceKind.PROTEIN,
    letters_per_token=1.0,
    max_letters=DEFAULT_MAX_RESIDUES,
    # as fair-esm's own ESMFold runs the 3B model; on 4,000 real frames bf16 fell to a cosine of 0.9963 and moved eleven
    # times as many predictions (docs/models.md)
    gpu_precision=Precision.FP16,
)
DNABERT_S = ModelFamily(
    loader="virnucpro.models.dnabert_s:load_dnabert_s",
    sequence_kind=SequenceKind.DNA,
    # measured on fragments of bacterial, phage and fungal genomes, 300 and 500 nt: 4.58 to 4.67 (viruses of eukaryotes
    # 4.8, organelles 5.1)
    letters_per_token=4.6,
    max_letters=UNLIMITED_LETTERS,
    gpu_precision=Precision.BF16,
)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    name: str
    """What the user calls it."""
    num_layers: int
    hidden_dim: int
    """Width of an embedding."""
    attention_heads: int
    num_parameters: int
    """Trained parameters, heads for residues and contacts included."""
    source: str
    """URL of the weights, or ``BUNDLED``."""
    sha256: str | None = None
    """Hex sha256 of the file of weights, where it is known."""
    family: ModelFamily = ESM2
    licence: str
    """Of the weights."""
    provider: str = ""
    """Package and version that add the model, set by the registry; empty for our own."""

    @property
    def is_bundled(self) -> bool:
        return self.source == BUNDLED

    @property
    def file_name(self) -> str:
        """Path of the weights in a folder of weights: no other model's, as Hugging Face names all files alike."""
        if self.is_bundled:
            return "model.safetensors"
        name = self.source.partition("?")[0].rpartition("/")[2]
        return name if name.rpartition(".")[0] == self.name else f"{self.name}/{name}"


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    name: str
    """Registered name, or the stem of the checkpoint's file."""
    weights_path: Path
    weights_sha256: str
    family: ModelFamily
    hidden_dim: int = 0
    """Width of an embedding; 0 where only the checkpoint states it."""
    provider: str = ""

    @property
    def config_sha256(self) -> str:
        """Of the ``config.json`` beside the weights that the loader may read; empty where there is none."""
        beside = self.weights_path.parent / "config.json"
        return durable.sha256_of(beside) if self.family is not ESM2 and beside.is_file() else ""


# of Lin et al. 2023, "Evolutionary-scale prediction of atomic-level protein structure"
# parameters as fair-esm 2.0.0 counts them; the sha256 of the published files is not known here
_PUBLISHED = (
    ("esm2_t6_8M_UR50D", 6, 320, 20, 7_512_474),
    ("esm2_t12_35M_UR50D", 12, 480, 20, 33_501_394),
    ("esm2_t30_150M_UR50D", 30, 640, 20, 148_140_154),
    ("esm2_t33_650M_UR50D", 33, 1280, 20, 651_043_254),
    ("esm2_t36_3B_UR50D", 36, 2560, 40, 2_839_005_634),
    ("esm2_t48_15B_UR50D", 48, 5120, 40, 15_129_100_194),
)

_TINY_PROTEIN = ModelSpec(
    name=DEFAULT_PROTEIN_MODEL,
    num_layers=5,
    hidden_dim=128,
    attention_heads=4,
    num_parameters=1_012_662,
    sha256="f305fd860e4024b77654df14192467b4c9247868586778d2d245077fa9af957a",
    source=BUNDLED,
    licence="CC-BY-4.0",
)

_TINY_DNA = ModelSpec(
    name=DEFAULT_DNA_MODEL,
    family=DNABERT_S,
    num_layers=4,
    hidden_dim=128,
    attention_heads=4,
    num_parameters=1_598_848,
    sha256="8e5e85848b0137bbbb8c945d664f29157975f042329f96e8f04cb053a022db05",
    source=BUNDLED,
    licence="MIT",
)

_DNABERT_S = ModelSpec(
    name="dnabert-s",
    family=DNABERT_S,
    num_layers=12,
    hidden_dim=768,
    attention_heads=12,
    num_parameters=117_068_544,
    source="https://huggingface.co/zhihan1996/DNABERT-S/resolve/main/pytorch_model.bin",
    licence="Apache-2.0",
)

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _TINY_PROTEIN,
        _TINY_DNA,
        _DNABERT_S,
        *(
            ModelSpec(
                name=name,
                num_layers=layers,
                hidden_dim=dim,
                attention_heads=heads,
                num_parameters=parameters,
                source=f"https://dl.fbaipublicfiles.com/fair-esm/models/{name}.pt",
                licence="MIT",
            )
            for name, layers, dim, heads, parameters in _PUBLISHED
        ),
    )
}


def resolve_model(
    name_or_path: str | Path,
    *,
    weights_dir: Path | None = None,
    on_download: DownloadProgress | None = None,
) -> ResolvedModel:
    """
    Find a model's weights on this machine, or download them.

    Args:
        name_or_path: Registered name, or path of a ``.pt``, ``.bin`` or ``.safetensors`` file.
        on_download: Called with bytes done and bytes in all (None where unknown) during a download.

    Raises:
        UnknownModelError: Neither a registered name nor a path.
        WeightsError: The weights are absent and cannot be downloaded, not those registered, or of no known model.
        OutputError: Downloaded weights cannot be written.
    """
    if is_path(name_or_path):
        check_model_path(path := locate_weights(name_or_path))
        return ResolvedModel(
            name=path.stem, weights_path=path, weights_sha256=durable.sha256_of(path), family=family_of(path)
        )
    spec = _registered(str(name_or_path))
    found = _find(spec, weights_dir)
    if found is not None:
        path, sha256 = found, durable.sha256_of(found)
    else:
        from virnucpro.models.download import download_weights  # noqa: PLC0415  it imports HTTP; weights are mostly here

        path = _writable_folder(spec, weights_dir) / spec.file_name
        path.parent.mkdir(exist_ok=True)
        sha256 = download_weights(
            spec.name,
            spec.source,
            path,
            sha256=spec.sha256,
            max_bytes=spec.num_parameters * _MAX_BYTES_PER_PARAMETER + _MAX_OTHER_BYTES,
            on_progress=on_download,
        )
    if spec.sha256 not in (None, sha256):
        what = f"{path} has sha256 {sha256} instead of {spec.sha256}: remove it, so that it is fetched again"
        raise WeightsError(spec.name, what)
    return ResolvedModel(
        name=spec.name,
        weights_path=path,
        weights_sha256=sha256,
        hidden_dim=spec.hidden_dim,
        family=spec.family,
        provider=spec.provider,
    )


def check_model_path(path: Path) -> None:
    """Raise PathNotAllowedError or WeightsError unless *path*, which the user gave, is where models may be."""
    try:
        os.close(open_model(os.fspath(path)))
    except OSError as error:
        raise WeightsError(path.stem, f"{path} cannot be read ({error.strerror})") from error


def family_of(path: Path) -> ModelFamily:
    """Recognise a checkpoint by its metadata and tensor names, executing nothing; WeightsError for another model."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  models without a file (gpu_check) do without

    metadata: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="numpy") as tensors:
                metadata, names = tensors.metadata() or {}, list(tensors.keys())
        else:
            with open(path, "rb", opener=open_model) as file:
                names = [name.decode() for name in _PICKLED_NAME.findall(file.read(_PICKLED_BYTES))]
    except (SafetensorError, OSError) as error:
        raise WeightsError(path.stem, f"{path} cannot be read ({error}): fetch it again") from error
    is_fair_esm = path.suffix != ".safetensors" and any(name.endswith(".rot_emb.inv_freq") for name in names)
    if "architecture" in metadata or is_fair_esm:
        return ESM2
    if "config" in metadata or any(name.endswith(".mlp.gated_layers.weight") for name in names):
        return DNABERT_S
    found = f"its tensors begin with {', '.join(names[:3])}" if names else "it names no tensors"
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found += f", its config.json has model_type {json.loads(read_bytes(path.parent / 'config.json'))['model_type']}"
    what = f"{path} is neither an ESM-2 of fair-esm nor a DNABERT-S ({printable(found[:400])}): "
    raise WeightsError(path.stem, f'{what}"Add an encoder" in the documentation has what another model takes')


def locate_weights(name_or_path: str | Path, *, weights_dir: Path | None = None) -> Path:
    """Find a model's file of weights without a download; UnknownModelError or WeightsError where there is none."""
    if is_path(name_or_path):
        path = Path(name_or_path)
        if not path.is_file():
            raise WeightsError(path.stem, f"there is no file {path}: give a registered name or the path of a .pt file")
        return path
    spec = _registered(str(name_or_path))
    found = _find(spec, weights_dir)
    if found is None:
        folders = ", ".join(str(folder) for folder in weights_folders(weights_dir))
        what = f"absent: fetch {spec.source} and put it into one of {folders} as {spec.file_name}"
        raise WeightsError(spec.name, what)
    return found


def weights_folders(weights_dir: Path | None = None) -> list[Path]:
    """Return the folders that weights are searched in, in order; they may be absent."""
    folders = [] if weights_dir is None else [weights_dir]
    if os.environ.get(WEIGHTS_VARIABLE):
        folders.append(Path(os.environ[WEIGHTS_VARIABLE]))
    # torch.hub.get_dir(), without importing torch
    cache_home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    torch_home = Path(os.environ.get("TORCH_HOME", f"{cache_home}/torch")).expanduser()
    return [*folders, torch_home / "hub" / "checkpoints"]


def models_table(
    *, weights_dir: Path | None = None, on_broken: Callable[[ConfigurationError], None] | None = None
) -> list[tuple[ModelSpec, Path | None]]:
    """Return every registered model and its file of weights, None where absent; *on_broken* takes what would raise."""
    added = entry_points(group=ENTRY_POINTS)
    specs = list(MODELS.values())
    for name in sorted(added.names - MODELS.keys()):
        try:
            specs.append(_added_model(name, added))
        except ConfigurationError as error:
            if on_broken is None:
                raise
            on_broken(error)
    return [(spec, _find(spec, weights_dir)) for spec in specs]


def is_path(name_or_path: str | Path) -> bool:
    """Whether it is a path, not a name: it has a checkpoint's suffix or a separator."""
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith(CHECKPOINT_SUFFIXES) or os.sep in text


def _registered(name: str) -> ModelSpec:
    if name in MODELS:
        return MODELS[name]
    added = entry_points(group=ENTRY_POINTS)
    if name in added.names:
        return _added_model(name, added)
    known = [*MODELS, *sorted(added.names - MODELS.keys())]
    close = difflib.get_close_matches(name, known)
    raise UnknownModelError(name, [*close, *(other for other in known if other not in close)])


def _added_model(name: str, added: EntryPoints) -> ModelSpec:
    """Return the model of another package, by the name of its entry point."""
    claims = tuple(added.select(name=name))
    packages = " and ".join(str(one.dist and f"{one.dist.name} {one.dist.version}") for one in claims)
    if len(claims) > 1:
        raise ConfigurationError(f"{packages} each add a model {name}: uninstall all but one")
    try:
        return replace(_checked(claims[0].load()), name=name, provider=packages)
    except Exception as error:
        cause = f"{claims[0].value}: {type(error).__name__}: {error}"
        raise ConfigurationError(f"model {name} of {packages} cannot be used ({cause})") from error


def _checked(spec: object) -> ModelSpec:
    if not isinstance(spec, ModelSpec) or not isinstance(spec.family, ModelFamily):
        raise TypeError("it is no ModelSpec with a ModelFamily")
    if not str(spec.source).startswith(("https://", "http://")):
        raise ValueError(f"its source is {spec.source!r}, not an address")
    return spec


def _find(spec: ModelSpec, weights_dir: Path | None) -> Path | None:
    if spec.is_bundled:
        candidates = [BUNDLED_WEIGHTS_DIR / spec.name / spec.file_name]
    else:
        candidates = [folder / spec.file_name for folder in weights_folders(weights_dir)]
    return next((path for path in candidates if path.is_file()), None)


def _writable_folder(spec: ModelSpec, weights_dir: Path | None) -> Path:
    """Return the first writable folder of weights, made if needed."""
    if spec.is_bundled:
        raise WeightsError(spec.name, f"missing from this installation ({BUNDLED_WEIGHTS_DIR}): install it again")
    folders = weights_folders(weights_dir)
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    listed = ", ".join(str(folder) for folder in folders)
    what = f"absent, and none of {listed} can be written: name another folder with --weights-dir or {WEIGHTS_VARIABLE}"
    raise WeightsError(spec.name, what)
