"""
What a setting is: a field of a frozen model with a ``Knob``, and how settings are read from names without boxes.

The settings themselves are in ``virnucpro/settings.py``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from os import PathLike, fspath
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from virnucpro.errors import ConfigurationError, ExitCode, printable

Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """What a field says beside its type, title, default and bounds."""

    help: str
    """Without what stands for "automatic"."""
    option: str = ""
    """On the command line; empty: the field's name with hyphens."""
    metavar: str | None = None
    argument: str = ""
    """In the library; empty: the field's name."""
    auto: str = ""
    """What the default stands for; empty where it stands for itself."""
    word: str = ""
    """That stands for the default on the command line."""
    unit: str = ""
    env: str = ""
    """Environment variable that is read where the field has its default."""
    decides: bool = False
    """Whether it decides the bytes of a result: a run that resumes needs the same."""
    recorded: str = ""
    """Name in the settings of ``run.json``; empty: the field's name."""
    faces: str = "command form library"
    """Where it can be set."""
    panel: str = ""
    """Heading in the help of a command; empty: "Advanced", with the name of its box."""

    @property
    def automatic(self) -> str:
        """What happens when the field is not set, the environment included."""
        return f"{self.env}, else {self.auto}" if self.env else self.auto


@dataclass(frozen=True, kw_only=True)
class Text:
    """Which texts a setting takes. A form lists the usual ones and has a line for others."""

    usual: tuple[str, ...] = ()
    other: str = ""
    """Title of the line for others."""
    pattern: str = ""
    sentence: str = ""
    """What matches the pattern, as "choose this or that"."""
    kind: str = "configuration"
    """Whether a mistake is one of usage."""

    def check(self, text: str) -> str:
        if not re.match(self.pattern, text):
            raise PydanticCustomError(
                self.kind, "{given}: {sentence}", {"given": printable(text), "sentence": self.sentence}
            )
        return text

    def extend(self, schema: dict[str, Any]) -> None:
        """Add the list to a JSON schema, and the sentence, which a server shows where it would show the pattern."""
        if self.usual:
            typed, listed = {"title": self.other, "type": "string"}, {"title": "List", "type": "string"}
            schema["anyOf"] = [typed, listed | {"enum": [*self.usual]}]
        if self.pattern:
            schema |= _refused({"not": {"pattern": self.pattern}}, self.sentence.partition(" ")[2])


def knob(
    default: object,
    title: str,
    help: str,  # noqa: A002
    *,
    text: Text | None = None,
    **more: Any,
) -> Any:
    """Return a field with its bounds (``ge``, ``gt``, ``le``, ``lt``), and what ``Knob`` says of it."""
    bounds = {name: more.pop(name) for name in ("ge", "gt", "le", "lt", "min_length") if name in more}
    extra = Knob(help=help, **more)
    unset = "None" if default is None else "0" if isinstance(default, int | float) else "Empty"
    info: FieldInfo = Field(
        default=default,
        title=title,
        description=f"{help} {unset}: {extra.automatic}." if extra.auto else help,
        json_schema_extra=text.extend if text else _name_number if default is None else None,
        **bounds,
    )
    info.metadata.append(extra)
    if text and text.pattern:
        info.metadata.append(AfterValidator(text.check))
    return info


def rule(field: str, matches: dict[str, Any], other: str, refused: dict[str, Any], taken: str) -> dict[str, Any]:
    """
    Return the JSON schema of a rule across two fields of a box.

    Args:
        field: Where the rule looks.
        matches: Schema of the values of *field* for which it holds.
        other: Field that is refused.
        refused: Schema of the values of *other* that are refused then.
        taken: What is taken instead, for the message.
    """
    return {
        "if": {"properties": {field: matches}, "required": [field]},
        "then": {"properties": {other: _refused(refused, taken)}},
    }


def _refused(values: dict[str, Any], taken: str) -> dict[str, Any]:
    """Return a JSON schema whose message is "TAKEN was expected": a server shows no other text of ours."""
    return {"if": values, "then": {"const": taken}}


def _name_number(schema: dict[str, Any]) -> None:
    """Name the number among a number and None, and move its bounds to where they make the message."""
    number = schema["anyOf"][0]
    schema |= {name: number.pop(name) for name in list(number) if name != "type"}
    number["title"] = "Number"


class Box(BaseModel):
    """Settings that belong together: a box of the form. An unknown name in it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)  # few commands need them all

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Number the lines of the box: PostgreSQL, where Prefect keeps the form, does not keep their order."""
        schema = handler(core_schema)
        for position, line in enumerate(handler.resolve_ref_schema(schema)["properties"].values()):
            line["position"] = position
        return schema


@dataclass(frozen=True)
class Setting:
    """A field with the path to it through the boxes."""

    path: tuple[str, ...]
    info: FieldInfo
    knob: Knob

    @property
    def argument(self) -> str:
        """Its name where settings are not in boxes: in the library, and of an option's value."""
        return self.knob.argument or self.path[-1]

    @property
    def panel(self) -> str | None:
        """Its heading in the help of a command; None where that is the usual one."""
        return self.knob.panel or (f"Advanced ({self.path[0]})" if len(self.path) > 1 else None)

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return self.knob.option or "--" + self.path[-1].replace("_", "-")


def settings_of(kind: type[BaseModel], *, face: str = "", path: tuple[str, ...] = ()) -> list[Setting]:
    """Return every setting of a kind of run, or of a box, that can be set on *face*; inherited ones last."""
    found = []
    own_first = dict.fromkeys([*vars(kind).get("__annotations__", {}), *kind.model_fields])
    for name in own_first:
        info = kind.model_fields[name]
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found += settings_of(info.annotation, face=face, path=(*path, name))
        else:
            knob = next(one for one in info.metadata if isinstance(one, Knob))
            if face in knob.faces:
                found.append(Setting((*path, name), info, knob))
    return found


class UsageError(ConfigurationError):
    """Settings that a command line refuses as it does an unknown option."""

    exit_code = ExitCode.USAGE


def from_flat(kind: type[Settings], values: Mapping[str, object]) -> Settings:
    """
    Return settings from values without boxes, as the library and the command line have them.

    Args:
        kind: Of run.
        values: Argument -> value; what is None is not set.

    Raises:
        ConfigurationError: A value is out of bounds, or values exclude each other.
        TypeError: There is no such argument.
    """
    known = {setting.argument: setting for setting in settings_of(kind)}
    boxes: dict[str, Any] = {}
    for argument, value in values.items():
        if argument not in known:
            raise TypeError(f"there is no setting {argument!r}: choose from {', '.join(sorted(known))}")
        if value is not None:
            *place, name = known[argument].path
            box = reduce(lambda inner, part: inner.setdefault(part, {}), place, boxes)
            box[name] = _plain(value)
    try:
        return kind.model_validate(boxes)
    except ValidationError as error:
        is_usage = any(one["type"] == "usage" for one in error.errors())
        names = {setting.path: setting.argument for setting in known.values()}
        raise (UsageError if is_usage else ConfigurationError)(refusal(error, names)) from None


def refusal(error: ValidationError, names: Mapping[tuple[str, ...], str] | None = None) -> str:
    """Return the sentences for what was refused; *names*: path of a setting -> its name there."""
    return "; ".join(_sentence(one, names or {}) for one in error.errors(include_url=False))


def _plain(value: object) -> object:
    if isinstance(value, PathLike):
        return fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _sentence(error: ErrorDetails, names: Mapping[tuple[str, ...], str]) -> str:
    place = tuple(str(part) for part in error["loc"])
    name = next((names[place[:end]] for end in range(len(place), 0, -1) if place[:end] in names), "")
    if error["type"] in {"value_error", "usage", "configuration"}:
        message = error["msg"].removeprefix("Value error, ")
        return f"{name} is {message}" if name else message
    return f"{name} is {printable(str(error['input']))}: {error['msg'].replace('Input should', 'it should')}"


def recorded_settings(box: BaseModel) -> dict[str, Any]:
    """Return the settings of *box* that decide the bytes of a result, by their names in ``run.json``."""
    return {
        setting.knob.recorded or setting.path[-1]: reduce(getattr, setting.path, box)
        for setting in settings_of(type(box))
        if setting.knob.decides
    }
