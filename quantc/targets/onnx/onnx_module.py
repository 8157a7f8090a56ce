"""`qc.lower(program, "onnx")`: an ONNX model that can be saved, and run in ONNX Runtime."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quantc.errors import SaveError
from quantc.files.atomic_file import whole_file, write_bytes
from quantc.files.endings import check_ending
from quantc.files.regular_file import as_path
from quantc.ir.program import Program, check_program
from quantc.store.bytes_form import as_bytes, from_bytes
from quantc.store.programs import read
from quantc.support.optional_dependency import is_installed
from quantc.targets.deployed_module import Deployed
from quantc.targets.onnx.dtypes import onnx_module
from quantc.targets.onnx.onnx_export import LARGEST_MESSAGE, Exported, export
from quantc.targets.onnx.ort_fusions import Fusions, fusions_of
from quantc.targets.onnx.profiles import profile_of
from quantc.targets.onnx.seal import data_file, seal_model
from quantc.targets.onnx.session_calls import Calling
from quantc.targets.onnx.sessions import OnnxRuntime, Session
from quantc.targets.provenance import check_quantized

RUNTIME = "onnxruntime"


class OnnxModel(Deployed):
    """A quantized program in ONNX. A call runs it in ONNX Runtime; `proto` is the model itself."""

    def __init__(self, program: Program, exported: Exported) -> None:
        super().__init__()
        self._program = program
        self._exported = exported
        self._calling = Calling.of(program, exported)
        self._session: tuple[int, Session] | None = None
        self.eval()

    @property
    def program(self) -> Program:
        """The program in Q/DQ form."""
        return self._program

    @property
    def proto(self) -> Any:
        """The model, an `onnx.ModelProto`."""
        return self._exported.model

    @property
    def metadata(self) -> dict[str, str]:
        """Provenance entries of the model's metadata."""
        return {entry.key: entry.value for entry in self.proto.metadata_props}

    @property
    def profile(self) -> str:
        """Runtime profile it is written for."""
        return self.metadata["quantc.profile"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file, atomically. A model above protobuf's size limit stores its weights in a second file."""
        target = as_path(path, SaveError)
        check_ending(target, (".onnx",), "an ONNX model")
        if self.proto.ByteSize() > LARGEST_MESSAGE:
            self._save_apart(target)
        else:
            write_bytes(target, seal_model(self.proto.SerializeToString()))

    def _save_apart(self, target: Path) -> None:
        """Write the model to one file and its weights to another, each whole or not at all; the weights first."""
        beside = data_file(target)
        copy = type(self.proto)()
        copy.CopyFrom(self.proto)  # externally stored tensors are removed from the model
        with whole_file(target) as draft, whole_file(beside) as data, TemporaryDirectory(dir=data.parent) as folder:
            place = Path(folder) / target.name
            onnx_module().save(copy, str(place), save_as_external_data=True, location=beside.name)
            os.replace(place.with_name(beside.name), data)
            draft.write_bytes(seal_model(place.read_bytes(), data))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run in ONNX Runtime, on as many threads as torch uses."""
        threads = torch.get_num_threads()
        if self._session is None or self._session[0] != threads:
            self._session = threads, OnnxRuntime(self.proto.SerializeToString(), threads)
        return self._calling(self._session[1], args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def fusions(self) -> Fusions:
        """Quantized ops that ONNX Runtime computes on integers, and those it leaves in float."""
        return fusions_of(self.proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModel:
        return lower(self.program, profile=self.profile)

    def __reduce__(self) -> Any:
        return _unpickled, (as_bytes(self.program.save), self.profile)

    # -- telling -------------------------------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        size = self.proto.ByteSize()
        return f"{self.program.name} in ONNX: {len(self.proto.graph.node)} nodes, {size:,} bytes"

    def to_data(self) -> dict[str, Any]:
        """Summary as JSON-compatible data."""
        return {
            "program": self.program.name,
            "target": "onnx",
            "nodes": len(self.proto.graph.node),
            "bytes": self.proto.ByteSize(),
            "metadata": self.metadata,
            "fusions": self.fusions().to_data() if is_installed(RUNTIME) else None,
        }

    def __str__(self) -> str:
        told = (
            str(self.fusions())
            if is_installed(RUNTIME)
            else f"{RUNTIME}, which would say what it fuses, is not installed"
        )
        return "\n".join([self.headline, *(f"  {line}" for line in told.splitlines())])


def lower(program: Program, *, profile: str | None = None) -> OnnxModel:
    """Lower a quantized program to an ONNX model; the program is not modified.

    `program` is the result of `qc.convert`, in Q/DQ form. Ops without an ONNX form raise an error that lists them all.
    `profile` names the runtime to write for: "onnxruntime", "openvino" or "tensorrt"; by default the one of the
    program's backend.
    """
    check_program(program, "lower", "qc.convert(prepared), or take result.program of qc.quantize(...),")
    check_quantized(program, "ONNX")
    return OnnxModel(program, export(program, profile_of(program, profile)))


def _unpickled(content: bytes, profile: str) -> OnnxModel:
    return lower(from_bytes(content, lambda path: read(path)[0]), profile=profile)
