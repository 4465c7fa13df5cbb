"""A model as a file that other programs run. `FORMATS` is the one list: name → the function that writes it."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import logits
from starfish.errors import UserError, listed
from starfish.files import write_tensors, write_whole
from starfish.small import disagreement

OPSET = 18  # what torch's exporter writes by itself; to lower ones it converts, and not always
LARGEST = 2**31  # bytes in one file of protocol buffers
TOLERANCE = 1e-4  # of the largest logit; DeiT-T, dense or small, comes out at 2e-6


def to_onnx(model: nn.Module, inputs: Any, path: Path) -> dict[str, Any]:
    """Write the model as one ONNX file that takes any number of images, and compare it with torch where onnxruntime is.

    `inputs` are an example of two or more; those of a dict keep their names, a tensor is called `images`, the output
    `logits`. `largest_difference` is a part of the largest logit; a file that differs by more than TOLERANCE is not
    kept.
    """
    _check_exporter()
    names = list(inputs) if isinstance(inputs, Mapping) else []
    net = _Logits(copy.deepcopy(model).cpu(), names).eval()
    _check_size(net)
    given = tuple(tensor.cpu() for tensor in (inputs.values() if names else [inputs]))
    program = _translate(net, given)
    found: dict[str, Any] = {"largest_difference": None, "checked_with": None}

    def write(beside: Path) -> None:
        with _quietly():
            program.save(beside, external_data=False)
        if importlib.util.find_spec("onnxruntime") is not None:
            found.update(_compare(net, given, beside))

    write_whole(path, write)
    return {"path": str(path), "format": "onnx", "bytes": path.stat().st_size,
            "opset": program.model.opset_imports[""], **found}  # fmt: skip


def to_safetensors(model: nn.Module, inputs: Any, path: Path) -> dict[str, Any]:
    """Write the plain state dict, for PyTorch code that builds the module itself. `inputs` are not looked at."""
    write_tensors(path, model.state_dict())
    return {"path": str(path), "format": "safetensors", "bytes": path.stat().st_size}


FORMATS: dict[str, Callable[[nn.Module, Any, Path], dict[str, Any]]] = {
    "onnx": to_onnx,
    "safetensors": to_safetensors,
}


class _Logits(nn.Module):
    """The model as a function of tensors that puts out its class scores and nothing else."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: Tensor) -> Tensor:
        return logits(self.model, dict(zip(self.names, given, strict=True)) if self.names else given[0])


def _check_exporter() -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"writing ONNX needs {listed(missing)}", "pip install 'starfish-heal[onnx]'")


def _check_size(net: nn.Module) -> None:
    size = sum(tensor.nbytes for tensor in net.state_dict().values())
    if size >= LARGEST:
        raise UserError(
            f"the model has {size / 1e9:.1f} GB of weights, and one ONNX file holds less than {LARGEST / 1e9:.1f}",
            "export it with --to safetensors",
        )


def _translate(net: _Logits, given: tuple[Tensor, ...]) -> torch.onnx.ONNXProgram:
    """The first dimension of every input is open; a model that fixes it is refused."""
    sizes = ({0: torch.export.Dim.DYNAMIC},) * len(given)
    try:
        with _quietly():
            program = torch.onnx.export(
                net, given, dynamo=True, dynamic_shapes=(sizes,), opset_version=OPSET, verbose=False,
                input_names=net.names or ["images"], output_names=["logits"],
            )  # fmt: skip
    except Exception as error:  # the exporter raises whatever a model's own code runs into
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise UserError(
            f"`{type(net.model).__name__}` cannot be translated to ONNX: {type(error).__name__}: {reason}",
            "its forward may branch on values or on the number of images; --to safetensors writes its weights",
        ) from error
    assert program is not None
    return program


def _compare(net: _Logits, given: tuple[Tensor, ...], path: Path) -> dict[str, Any]:
    """Run the file on the example and on one image of it."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = net.names or ["images"]
    differences = []
    for count in (1, len(given[0])):
        some = tuple(tensor[:count] for tensor in given)
        with torch.no_grad():
            wanted = net(*some)
        (found,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, some, strict=True)})
        differences.append(disagreement(wanted, torch.from_numpy(found)))
    if not all(difference <= TOLERANCE for difference in differences):  # nan is no agreement either
        raise UserError(
            f"in onnxruntime the model differs by {max(differences):.1e} of the largest logit ({TOLERANCE:.0e} may be)",
            "this is a fault of the translation: please report the model; --to safetensors writes its weights",
        )
    return {"largest_difference": max(differences), "checked_with": f"onnxruntime {onnxruntime.__version__}"}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporter prints, logs and warns about itself; what goes wrong it raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        aside = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(aside), contextlib.redirect_stderr(aside):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
