"""What is wrong with a recipe, in our words: every problem at once, each with its place in the file."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from linearize.errors import UsageError, did_you_mean
from linearize.training import schema

_REPR = reprlib.Repr()  # a value may be a whole file that was pasted, or contain itself
_REPR.maxstring = _REPR.maxother = 100

_SECTIONS: dict[str, type[BaseModel]] = {"data": schema.Data, "every": schema.Every, "eval": schema.Evaluation}
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "string_type": "a name",
    "string_too_short": "a name",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


class Problem(NamedTuple):
    """One thing that is wrong: `before`, the place of `key` in the file, then `after`.

    A key in a section has a dotted name: `data.source`, `train.1.lr`.
    """

    key: str
    before: str
    after: str

    def place(self, where: Mapping[str, str]) -> str:
        """Where the key stands; where it doesn't, what it would stand in."""
        key = self.key
        while key and key not in where:
            key = key.rpartition(".")[0]
        return where.get(key, "")

    def position(self, where: Mapping[str, str]) -> int:
        _, _, line = self.place(where).partition("line ")
        return int(line or 0)

    def text(self, where: Mapping[str, str]) -> str:
        place = self.place(where)
        return self.before + (f" ({place})" if place else "") + self.after

    def bare(self) -> str:
        """What is wrong, for a reader who knows which key is meant."""
        return self.after.removeprefix(": ") if self.before == self.key else self.before + self.after


class RecipeError(UsageError):
    """Every problem of one recipe. `where` maps keys to their place in the file (`{"window": "line 7"}`)."""

    def __init__(self, problems: list[Problem], source: str = "the recipe", where: Mapping[str, str] = {}) -> None:
        self.problems = problems
        lines = [problem.text(where) for problem in sorted(problems, key=lambda one: one.position(where))]
        if len(lines) == 1:
            super().__init__(f"{source}: {lines[0]}")
        else:
            super().__init__(f"{source} has {len(lines)} problems:\n  " + "\n  ".join(lines))


def wrong(key: str, text: str) -> Problem:
    """That `key` has a value that it can't have."""
    return Problem(key, key, f": {text}")


def problems_of(error: ValidationError, recipe: type[BaseModel]) -> list[Problem]:
    """pydantic's errors in our words. `recipe` is the model of the top-level keys."""
    return [_problem(item, recipe) for item in error.errors(include_url=False)]


def _problem(item: Any, recipe: type[BaseModel]) -> Problem:
    # pydantic puts the kind of a stage between its number and its keys.
    location = [str(part) for part in item["loc"]]
    stage = location.pop(2) if location[0] == "train" and len(location) > 2 else ""
    key = ".".join(location)
    kind, value, context = item["type"], _REPR.repr(item["input"]), item.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown(location, stage, recipe)
    if kind.startswith("union_tag"):
        return _no_stage(key, context.get("tag"))
    if kind == "literal_error":
        if key == "version":
            return wrong(key, f"this release of linearize reads version {context['expected']}, not {value}")
        hint = did_you_mean(str(item["input"]), re.findall(r"'(\w+)'", context["expected"]))
        return wrong(key, f"must be {context['expected']}, not {value}" + (f"; {hint}" if hint else ""))
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return wrong(key, f"must be {words} {context[name]:g}, not {value}")
    if kind == "value_error":
        return wrong(key, str(context["error"]))
    return wrong(key, f"must be {_WANTED[kind]}, not {value}" if kind in _WANTED else f"{item['msg']}, not {value}")


def _unknown(location: list[str], stage: str, recipe: type[BaseModel]) -> Problem:
    name, key = location[-1], ".".join(location)
    if stage and len(location) == 3:
        owners = [other for other, model in schema.STAGES.items() if name in model.model_fields]
        if owners:
            return wrong(key, f"stage {stage} has no {name}; {' and '.join(owners)} {_have(owners)}")
        known = schema.STAGES[stage].model_fields
    elif stage:
        known = schema.Lora.model_fields
    elif len(location) > 2:  # layers: blocks under lists of layers
        known = get_args(recipe.model_fields[location[0]].annotation)[1].model_fields
    else:
        known = (_SECTIONS[location[0]] if len(location) > 1 else recipe).model_fields
    hint = did_you_mean(name, known)
    rest = "; recipes allow only documented keys" + (f"; {hint}" if hint else "")
    return Problem(key, f"unknown key '{key}'", rest)


def _have(owners: list[str]) -> str:
    return "have it" if len(owners) > 1 else "has it"


def _no_stage(key: str, given: Any) -> Problem:
    known = ", ".join(schema.STAGES)
    if given is None:
        return wrong(key, f"needs a stage, which is one of {known}")
    hint = did_you_mean(str(given), schema.STAGES)
    return wrong(f"{key}.stage", f"unknown stage '{given}'; known: {known}" + (f"; {hint}" if hint else ""))
