"""File suffixes: quantc does not write its own formats under the suffix of another."""

from __future__ import annotations

from pathlib import Path

from quantc.errors import SaveError

WITH_LOWER = 'qc.lower(program, "{target}").save("{path}")'
ENDINGS: dict[str, tuple[str, str]] = {
    ".qc": ("a program of quantc's", 'program.save("{path}")'),
    ".onnx": ("an ONNX model", WITH_LOWER.replace("{target}", "onnx")),
    ".pte": ("an ExecuTorch program", WITH_LOWER.replace("{target}", "executorch")),
    ".pt2": ("an exported program", 'torch.export.save(torch.export.export(program.module, inputs), "{path}")'),
    ".pt": ("a file of torch.save", 'torch.save(program.state_dict(), "{path}")'),
    ".pth": ("a file of torch.save", 'torch.save(program.state_dict(), "{path}")'),
    ".ckpt": ("a file of torch.save", 'torch.save(program.state_dict(), "{path}")'),
    ".pkl": ("a pickle", 'pickle.dump(program, open("{path}", "wb"))'),
    ".pickle": ("a pickle", 'pickle.dump(program, open("{path}", "wb"))'),
    ".safetensors": ("a file of tensors", 'safetensors.torch.save_file(program.state_dict(), "{path}")'),
    ".npz": ("a file of arrays", 'numpy.savez("{path}", ...)'),
    ".npy": ("an array", 'numpy.save("{path}", array)'),
    ".json": ("JSON", 'open("{path}", "w").write(program.dump("json"))'),
    ".toml": ("a config", 'config.save("{path}")'),
    ".txt": ("text", 'open("{path}", "w").write(program.dump())'),
    ".dot": ("a graph", 'open("{path}", "w").write(program.dump("dot"))'),
    ".graphml": ("a graph", 'open("{path}", "w").write(program.dump("graphml"))'),
    ".html": ("a page", 'open("{path}", "w").write(result.report.to_html())'),
    ".py": ("source code", "another name"),
    ".zip": ("an archive", "another name"),
    ".h5": ("a file of Keras", "another name"),
    ".pb": ("a file of TensorFlow", "another name"),
    ".tflite": ("a file of TensorFlow Lite", "another name"),
    ".engine": ("a file of TensorRT", 'qc.lower(program, "onnx", profile="tensorrt"), and TensorRT'),
    ".plan": ("a file of TensorRT", 'qc.lower(program, "onnx", profile="tensorrt"), and TensorRT'),
    ".trt": ("a file of TensorRT", 'qc.lower(program, "onnx", profile="tensorrt"), and TensorRT'),
    ".xml": ("a file of OpenVINO", 'qc.lower(program, "onnx", profile="openvino"), and OpenVINO'),
    ".gguf": ("a file of llama.cpp", "another name"),
    ".mlmodel": ("a file of Core ML", "another name"),
    ".mlpackage": ("a file of Core ML", "another name"),
    ".ort": ("a file of ONNX Runtime", WITH_LOWER.replace("{target}", "onnx").replace("{path}", "{stem}.onnx")),
    ".ptl": ("a file of PyTorch Mobile", "another name"),
}
"""By suffix: the format others expect, and the call that writes it."""


def check_ending(path: Path, own: tuple[str, ...], what: str) -> None:
    """Raise an error if the suffix belongs to another format. `own` are the suffixes of what is written; unknown ones
    pass."""
    ending = path.suffix.lower()
    if ending in own or ending not in ENDINGS:
        return
    kind, instead = ENDINGS[ending]
    told = instead.replace("{path}", str(path)).replace("{stem}", str(path.with_suffix("")))
    first = next((each for each in own if each), "")
    raise SaveError(
        f"{path.name} would be taken for {kind}, and this writes {what}",
        where=str(path),
        advice=f"name it {path.with_suffix(first).name}; for {kind} use {told}",
    )
