"""`qc.lower(program, "x86", engine=...)`: a module on any engine."""

from __future__ import annotations

import os
from typing import Any

import torch

from quantc.ir.program import Program
from quantc.store.bytes_form import as_bytes, from_bytes
from quantc.store.programs import read
from quantc.targets.deployed_module import Deployed
from quantc.targets.engines.engine_table import Engine, engine_of
from quantc.targets.kernels.saturation import warn_of_products
from quantc.targets.onnx.onnx_export import Exported, export
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.session_calls import Calling
from quantc.targets.onnx.sessions import Session


class OnEngine(Deployed):
    """A quantized program on an engine outside torch. Called like the model; thread-safe.

    `threads` is the engine's number of threads: None follows torch's, also when that changes later.
    """

    def __init__(self, program: Program, engine: Engine, threads: int | None = None) -> None:
        super().__init__()
        self._program = program
        self.engine = engine
        self.threads = threads
        self._exported: Exported = export(program, PROFILES[engine.profile])
        self._calling = Calling.of(program, self._exported)
        self._loaded: dict[int, Session] = {}
        self._session()
        warn_of_products(program)
        self.eval()

    @property
    def program(self) -> Program:
        """The program in Q/DQ form."""
        return self._program

    def _session(self) -> Session:
        """The model as loaded for the number of threads that is wanted now."""
        threads = torch.get_num_threads() if self.threads is None else self.threads
        if threads not in self._loaded:
            self._loaded = {threads: self.engine.load(self._exported.model.SerializeToString(), threads)}
        return self._loaded[threads]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._calling(self._session(), args, kwargs)

    @property
    def proto(self) -> Any:
        """The model given to the engine, an `onnx.ModelProto`."""
        return self._exported.model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file that `qc.load` reads; it is to be lowered for an engine again."""
        self.program.save(path)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnEngine:
        return OnEngine(self.program.clone(), self.engine, self.threads)

    def __reduce__(self) -> Any:
        return _unpickled, (as_bytes(self.program.save), self.engine.name, self.threads)

    # -- telling -------------------------------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        return f"{self.program.name} on x86, run by {self.engine.name}"

    def to_data(self) -> dict[str, Any]:
        """Engine and model size, as JSON-compatible data."""
        return {
            "program": self.program.name,
            "target": "x86",
            "engine": self.engine.name,
            "bytes": self.proto.ByteSize(),
            "note": self.note,
        }

    @property
    def note(self) -> str:
        """Hint that another backend suits the engine better; empty if not."""
        quantizer = self.program.plan.quantizer
        if quantizer is None or quantizer.name in self.engine.suited:
            return ""
        return f"prepared for {quantizer.name}: more of it may be left in float than if prepared for {self.engine.suited[0]}"

    def __str__(self) -> str:
        size = f"{len(self.proto.graph.node)} nodes, {self.proto.ByteSize():,} bytes in ONNX"
        return "\n".join(
            [
                self.headline,
                f"  {size}",
                f"  {self.engine.name}: {self.engine.told}",
                *([f"  {self.note}"] if self.note else []),
            ]
        )


def _unpickled(content: bytes, engine: str, threads: int | None) -> OnEngine:
    program = from_bytes(content, lambda path: read(path)[0])
    return OnEngine(program, engine_of(engine), threads)
