"""
What the flows of a run have in common: their form, made of the settings, their hooks, and the paths that they may name.

Prefect makes the form of a deployment from the flow's signature and docstring, so the fields of the settings become
parameters, in the order in which the docstring explains them.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from flows.run.allowed_roots import check_allowed
from flows.run.events import emit_end
from flows.run.hooks import say_how_to_continue
from virnucpro.errors import ConfigurationError
from virnucpro.knobs import Knob, Text, refusal, settings_of
from virnucpro.models.registry import is_path
from virnucpro.settings import RunSettings

Function = TypeVar("Function", bound=Callable[..., Any])
Settings = TypeVar("Settings", bound=RunSettings)

PathText = Annotated[str, Field(min_length=1)]
PathTexts = Annotated[list[PathText], Field(min_length=1)]


def titled(title: str, text: Text | None = None, **bounds: Any) -> Any:
    """Return a parameter's field: Prefect's form shows this title, and would show its name otherwise."""
    shown: dict[str, Any] = {"title": title}
    if text is not None:
        text.extend(shown)
    return Field(json_schema_extra=shown, **bounds)


OutputFolder = Annotated[PathText, titled("Output folder")]

RUN: dict[str, Any] = {
    "persist_result": False,
    "validate_parameters": True,
    "on_completion": [emit_end],
    "on_failure": [say_how_to_continue, emit_end],
    "on_crashed": [say_how_to_continue],
    "on_cancellation": [say_how_to_continue],
}
"""Options of each flow."""


def form_of(kind: type[RunSettings]) -> Callable[[Function], Function]:
    """Give a flow's function its signature; its keywords are fields of settings, or settings without their boxes."""

    def decorate(function: Function) -> Function:
        own = inspect.signature(function, eval_str=True)
        listed = re.findall(r"^    (\w+):", inspect.getdoc(function) or "", re.MULTILINE)
        known = {setting.argument: setting.info for setting in settings_of(kind)} | kind.model_fields
        fields = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=known[name].default,
                annotation=_annotation(name, known[name]),
            )
            for name in listed
            if name in known
        ]
        paths = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = own.replace(parameters=[*paths, *fields])  # type: ignore[attr-defined]
        return function

    return decorate


def settings_of_form(kind: type[Settings], fields: Mapping[str, Any]) -> Settings:
    """Return the settings that a form has; ConfigurationError for values that only the worker can check."""
    try:
        return kind(**fields)
    except ValidationError as error:
        raise ConfigurationError(refusal(error)) from None


def _annotation(name: str, info: FieldInfo) -> Any:
    """Return the type of a parameter with what its JSON schema has beside what Prefect makes of it."""
    annotation: Any = info.annotation
    for bound in (one for one in info.metadata if not isinstance(one, Knob)):
        annotation = Annotated[annotation, bound]
    shown: dict[str, Any] = {"title": info.title or name.capitalize()}
    if callable(info.json_schema_extra):
        shown |= TypeAdapter(annotation).json_schema()
        info.json_schema_extra(shown)
    return Annotated[annotation, Field(json_schema_extra=shown)]


def check_paths(
    settings: RunSettings,
    *,
    encoders: Mapping[str, str],
    classifier: str = "",
    **data: str | Iterable[str],
) -> None:
    """Refuse paths of a run outside the allowed roots; *encoders*: parameter -> name or path."""
    check_allowed(
        data={
            **data,
            "cache_dir": settings.cache.cache_dir,
            "metrics_targets": settings.monitoring.metrics_targets,
        },
        models={
            "classifier": classifier,
            **{name: model for name, model in encoders.items() if is_path(model)},
            "weights_dir": settings.cache.weights_dir,
        },
    )
