"""The pattern language, shared by fusion, annotation and lowering.

See docs/write-a-rule-table.md. The shared vocabulary is in `quantc.patterns.aten`.
"""

from quantc.patterns.checks import Check, at_least, at_most, differs, equals, one_of
from quantc.patterns.dsl import OpPattern, Pattern, any_of, op, optional, out, result, shared
from quantc.patterns.explain_match import Explanation, Tried
from quantc.patterns.operand_patterns import Leaf, const, number, value
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Predicate
from quantc.patterns.rule_matcher import Match, Matcher, Refusal
from quantc.patterns.table import MatchSet, Rule, RuleTable

__all__ = [
    "Check",
    "Explanation",
    "Leaf",
    "Match",
    "MatchSet",
    "Matcher",
    "OpPattern",
    "Pattern",
    "Predicate",
    "Refusal",
    "Rule",
    "RuleTable",
    "Tried",
    "any_of",
    "at_least",
    "at_most",
    "const",
    "differs",
    "equals",
    "number",
    "one_of",
    "op",
    "optional",
    "out",
    "predicate",
    "result",
    "shared",
    "value",
]
