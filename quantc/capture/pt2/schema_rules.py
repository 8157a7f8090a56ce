"""Validation rules for every text field of an exported program, by class and field of torch's own schema.

torch writes most names of a program into Python source (argument and node names, attribute paths, guards), evaluates
its size expressions, and resolves its operators by attribute lookup. Accepted text must be unable to become code there.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable

from quantc.capture.pt2.expression_checks import is_quiet, why_not_guard, why_not_size
from quantc.capture.pt2.operator_checks import why_not_lookup, why_not_operator
from quantc.capture.pt2.treespec_checks import why_not_input_spec, why_not_treespec

Rule = Callable[[str], str | None]
Json = object
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FILE = re.compile(r"[A-Za-z0-9_]{1,64}")
DIALECTS = ("ATEN", "TRAINING", "")
CUSTOM_OBJECT = "is an object of a custom class, which only code from outside the file could rebuild"


def _anything(_: str) -> str | None:
    return None


def _word(text: str) -> str | None:
    if WORD.fullmatch(text) and not keyword.iskeyword(text):
        return None
    return f"is `{text[:60]}`, not a plain name"


def _word_or_nothing(text: str) -> str | None:
    return _word(text) if text else None


def _argument(text: str) -> str | None:
    """An operator's argument: some of aten's are named `from`, and higher-order ops take theirs without a name."""
    return None if keyword.iskeyword(text) else _word_or_nothing(text)


def _attribute_path(text: str) -> str | None:
    """A dotted path such as `blocks.0.my-layer.weight`. Double underscores could walk out of the module."""
    parts = text.split(".")
    if is_quiet(text) and all(part and not part.startswith("__") for part in parts):
        return None
    return f"is `{text[:60]}`, not a path of module attributes"


def _attribute_path_or_nothing(text: str) -> str | None:
    return _attribute_path(text) if text else None


def _quiet(text: str) -> str | None:
    return (
        None
        if is_quiet(text)
        else "is text with quotes, backslashes or control characters, which torch pastes into code"
    )


def _file(text: str) -> str | None:
    return None if FILE.fullmatch(text) else f"is `{text[:60]}`, not the name of a file in the archive"


def _dialect(text: str) -> str | None:
    return None if text in DIALECTS else f"is `{text[:60]}`, not a dialect of torch.export"


def _custom_object(_: str) -> str | None:
    return CUSTOM_OBJECT


RULES: dict[tuple[str, str], Rule] = {
    ("Argument", "as_operator"): why_not_operator,
    ("Argument", "as_string"): _anything,
    ("Argument", "as_strings"): _anything,
    ("BufferMutationSpec", "buffer_name"): _attribute_path,
    ("ConstantValue", "as_string"): _quiet,
    ("CustomObjArgument", "class_fqn"): _custom_object,
    ("CustomObjArgument", "name"): _custom_object,
    ("Device", "type"): _word,
    ("ExportedProgram", "guards_code"): why_not_guard,
    ("ExportedProgram", "torch_version"): _anything,
    ("ExportedProgram", "verifiers"): _dialect,
    ("GradientToParameterSpec", "parameter_name"): _attribute_path,
    ("GradientToUserInputSpec", "user_input_name"): _word,
    ("GraphArgument", "name"): _word,
    ("GraphModule", "metadata"): _anything,
    ("InputToBufferSpec", "buffer_name"): _attribute_path,
    ("InputToConstantInputSpec", "name"): _word_or_nothing,
    ("InputToCustomObjSpec", "custom_obj_name"): _custom_object,
    ("InputToParameterSpec", "parameter_name"): _attribute_path,
    ("InputToTensorConstantSpec", "tensor_constant_name"): _attribute_path,
    ("ModuleCallEntry", "fqn"): _attribute_path_or_nothing,
    ("ModuleCallSignature", "forward_arg_names"): _word,
    ("ModuleCallSignature", "in_spec"): why_not_input_spec,
    ("ModuleCallSignature", "out_spec"): why_not_treespec,
    ("NamedArgument", "name"): _argument,
    ("NamedTupleDef", "field_names"): _word,
    ("Node", "metadata"): _anything,
    ("Node", "name"): _word_or_nothing,
    ("Node", "target"): why_not_operator,
    ("ParameterMutationSpec", "parameter_name"): _attribute_path,
    ("PayloadMeta", "path_name"): _file,
    ("SymBoolArgument", "as_name"): _word,
    ("SymExpr", "expr_str"): why_not_size,
    ("SymFloatArgument", "as_name"): _word,
    ("SymIntArgument", "as_name"): _word,
    ("TensorArgument", "name"): _word,
    ("TokenArgument", "name"): _word,
    ("UserInputMutationSpec", "user_input_name"): _word,
}
KEYS: dict[tuple[str, str], Rule] = {
    ("Argument", "as_string_to_argument"): _quiet,
    ("ExportedProgram", "opset_version"): _quiet,
    ("ExportedProgram", "range_constraints"): why_not_size,
    ("Graph", "custom_obj_values"): _custom_object,
    ("Graph", "sym_bool_values"): _word,
    ("Graph", "sym_float_values"): _word,
    ("Graph", "sym_int_values"): _word,
    ("Graph", "tensor_values"): _word,
    ("GraphModule", "metadata"): _quiet,
    ("GraphModule", "treespec_namedtuple_fields"): _quiet,
    ("Node", "metadata"): _quiet,
    ("PayloadConfig", "config"): _attribute_path,
}


def _fixed_text_inputs(arguments: Json) -> str | None:
    """An input with a fixed string is compared against that string, quoted by hand, in the code of the guards."""
    listed = arguments if isinstance(arguments, list) else [arguments]
    texts = (item.get("as_string", "") for item in listed if isinstance(item, dict))
    return next((reason for text in texts if isinstance(text, str) and (reason := _quiet(text))), None)


def _metadata(table: Json) -> str | None:
    if not isinstance(table, dict):
        return None
    trace = table.get("stack_trace", "")
    if isinstance(trace, str) and ("\r" in trace or "\0" in trace):
        return "has a stack trace with control characters, which printed code would take for a line end"
    stack = table.get("source_fn_stack", "")
    entries = stack.split(";") if isinstance(stack, str) and stack else []
    return next((reason for entry in entries if (reason := why_not_lookup(entry.partition(",")[2]))), None)


# Checks of a whole field, on top of the rules of its parts.
WHOLE: dict[tuple[str, str], Callable[[Json], str | None]] = {
    ("Graph", "inputs"): _fixed_text_inputs,
    ("Node", "metadata"): _metadata,
    ("UserInputSpec", "arg"): _fixed_text_inputs,
}
