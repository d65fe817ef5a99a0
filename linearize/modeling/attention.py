"""The attention function that converted layers call, registered with transformers under the name "linearize"."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linearize.modeling import context as forward_context

IMPLEMENTATION = "linearize"
CHECK_FINITE = "LINEARIZE_CHECK_FINITE"  # set it to look for NaN on a GPU, too


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Mix query (B, H, T, D), key (B, Hk, T, D), value (B, Hk, T, Dv) with `module.linearize` into (B, T, H, Dv).

    Scaling and padding come from the conversion and the running forward, not from these arguments.

    Raises:
        RuntimeError: if the module runs outside its decoder's forward, or gets more keys than queries.
        FloatingPointError: if the output isn't finite, naming the layer (on the CPU, or with LINEARIZE_CHECK_FINITE).
    """
    mixer: Any = getattr(module, "linearize", None)
    if mixer is None:
        raise RuntimeError(
            f"layer {getattr(module, 'layer_idx', '?')} isn't converted, so it can't run the '{IMPLEMENTATION}' "
            "attention implementation: choose sdpa, eager or flash_attention_2"
        )
    context = forward_context.current()
    if context is None:
        raise RuntimeError(
            f"converted layer {module.layer_idx} ran outside its decoder's forward, so its padding mask is unknown: "
            "call the whole model, checkpoint with model.activation_checkpointing_enable(), or run the part under "
            "linearize.modeling.context.running(ForwardContext(...))"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if k.shape[1] != q.shape[1]:
        raise RuntimeError(
            f"converted layer {module.layer_idx} got {k.shape[1]} keys for {q.shape[1]} queries: its keys come from "
            "another layer or cache, which a recurrent state can't continue from"
        )
    slot, context.slot = context.slot, None
    inputs = {
        "hidden_states": context.hidden_states,
        "mask": forward_context.valid_tokens(context, attention_mask, q, slot),
        "position_ids": context.position_ids,
    }
    context.hidden_states = None
    observer = None if context.switch is None else context.switch.observer
    if observer is not None:
        if slot is not None:
            raise RuntimeError("a model that is observed fills no cache: pass use_cache=False")
        softmax = partial(_softmax, module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return observer(module, (q, k, v), inputs, context.cu_seqlens, scaling, softmax), None
    if context.cu_seqlens is not None and slot is not None:
        raise RuntimeError("packed sequences can't fill a cache: pass use_cache=False")
    before = None if slot is None else slot.take()
    out, state = mix(module, (q, k, v), inputs, context.cu_seqlens, state=before, return_state=slot is not None)
    if slot is not None:
        slot.commit(state, q.shape[1], partial(_replay, mixer, (q, k, v), inputs))
    return out.contiguous(), None


def mix(
    module: Any, qkv: tuple[Tensor, Tensor, Tensor], inputs: dict[str, Any], cu_seqlens: Tensor | None, **state: Any
) -> tuple[Tensor, Any]:
    """(B, T, H, Dv), what `module.linearize` makes of q (B, T, H, D), k (B, T, Hk, D), v (B, T, Hk, Dv), and its state.

    Raises:
        FloatingPointError: as `attention_forward`.
    """
    kind = qkv[0].device.type
    # Features, states and sums stay in fp32 under autocast.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        if cu_seqlens is None:
            out, after = module.linearize(*qkv, **state, **inputs)
        else:
            out, after = _packed(module.linearize, *qkv, cu_seqlens, inputs), None
        _check_finite(out, module)
    return out, after


def _softmax(module: Any, *args: Any, implementation: str | None, **kwargs: Any) -> Tensor:
    """What the attention function called `implementation` gives, as `module` would call it if it weren't converted."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation or "eager", eager)(module, *args, **kwargs)[0]


def _check_finite(out: Tensor, module: Any) -> None:
    """Raise before a NaN enters a state, which would carry it to every later token.

    Looking costs next to nothing on the CPU, but makes a GPU wait at every layer: there it is done on request.
    """
    if torch.compiler.is_compiling() or out.is_meta:
        return
    if not (out.device.type == "cpu" or os.environ.get(CHECK_FINITE)):
        return
    # One pass where all is well: a sum is finite if all terms are, unless they are so large that it overflows.
    if not out.detach().sum(dtype=torch.float32).isfinite() and not out.isfinite().all():
        raise FloatingPointError(
            f"converted layer {module.layer_idx} gave NaN or infinite values: look for them in its weights "
            "(`linearize verify`) or inputs, or use bfloat16 or float32 where the model overflows float16"
        )


def _packed(mixer: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Sequences packed into B rows of T tokens, each with a state of its own."""
    batch, length = q.shape[:2]

    def flat(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.expand(batch, *x.shape[1:]).reshape(1, batch * length, *x.shape[2:])

    out, _ = mixer(flat(q), flat(k), flat(v), cu_seqlens=cu_seqlens, **{name: flat(x) for name, x in inputs.items()})
    return out.reshape(batch, length, *out.shape[2:]).contiguous()


@torch.no_grad()
def _replay(mixer: Any, qkv: tuple[Tensor, ...], inputs: dict[str, Any], before: Any, keep: int) -> Any:
    """The state after only the first `keep` tokens of an earlier call."""
    q, k, v = (x[:, :keep] for x in qkv)
    inputs = {name: None if x is None else x[:, :keep] for name, x in inputs.items()}
    return mixer(q, k, v, state=before, return_state=True, **inputs)[1]


def padding_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of a model without softmax layers: the (B, T) padding mask as it is, never a T x T one."""
    return attention_mask


def register() -> None:
    """Make transformers know the implementation. It needs a mask function too: without one, padding and causality
    of the model's softmax layers are lost in silence."""
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
