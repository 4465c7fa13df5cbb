"""What a model costs: its size, its arithmetic, its time. Counted and measured, nothing estimated."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from starfish.activations import call
from starfish.core import Images, Long
from starfish.devices import to_device
from starfish.tables import milliseconds

WARM_UP = 2  # runs of each model that are not measured
BATCHES = (1, 32)
REPEATS = 20
LONGEST = 4.0  # seconds of one batch size, after which no round begins
FEWEST = 5  # rounds, however long they take
NOTICEABLE = 1.1  # times as fast; what lies below is noise


def measuring(dense: nn.Module, pruned: nn.Module, small: nn.Module | None, images: Images) -> Long[dict[str, Any]]:
    """What the dense, the masked and, where units are gone, the small model cost, and a sentence on what it means.

    A pruned model that is smaller than the dense one already is the small one.
    """
    is_small = _size(pruned) < _size(dense)
    models = {"dense": dense, "small" if is_small else "masked": pruned} | ({} if small is None else {"small": small})
    inputs = first(images)
    times = yield from latencies(models, inputs, repeats=REPEATS)
    figures = {name: {**cost(model, inputs), "latency_ms": times[name]} for name, model in models.items()}
    return {**figures, "input": shape_of(inputs), "verdict": verdict(times)}


def first(images: Images) -> Any:
    """As many inputs as are measured with."""
    return images.batch(list(range(min(max(BATCHES), len(images)))))


def shape_of(inputs: Any) -> list[int] | None:
    """Of one input; None where an input is several tensors."""
    return None if isinstance(inputs, Mapping) else list(inputs.shape[1:])


def cost(model: nn.Module, inputs: Any) -> dict[str, float]:
    """How large a model is and what one image costs it, on whatever hardware.

    `parameters`, `nonzero` (those that are not zero), `file_mb` (all that its state dict holds, in millions of bytes;
    a file adds some kilobytes of names), and `flops` as in `flops`.
    """
    return {
        "parameters": _size(model),
        "nonzero": sum(int(parameter.count_nonzero()) for parameter in model.parameters()),
        "file_mb": sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e6,
        "flops": flops(model, inputs),
    }


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def flops(model: nn.Module, inputs: Any) -> int:
    """The multiplications and additions that ONE image needs, a multiply-add being two; a zero counts like any number.

    Counted are the products of linear layers, convolutions and attention (queries with keys, weights with values), not
    biases, norms, activations and the softmax. Attention counts at its own width: the zeros that pad queries and keys
    for a fused kernel are left out. A copy runs on the CPU in plain products, since torch's counter does not know
    every fused kernel.
    """
    net = copy.deepcopy(model).cpu().eval()
    image = to_device(batch_of(inputs, 1), torch.device("cpu"))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Unpadded(), counter:
        call(net, image)
    return int(counter.get_total_flops())


class _Unpadded(TorchFunctionMode):
    """Attention to the queries and keys as they were before zeros were put beside them: the products are the same.

    That functions are watched at all also keeps nn.MultiheadAttention off its fast path, which hides what it does.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            args = (*(getattr(x, "unpadded", x) for x in args[:2]), *args[2:])
        out = function(*args, **kwargs)
        along_the_last = function is F.pad and len(args) == 2 and len(args[1]) == 2
        if along_the_last and kwargs.get("mode", "constant") == "constant" and not kwargs.get("value"):
            out.unpadded = args[0]
        return out


def batch_of(inputs: Any, size: int) -> Any:
    """The first `size` of the inputs, a tensor or a dict of tensors; where there are fewer, over and over."""
    if isinstance(inputs, Mapping):
        return {name: batch_of(tensor, size) for name, tensor in inputs.items()}
    return inputs[torch.arange(size, device=inputs.device) % len(inputs)]


def latencies(
    models: Mapping[str, nn.Module], inputs: Any, *, batches: Sequence[int] = BATCHES, repeats: int = REPEATS
) -> Long[dict[str, dict[str, float]]]:
    """Median milliseconds of a forward pass: name → batch size → milliseconds. Leaves the models in evaluation mode.

    The models take turns, so that whatever else the machine does hits all alike. Each runs `repeats` times at every
    batch size, or fewer (FEWEST or more) when that takes longer than LONGEST.
    """
    for model in models.values():
        model.eval()
    found: dict[str, dict[str, float]] = {name: {} for name in models}
    for place, batch in enumerate(batches):
        given = {name: to_device(batch_of(inputs, batch), _device(model)) for name, model in models.items()}
        for name, model in models.items():
            for _ in range(WARM_UP):
                _seconds(model, given[name])
        seconds: dict[str, list[float]] = {name: [] for name in models}
        start, done = time.monotonic(), 0
        while done < repeats:
            for name, model in models.items():
                seconds[name].append(_seconds(model, given[name]))
            done += 1
            if done >= FEWEST and time.monotonic() - start > LONGEST:
                done = repeats
            yield {"stage": "latency", "done": place * repeats + done, "total": len(batches) * repeats}
        for name in models:
            found[name][str(batch)] = 1000 * statistics.median(seconds[name])
    return found


def _seconds(model: nn.Module, inputs: Any) -> float:
    """One forward pass, to the end of what it started on an accelerator."""
    device = _device(model)
    with torch.inference_mode():
        _finish(device)
        start = time.perf_counter()
        call(model, inputs)
        _finish(device)
        return time.perf_counter() - start


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def verdict(times: Mapping[str, Mapping[str, float]]) -> str:
    """One sentence on what pruning did to the time, from what `latencies` found of "dense" and "masked" or "small"."""
    dense = times["dense"]
    said = []
    if "small" in times:
        said.append(_compared("small", times["small"], dense))
    if "masked" in times:
        said.append(_compared("masked", times["masked"], dense))
        if not _faster(times["masked"], dense):
            said[-1] += ": its zeros are multiplied like any number"
            if "small" not in times:
                said[-1] += ", and to gain by them takes a runtime that skips zeros, or masks of whole units"
    text = "; ".join(said)
    return f"{text[:1].upper()}{text[1:]}."


def _compared(name: str, times: Mapping[str, float], dense: Mapping[str, float]) -> str:
    figures = ", ".join(
        f"{milliseconds(times[batch])} ms against {milliseconds(dense[batch])} at batch {batch}" for batch in times
    )
    if not _faster(times, dense):
        return f"the {name} model is no faster than the dense one ({figures})"
    ratios = " and ".join(f"{dense[batch] / times[batch]:.2f} times at batch {batch}" for batch in times)
    return f"the {name} model is faster than the dense one, {ratios} ({figures})"


def _faster(times: Mapping[str, float], dense: Mapping[str, float]) -> bool:
    """Over all batch sizes, by more than noise."""
    return statistics.geometric_mean(dense[batch] / times[batch] for batch in times) > NOTICEABLE
