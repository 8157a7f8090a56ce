"""A program's text in a file with its tensors beside it; damaged files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import LoadError
from quantc.ir.program import Program
from quantc.ir.signature import Input, Signature
from quantc.ir.types import TensorType
from quantc.text.files import Snapshot, constants_file, inputs_file, read_text
from quantc.text.parser import parse
from tests.support.programs import aten


def scaled() -> Program:
    """x * w, with an input that capture fixed, and example inputs."""
    graph, root = fx.Graph(), nn.Module()
    root.w = nn.Parameter(torch.tensor([2.0, 3.0]))
    x = graph.placeholder("x")
    x.meta["val"] = TensorType(torch.float32, (2,))
    graph.placeholder("mode")
    w = graph.create_node("get_attr", "w")
    w.meta["val"] = x.meta["val"]
    graph.output((graph.call_function(aten.mul.Tensor, (x, w)),))
    inputs = (Input("x", TensorType(torch.float32, (2,))), Input("mode", None, True, "fast"))
    signature = Signature(inputs, pytree.tree_structure(((0, 0), {})), pytree.tree_structure(0))
    return Program(graph, root, signature, example_inputs=(torch.tensor([1.0, -1.0]), "fast"))


def written(folder: Path, program: Program | None = None) -> Path:
    path = folder / "program.txt"
    Snapshot.of(scaled() if program is None else program).write(path)
    return path


def test_a_program_comes_back_with_its_tensors_and_inputs(tmp_path: Path) -> None:
    path = written(tmp_path)
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"program.txt", "program.safetensors", "program.inputs.safetensors"}
    program = read_text(path)
    assert program.dump() == scaled().dump()
    assert program.example_inputs is not None
    x, mode = program.example_inputs
    assert (x.tolist(), mode) == ([1.0, -1.0], "fast")
    assert program(x, mode).tolist() == [2.0, -3.0]


def test_without_its_tensors_a_program_is_on_the_meta_device(tmp_path: Path) -> None:
    path = written(tmp_path)
    constants_file(path).unlink()
    inputs_file(path).unlink()
    program = read_text(path)
    assert program.root.get_parameter("w").is_meta
    assert program.example_inputs is None
    again = written(tmp_path, program)
    assert not constants_file(again).exists(), "what has no data is not written"


def test_text_without_a_seal_counts_as_written_by_hand(tmp_path: Path) -> None:
    path = written(tmp_path)
    *rest, seal = path.read_text(encoding="utf-8").splitlines()
    assert seal.startswith("# sealed ")
    path.write_text("\n".join(rest).replace("mul(", "add("), encoding="utf-8")
    assert read_text(path).node("mul_tensor").target is aten.add.Tensor


def test_text_that_was_changed_under_its_seal_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("mul(", "add("), encoding="utf-8")
    with pytest.raises(LoadError, match="seal") as caught:
        read_text(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("beside", [constants_file, inputs_file])
def test_damaged_tensors_are_refused_with_their_file(tmp_path: Path, beside: object) -> None:
    path = written(tmp_path)
    damaged = constants_file(path) if beside is constants_file else inputs_file(path)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(LoadError, match=damaged.name):
        read_text(path)


def test_inputs_of_another_program_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    program = scaled()
    program.example_inputs = ("slow", "fast")
    Snapshot("", {}, program.example_inputs).write(tmp_path / "other.txt")
    inputs_file(tmp_path / "other.txt").replace(inputs_file(path))
    with pytest.raises(LoadError, match=r"input 0 \(x\)"):
        read_text(path)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"missing\.txt"):
        read_text(tmp_path / "missing.txt")


def test_a_snapshot_copies_no_tensors() -> None:
    program = scaled()
    taken = Snapshot.of(program)
    assert taken.constants["w"] is program.root.get_parameter("w")
    assert parse(taken.text, taken.constants).dump() == program.dump()
