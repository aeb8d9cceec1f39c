"""From what the user asked for to what a worker computes: the model's weights are found, open settings resolved."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from virnucpro.choices import Precision, PrecisionChoice
from virnucpro.config import ModelConfig
from virnucpro.host_gpus import gpus_without_bf16
from virnucpro.models.registry import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.models.registry import ModelFamily
    from virnucpro.settings import EmbeddingSettings

log = structlog.get_logger(__name__)


def configure_model(
    settings: EmbeddingSettings, *, device_type: str, on_download: Callable[[int, int | None], None] | None = None
) -> ModelConfig:
    """
    Find a model's weights, fetching them once if it was named and they are not here, and resolve its settings.

    *device_type* is ``cpu`` or ``cuda``; errors are those of ``resolve_model``.
    """
    if find_spec("torch") is None:  # a light installation: said before workers are started
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    folders = settings.cache
    weights_dir = Path(folders.weights_dir) if folders.weights_dir else None
    resolved = resolve_model(settings.model, weights_dir=weights_dir, on_download=on_download)
    family, precision = resolved.family, settings.hardware.precision
    if folders.cache_dir:  # hosts of a cluster have another working directory
        folders = folders.model_copy(update={"cache_dir": str(Path(folders.cache_dir).absolute())})
    return ModelConfig(
        model_name=resolved.name,
        weights_path=str(resolved.weights_path),
        weights_sha256=resolved.weights_sha256,
        config_sha256=resolved.config_sha256,
        hidden_dim=resolved.hidden_dim,
        provider=resolved.provider,
        loader=family.loader,
        sequence_kind=family.sequence_kind,
        letters_per_token=family.letters_per_token,
        precision=_automatic(family, device_type) if precision is PrecisionChoice.AUTO else Precision(precision),
        token_budget=settings.hardware.token_budget,
        max_residues=settings.sequences.max_residues or family.max_letters,
        settings=settings.model_copy(update={"cache": folders}),
    )


def _automatic(family: ModelFamily, device_type: str) -> Precision:
    """Return a model's usual number format; one that every GPU of this host has, whichever of them a run gets."""
    if device_type == "cpu":
        return Precision.FP32
    if family.gpu_precision is Precision.BF16 and (lacking := gpus_without_bf16()):
        log.warning("precision.fp16", reason=f"{', '.join(sorted(set(lacking)))} does not compute in bf16")
        return Precision.FP16
    return family.gpu_precision
