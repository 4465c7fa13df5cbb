"""Attentions whose queries and keys have a width of their own, beside the library's, whose heads all have one width.

B images, N tokens, H heads, W width of a query, D width of a value. Parameters keep the names they have in the library,
and the softmax keeps the scale of the dense model: 1/√D, whatever W is (methods.md 1.3). Queries and keys pass through
modules of their own, `queries` and `keys`, to be listened to there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starfish.errors import UserError

TIMM = {"timm.layers.attention", "timm.models.vision_transformer"}  # others of this name add, mask or pool on their own
TRANSFORMERS = {"ViTAttention", "DeiTAttention", "ViTMAEAttention", "ViTMSNAttention", "YolosAttention"}
# Logits of one call. Up to here, on a processor, the plain product is quicker than the fused kernel: a little without
# gradients, since queries must be padded for the kernel, and twice as quick with them.
PLAIN = 2**24


def narrowable(holder: nn.Module) -> bool:
    """Is there a class here that stands in for this attention, or is it one already?"""
    return is_narrow(holder) or _maker(holder) is not None


def is_narrow(module: nn.Module) -> bool:
    """Is it one of those below?"""
    return isinstance(module, (_Fused, _Multihead, _Separate))


def value_width(module: Any) -> int:
    """Of one of those below."""
    names = {_Fused: "proj", _Multihead: "out_proj", _Separate: "o_proj"}
    return int(module.get_submodule(names[type(module)]).in_features)


def narrow_attention(path: str, holder: nn.Module) -> nn.Module:
    """The same attention, of the same parameters, in a class that reads the width of its queries off their weight."""
    if is_narrow(holder):
        return holder
    make = _maker(holder)
    if make is None:
        raise UserError(
            f"`{path}` is a `{type(holder).__name__}`, whose queries and keys starfish cannot make narrower",
            "those of timm, nn.MultiheadAttention and the ViTs of transformers can; prune the MLP alone: --scope mlp",
        )
    return make(holder).train(holder.training)


def _maker(holder: Any) -> Callable[[Any], nn.Module] | None:
    kind = type(holder)
    if kind.__name__ == "Attention" and kind.__module__ in TIMM and _has(holder, "qkv", "proj"):
        return None if _norms_queries(holder) else _Fused
    if kind is nn.MultiheadAttention and holder.in_proj_weight is not None and holder.bias_k is None:
        return _Multihead
    if kind.__name__ in TRANSFORMERS and _has(holder, "q_proj", "k_proj", "v_proj", "o_proj"):
        return _Separate
    return None


def _has(holder: nn.Module, *children: str) -> bool:
    return all(isinstance(dict(holder.named_children()).get(name), nn.Linear) for name in children)


def _norms_queries(holder: nn.Module) -> bool:
    """Its mean and variance are over all dimensions of a query: without some, the others would change."""
    own = dict(holder.named_children())
    return any(not isinstance(own.get(name, nn.Identity()), nn.Identity) for name in ("q_norm", "k_norm"))


class _Fused(nn.Module):
    """timm's `Attention`: one layer for queries, keys and values."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        self.num_heads, self.scale = int(holder.num_heads), float(holder.scale)
        own: dict[str, Any] = dict(holder.named_children())
        self.qkv: nn.Linear = own["qkv"]
        self.proj: nn.Linear = own["proj"]
        self.norm, self.gate = own.get("norm", nn.Identity()), own.get("gate")
        self.attn_drop: nn.Dropout = own["attn_drop"]
        self.proj_drop: nn.Dropout = own["proj_drop"]
        self.queries, self.keys = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        values = self.proj.in_features
        width = (self.qkv.out_features - values) // 2
        q, k, v = torch.split(self.qkv(x), [width, width, values], -1)
        dropout = self.attn_drop.p if self.training else 0.0
        mask = _mask(attn_mask, is_causal, q)
        out = attend(self.queries(q), self.keys(k), v, self.num_heads, self.scale, mask, dropout)
        out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        answer: Tensor = self.proj_drop(self.proj(out))
        return answer


class _Multihead(nn.Module):
    """`nn.MultiheadAttention` attending to its own input."""

    _qkv_same_embed_dim = False  # tells nn.TransformerEncoderLayer to call forward, and not a kernel of its own

    def __init__(self, holder: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.batch_first, self.dropout = holder.num_heads, holder.batch_first, holder.dropout
        self.scale = holder.head_dim**-0.5
        self.in_proj_weight, self.in_proj_bias = holder.in_proj_weight, holder.in_proj_bias
        self.out_proj = holder.out_proj
        self.queries, self.keys = nn.Identity(), nn.Identity()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert query is key is value, "made for attention of the tokens among themselves"
        x = query if self.batch_first else query.transpose(0, 1)
        values = self.out_proj.in_features
        width = (len(self.in_proj_weight) - values) // 2
        q, k, v = torch.split(F.linear(x, self.in_proj_weight, self.in_proj_bias), [width, width, values], -1)
        mask = None if attn_mask is None else _additive(attn_mask, x)
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, x)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        dropout = self.dropout if self.training else 0.0
        out = attend(self.queries(q), self.keys(k), v, self.num_heads, self.scale, mask, dropout)
        out = self.out_proj(out)
        return out if self.batch_first else out.transpose(0, 1), None


class _Separate(nn.Module):
    """The attention of transformers' ViTs: a layer each for queries, keys and values."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        self.num_attention_heads = int(holder.num_attention_heads)
        self.scaling, self.attention_dropout = float(holder.scaling), float(holder.attention_dropout)
        own = dict(holder.named_children())
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (own[f"{name}_proj"] for name in "qkvo")
        self.queries, self.keys = nn.Identity(), nn.Identity()

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_settings: object
    ) -> tuple[Tensor, None]:
        """What transformers passes beside the mask only chooses among kernels."""
        q, k, v = (layer(hidden_states) for layer in (self.q_proj, self.k_proj, self.v_proj))
        dropout = self.attention_dropout if self.training else 0.0
        mask = _mask(attention_mask, False, q)
        out = attend(self.queries(q), self.keys(k), v, self.num_attention_heads, self.scaling, mask, dropout)
        return self.o_proj(out), None


def attend(
    q_BNc: Tensor, k_BNc: Tensor, v_BNc: Tensor, heads: int, scale: float, mask: Tensor | None, dropout: float
) -> Tensor:
    """softmax(q kᵀ · scale) v with W ≤ D, head by head; the heads' values lie side by side in what is returned.

    The fused kernel wants queries as wide as values, so they are padded with zeros, which add nothing to a product.
    """
    q, k, v = (torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x in (q_BNc, k_BNc, v_BNc))
    traced = torch.compiler.is_compiling()  # into a graph for any number of images: no branching on it, nor need to pad
    logits = q.shape[0] * heads * q.shape[2] * k.shape[2]
    if not traced and q.device.type == "cpu" and logits <= PLAIN and dropout == 0:
        product_BHNN = (q * scale) @ k.transpose(-2, -1)
        out = (product_BHNN if mask is None else product_BHNN + mask).softmax(-1) @ v
    else:
        more = 0 if traced else v.shape[-1] - q.shape[-1]
        q, k = (F.pad(x, (0, more)) if more > 0 else x for x in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.transpose(1, 2).flatten(2)


def _mask(mask: Tensor | None, is_causal: bool, x: Tensor) -> Tensor | None:
    """What is added to the logits, from timm's arguments: a boolean mask is true where a token may look."""
    if is_causal:
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return _additive(~allowed, x)
    return _additive(~mask, x) if mask is not None and mask.dtype == torch.bool else mask


def _additive(mask: Tensor, x: Tensor) -> Tensor:
    """A mask that is true where a token may not look, as what is added to the logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(mask, float("-inf"))
