"""Settings as tests write them: by their names in the library, without boxes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from virnucpro.config import ModelConfig
from virnucpro.knobs import from_flat, settings_of
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.prediction.settings import PredictionConfig, configure_prediction
from virnucpro.settings import EmbeddingSettings, PredictionSettings
from virnucpro.training.training_knobs import TrainingSettings
from virnucpro.training.training_settings import TrainingConfig, configure_training

_RECORDED = {setting.knob.recorded: setting.argument for setting in settings_of(EmbeddingSettings)}
"""Name in a manifest -> name in the library."""


def embedding_config(device_type: str = "cpu", **settings: Any) -> ModelConfig:
    return configure_model(from_flat(EmbeddingSettings, settings), device_type=device_type)


def prediction_config(device_type: str = "cpu", **settings: Any) -> PredictionConfig:
    return configure_prediction(from_flat(PredictionSettings, settings), device_type=device_type)


def training_config(device_type: str = "cpu", **training: Any) -> TrainingConfig:
    return configure_training(from_flat(TrainingSettings, training), device_type=device_type)


def changed(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The same with other fields, or other settings by their names; those that are resolved are fields."""
    fields = {name: value for name, value in changes.items() if name in ModelConfig.__dataclass_fields__}
    flat = {_RECORDED.get(name, name): value for name, value in changes.items() if name not in fields}
    settings = from_flat(EmbeddingSettings, flat) if flat else config.settings
    return replace(config, settings=settings, **fields)
