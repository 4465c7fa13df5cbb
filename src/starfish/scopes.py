"""Which weights may be pruned: `qkv+out+mlp`, `qk`, `conv_fc` … → parameters and their rows (methods.md 0.2)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from starfish.anatomy import unwrap
from starfish.core import Anatomy
from starfish.errors import UserError, listed

ROLES = ("qkv", "q", "k", "v", "kv", "out", "mlp_in", "mlp_out", "conv", "depthwise", "head", "other")
SCOPES = {role: {role} for role in ROLES} | {
    "qkv": {"qkv", "q", "k", "v", "kv"},
    "qk": {"q", "k"},
    "mlp": {"mlp_in", "mlp_out"},
    "all": set(ROLES),
}
ALIASES = {
    "dw": "depthwise",
    "fc": "head",
    "conv_fc": "conv+head",
    "conv_only": "conv",
    "fc_only": "head",
    "conv_dw": "conv+depthwise",
}
FUSED_ROWS = {  # of the rows of a fused tensor, which share is what
    "qkv": {"q": (0, 1 / 3), "k": (1 / 3, 2 / 3), "v": (2 / 3, 1), "qk": (0, 2 / 3)},
    "kv": {"k": (0, 1 / 2), "v": (1 / 2, 1), "qk": (0, 1 / 2)},
}


def scope(anatomy: Anatomy, model: nn.Module, name: str) -> dict[str, slice]:
    """Parameter → the rows that may be pruned, for a scope such as `qkv+out+mlp`, `qk`, `conv_fc` or `all`."""
    parameters = dict(unwrap(model).named_parameters())
    chosen: dict[str, slice] = {}
    for part in _parts_of(name):
        rows = _rows(anatomy, parameters, part)
        if not rows:
            has = listed(scope_names(anatomy, unwrap(model)), 20)
            raise UserError(f"scope `{name}`: this model has no weight in `{part}`", f"its scopes are {has}")
        for parameter, add in rows.items():
            chosen[parameter] = _union(parameter, chosen.get(parameter, add), add)
    return {parameter: chosen[parameter] for parameter in anatomy.roles if parameter in chosen}


def scope_names(anatomy: Anatomy, model: nn.Module) -> list[str]:
    """The parts a scope of this model can be joined from."""
    parameters = dict(model.named_parameters())
    return [part for part in SCOPES if _rows(anatomy, parameters, part)]


def default_scope(anatomy: Anatomy) -> str:
    """What is pruned when the user does not say: the weights that a network of this kind consists of."""
    roles = set(anatomy.roles.values())
    if roles & {"qkv", "q"}:
        return "+".join(part for part in ("qkv", "out", "mlp") if roles & SCOPES[part])
    if "mlp_in" in roles:
        return "mlp"
    return "conv_fc" if {"conv", "head"} <= roles else "conv" if "conv" in roles else "all"


def _parts_of(name: str) -> list[str]:
    written = "+".join(ALIASES.get(part.strip().lower(), part.strip().lower()) for part in re.split("[+,]", name))
    parts = written.split("+")
    unknown = [part for part in parts if part not in SCOPES]
    if unknown:
        raise UserError(
            f"scope `{name}`: there is no part `{unknown[0]}`",
            f"join any of {listed([*SCOPES, *ALIASES], 30)} with `+`",
        )
    return parts


def _rows(anatomy: Anatomy, parameters: Mapping[str, Tensor], part: str) -> dict[str, slice]:
    rows: dict[str, slice] = {}
    for name, role in anatomy.roles.items():
        count = parameters[name].shape[0]
        if role in SCOPES[part]:
            rows[name] = slice(0, count)
        elif part in FUSED_ROWS.get(role, {}):
            first, last = FUSED_ROWS[role][part]
            rows[name] = slice(round(first * count), round(last * count))
    return rows


def _union(parameter: str, one: slice, two: slice) -> slice:
    if max(one.start, two.start) > min(one.stop, two.stop):
        raise UserError(f"the rows of `q` and `v` do not touch in the fused `{parameter}`", "use `qk`, `v` or `qkv`")
    return slice(min(one.start, two.start), max(one.stop, two.stop))
