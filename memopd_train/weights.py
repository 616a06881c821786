"""Hand the student's weights to an engine, and prove that it samples from them.

An engine that shares the student's module needs nothing but the new version number; any other gets the weights, a
sharded parameter gathered first. Engines that can, give a checksum of what they sample from, and it must be the
student's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from memopd_agents.engines.base import Engine, EngineError
from memopd_agents.engines.hf import weights_checksum

ALIGNMENT = 64
"""Bytes; where torch's own memory on a CPU begins."""


def sync_engine(engine: Engine, actor: PreTrainedModel, version: int) -> None:
    """Make ``engine`` sample from the present weights of ``actor``.

    Args:
        engine: Idle.
        actor: The student.
        version: Optimiser steps behind the weights; recorded with every call.

    Raises:
        EngineError: If the engine's checksum is not the student's: it would sample from other weights than are trained.
    """
    if getattr(engine, "model", None) is actor:
        setattr(engine, "version", version)  # noqa: B010  (not every engine has one)
    else:
        engine.update_weights(weights_of(actor), version)
    checksum = getattr(engine, "checksum", None)
    if checksum is not None and checksum() != weights_checksum(weights_of(actor)):
        raise EngineError(
            f"the engine does not sample from the weights of step {version}: its checksum differs from the student's"
        )


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and whole tensor of each parameter; a sharded one is gathered, so every rank must iterate."""
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def align(model: nn.Module) -> None:
    """Copy weights that do not begin where torch's own memory does; a file maps them to any address.

    The matrix products of some CPUs round differently by address: a model as it was loaded and the same weights out of
    a checkpoint would not go on to the same bits.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
