"""`QuantConfig`: quantization settings for the parts of a program, as data.

    config = QuantConfig().set("layer1.*", FLOAT).set(nn.Linear, INT8_DYNAMIC).set_op("add", UINT8)

Each call returns a new config with one more rule, and the last rule that matches wins. Parts without a matching rule
are left to the backend. A rule that matches nothing is an error, since a misspelt name would otherwise go unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from quantc.config.config_rule import ConfigRule, Use
from quantc.config.resolve import Resolution, resolve
from quantc.config.selectors import ByAll, ByEdge, ByNode, ByOp, Key, selector_of
from quantc.errors import ConfigError, LoadError, QuantcError
from quantc.files.atomic_file import write_text
from quantc.files.regular_file import as_path, read_text
from quantc.files.sealed_data import MAX_BYTES, SEAL, parse_json, parse_toml, seal, unseal
from quantc.ir.decisions import Fixed, Float, Quantize
from quantc.ir.program import Program
from quantc.spec.formats import Role
from quantc.spec.spec import QuantSpec
from quantc.support.toml_writer import to_toml
from quantc.support.validated import Frozen

EXAMPLE = 'write [[rules]], select = { by = "module", path = "layer1.*" }, use = "FLOAT"; or rules = [] for none'


def _with_seal(schema: dict[str, Any]) -> None:
    """Add `seal` to the schema: files have this entry, configs do not."""
    told = "a digest of the rules, as they were written; remove it to edit the file"
    schema["properties"][SEAL] = {"type": "string", "description": told}


class QuantConfig(Frozen, frozen=True, json_schema_extra=_with_seal):
    """Rules for the parts of a program; the last that matches wins."""

    noun: ClassVar[str] = "config"
    fault = ConfigError

    rules: tuple[ConfigRule, ...] = ()

    # -- building --------------------------------------------------------------------------------------------

    def set(self, key: Key, use: QuantSpec | Use, *, role: Role | str | None = None) -> QuantConfig:
        """Add a rule for modules: by path or glob, compiled regular expression, or class. It applies to everything
        inside them."""
        if not isinstance(use, QuantSpec | Quantize | Fixed | Float | str | dict):
            raise ConfigError(
                f"{use!r} is nothing that a tensor can become",
                where=f"the rule for {key!r}",
                advice="give a spec, as qc.INT8, qc.FLOAT to leave it float, or qc.Fixed(scale, zero_point)",
            )
        rule = ConfigRule.model_validate({"select": selector_of(key), "use": use, "role": role})
        return QuantConfig(rules=(*self.rules, rule))

    def set_all(self, use: QuantSpec | Use, *, role: Role | str | None = None) -> QuantConfig:
        """Add a rule for everything, as in `set_all(FLOAT, role="bias")`."""
        return self.set(ByAll(), use, role=role)

    def set_op(self, op: str, use: QuantSpec | Use, *, role: Role | str | None = None) -> QuantConfig:
        """Add a rule for all ops of a kind, by their name in the dialect."""
        return self.set(ByOp(op=op), use, role=role)

    def set_node(self, node: str, use: QuantSpec | Use, *, role: Role | str | None = None) -> QuantConfig:
        """Add a rule for one node, by its name in the dump; `branch/*` is a whole nested graph."""
        return self.set(ByNode(node=node), use, role=role)

    def set_edge(self, producer: str, consumer: str, use: QuantSpec | Use) -> QuantConfig:
        """Add a rule for the tensor from one node to another; each by node name or module path."""
        return self.set(ByEdge(producer=producer, consumer=consumer), use)

    def __add__(self, other: QuantConfig) -> QuantConfig:
        """The rules of both; the other's win."""
        return QuantConfig(rules=(*self.rules, *other.rules))

    def __str__(self) -> str:
        return "\n".join(str(rule) for rule in self.rules) or "no rules: the backend decides"

    # -- using -----------------------------------------------------------------------------------------------

    def resolve(self, program: Program) -> Resolution:
        """The settings of each node of a program. ConfigError if a rule matches nothing."""
        return resolve(self.rules, program)

    # -- files -----------------------------------------------------------------------------------------------

    def save(self, path: Path | str) -> None:
        """Write a `.toml` or `.json` file atomically. Its entry `seal` shows damage: remove it to edit the file."""
        path = as_path(path, ConfigError)
        data = seal(self.model_dump(mode="json", exclude_none=True))
        write_text(path, json.dumps(data, indent=2) + "\n" if _is_json(path) else to_toml(data))

    @staticmethod
    def load(path: Path | str) -> QuantConfig:
        """Read a `.toml` or `.json` file."""
        path = as_path(path, ConfigError)
        parse = parse_json if _is_json(path) else parse_toml
        try:
            data = parse(read_text(path, "write a .toml or .json file", most=MAX_BYTES))
            data = unseal(data) if isinstance(data, dict) else data
        except LoadError as error:
            raise ConfigError(f"{path} does not read: {error.what}", where=str(path), advice=error.advice) from error
        if not isinstance(data, dict) or set(data) != {"rules"} or not isinstance(data["rules"], list):
            raise ConfigError("a config is a list of rules, and nothing else", where=str(path), advice=EXAMPLE)
        rules = enumerate(data["rules"], start=1)
        return QuantConfig(rules=tuple(_rule(path, number, rule) for number, rule in rules))


def _rule(path: Path, number: int, data: Any) -> ConfigRule:
    try:
        return ConfigRule.model_validate(data)
    except QuantcError as error:
        raise ConfigError(error.what, where=f"rule {number} of {path}", advice=error.advice) from error


def _is_json(path: Path) -> bool:
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(f"{path} is neither .toml nor .json", advice="name the file so that its format can be told")
    return path.suffix == ".json"
