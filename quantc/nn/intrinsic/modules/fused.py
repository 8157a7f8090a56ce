"""Float layers that belong together: sequences that quantized and trained modules are made of in one piece.

Each class is a row: what it may hold, in order. `nn.Sequential` does the rest.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from quantc.errors import SpecError

Kinds = type[nn.Module] | tuple[type[nn.Module], ...]


class _FusedModule(nn.Sequential):
    """A sequence that quantization treats as one layer, by the kinds of its members."""

    parts: ClassVar[tuple[Kinds, ...]] = ()

    def __init_subclass__(cls, parts: tuple[Kinds, ...] = (), **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.parts = parts or cls.parts

    def __init__(self, *modules: nn.Module) -> None:
        given = ", ".join(type(module).__name__ for module in modules)
        fits = len(modules) == len(self.parts) and all(map(isinstance, modules, self.parts))
        if self.parts and not fits:
            wanted = ", ".join(_names(kinds) for kinds in self.parts)
            raise SpecError(f"{type(self).__name__} is made of {wanted}, not of {given}", where=type(self).__name__)
        super().__init__(*modules)


def _names(kinds: Kinds) -> str:
    return " or ".join(kind.__name__ for kind in kinds) if isinstance(kinds, tuple) else kinds.__name__


class ConvReLU1d(_FusedModule, parts=(nn.Conv1d, nn.ReLU)): ...


class ConvReLU2d(_FusedModule, parts=(nn.Conv2d, nn.ReLU)): ...


class ConvReLU3d(_FusedModule, parts=(nn.Conv3d, nn.ReLU)): ...


class LinearReLU(_FusedModule, parts=(nn.Linear, nn.ReLU)): ...


class ConvBn1d(_FusedModule, parts=(nn.Conv1d, nn.BatchNorm1d)): ...


class ConvBn2d(_FusedModule, parts=(nn.Conv2d, nn.BatchNorm2d)): ...


class ConvBn3d(_FusedModule, parts=(nn.Conv3d, nn.BatchNorm3d)): ...


class ConvBnReLU1d(_FusedModule, parts=(nn.Conv1d, nn.BatchNorm1d, nn.ReLU)): ...


class ConvBnReLU2d(_FusedModule, parts=(nn.Conv2d, nn.BatchNorm2d, nn.ReLU)): ...


class ConvBnReLU3d(_FusedModule, parts=(nn.Conv3d, nn.BatchNorm3d, nn.ReLU)): ...


class LinearBn1d(_FusedModule, parts=(nn.Linear, nn.BatchNorm1d)): ...


class BNReLU2d(_FusedModule, parts=(nn.BatchNorm2d, nn.ReLU)): ...


class BNReLU3d(_FusedModule, parts=(nn.BatchNorm3d, nn.ReLU)): ...
