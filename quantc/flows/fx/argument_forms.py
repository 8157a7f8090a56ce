"""Reading what the functions of the flow are given, whichever of its spellings is used."""

from __future__ import annotations

from typing import Any, TypeVar

from quantc.flows.fx.custom_config import ConvertCustomConfig, CustomConfigError, FuseCustomConfig, PrepareCustomConfig

Config = TypeVar("Config", PrepareCustomConfig, ConvertCustomConfig, FuseCustomConfig)


def config_of(kind: type[Config], given: Any, given_as_dict: Any) -> Config:
    """A custom config, given under its name of today or under that with `_dict`, as an object or as a dict."""
    if given is not None and given_as_dict is not None:
        raise CustomConfigError(f"two of {kind.__name__} were given", advice="give one, under either keyword")
    found = given if given is not None else given_as_dict
    if found is None:
        return kind()
    if isinstance(found, kind):
        return kind.from_dict(found.to_dict())  # the user's may change before convert
    if isinstance(found, dict):
        return kind.from_dict(found)
    if type(found).__name__ == kind.__name__ and callable(getattr(found, "to_dict", None)):
        return kind.from_dict(_plain(found.to_dict()))
    raise CustomConfigError(
        f"a {type(found).__name__} was given for {kind.__name__}", advice=f"give a {kind.__name__}, or its dict form"
    )


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """The dict form of another package's config: kinds of quantization go by their names."""
    return {
        key: {str(getattr(kind, "name", kind)).lower(): rest for kind, rest in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in data.items()
    }


def check_flag(name: str, given: Any) -> None:
    """A flag is True or False, and nothing that could be taken for it."""
    if not isinstance(given, bool):
        raise CustomConfigError(f"{name} is {given!r}", advice="give True or False")
