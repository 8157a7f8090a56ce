"""QConfig and the named ones, at their public path."""

from __future__ import annotations

import pickle

import torch.ao.quantization.qconfig as theirs

from quantc.flows import qconfig

DROPPED = {"get_default_qconfig_dict", "get_default_qat_qconfig_dict"}
"""Of the dict form that torch itself has given up for mappings."""


def test_every_name_of_torch_but_the_dropped_is_here() -> None:
    assert set(theirs.__all__) - set(qconfig.__all__) == DROPPED


def test_named_qconfigs_are_pickled_and_equal_what_they_were() -> None:
    for name in qconfig.__all__:
        found = getattr(qconfig, name)
        if isinstance(found, qconfig.QConfig):
            again = pickle.loads(pickle.dumps(found))  # noqa: S301 - our own
            assert qconfig.qconfig_equals(again, found), name
