"""The simulation of a plan has the numbers of the converted program."""

from __future__ import annotations

import math

import pytest
import torch

import quantc as qc
from quantc.ir.batch_inputs import leaves_of
from quantc.recover.simulation import Left, Simulation
from tests.support.costly_nets import NETS


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
@pytest.mark.parametrize("name", ["spectrogram, magnitude", "post-norm encoder, outliers"])
def test_a_simulation_has_the_error_of_the_converted_program(name: str, backend: str) -> None:
    case = NETS[name]()
    program = qc.prepare(qc.capture(case.model, (case.batches[0],)), backend)
    qc.calibrate(program, case.batches)
    simulation = Simulation.of(program)
    leaves = [leaves_of(program, batch, 0) for batch in case.held_out[:2]]
    expected = [simulation.run(each) for each in leaves]
    assert torch.equal(expected[0][0], program(case.held_out[0]))
    error = simulation.error(leaves, expected, Left())
    found = qc.compare(program, qc.convert(program), case.held_out[:2]).sqnr
    assert -10 * math.log10(error) == pytest.approx(found, abs=1e-3)
    every = frozenset(simulation.match_of.values())
    assert simulation.error(leaves, expected, Left(every)) == 0
    assert simulation.error(leaves, expected, Left(tensors=frozenset(program.graph.nodes))) == 0
