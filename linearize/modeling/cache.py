"""The cache slot of a converted layer: a state whose size does not depend on how many tokens went through it.

It takes the place of one layer of whatever stock cache arrives (dynamic, sliding or static), and answers every
question about lengths and masks as the replaced layer would, so that the softmax layers beside it see what they
always saw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from linearize.modeling import compat
from linearize.modeling.compat import LinearAttentionCacheLayerMixin, LinearAttentionLayer

State = dict[str, Tensor]

# How many calls `crop` can go back over while past recording is on. Assisted decoding crops after every round of at
# most a few dozen drafted tokens; each remembered call costs one state and its q, k, v.
RECORDED_CALLS = 256


class LinearStateLayer(CacheLayerMixin):
    """State of one converted layer, in the slot of a stock cache layer.

    Args:
        like: the stock layer that it replaces, which has seen no token yet.
    """

    supports_early_init = False
    is_croppable = True

    def __init__(self, like: Any = None) -> None:
        super().__init__()
        self.is_sliding = bool(getattr(like, "is_sliding", False))
        self.max_cache_len: int | None = getattr(like, "max_cache_len", None)
        self.sliding_window: int | None = getattr(like, "sliding_window", None) if self.is_sliding else None
        # If one slot of a static cache says that it can't be compiled, transformers lets sdpa drop the decode mask,
        # and the softmax layers then attend to the empty slots.
        self.is_compileable = bool(getattr(like, "is_compileable", False))
        self.is_static = self.max_cache_len is not None
        length = getattr(like, "cumulative_length", None)
        self.seen: int | Tensor = torch.zeros_like(length) if isinstance(length, Tensor) else 0
        self.state: State | None = None
        self.record_past = bool(getattr(like, "record_past", False))
        self._log: deque[tuple[State | None, int, Callable[[Any, int], State | None]]] = deque(maxlen=RECORDED_CALLS)

    # What transformers asks of a layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.batch_size = key_states.shape[0]
        if isinstance(self.seen, Tensor):
            self.seen = self.seen.to(self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new keys (B, Hk, T, D) and pass them on: the mixer folds them into the state."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if isinstance(self.seen, Tensor):
            self.seen.add_(key_states.shape[-2])
        else:
            self.seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int | Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        if self.max_cache_len is not None:
            return self.max_cache_len
        return self.sliding_window if self.sliding_window is not None else -1

    get_max_cache_shape = get_max_length  # the older name

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(kv_length, kv_offset) that the replaced layer would have given."""
        query_length = compat.query_length(query_length)
        if self.is_static and not self.is_sliding:
            return self.max_cache_len, 0  # pyright: ignore[reportReturnType]
        seen = int(self.seen)
        if not self.is_sliding:
            return seen + query_length, 0
        window = self.max_cache_len if self.is_static else self.sliding_window
        assert window is not None
        offset = max(seen - window + 1, 0)
        if seen >= window:
            return window - 1 + query_length, offset
        return (max(window, seen + query_length) if self.is_static else seen + query_length), offset

    def reset(self) -> None:
        self.state = None
        self._log.clear()
        if isinstance(self.seen, Tensor):
            self.seen.zero_()
        else:
            self.seen = 0

    def offload(self) -> None:
        """Nothing: the state is small and constant, and it is read right after this is called."""

    prefetch = offload

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = {name: function(x) for name, x in self.state.items()}
            self.batch_size = next(iter(self.state.values())).shape[0]
        # The calls remembered for `crop` have the old batch.
        self._log.clear()

    # What the attention function and the user ask

    @property
    def nbytes(self) -> int:
        """Bytes of the state; 0 before the first token."""
        return 0 if self.state is None else sum(x.nbytes for x in self.state.values())

    def take(self) -> State | None:
        """The state for the next call, which may update it in place; a copy where the state before is remembered."""
        if self.state is None or not self.record_past:
            return self.state
        return {name: x.clone() for name, x in self.state.items()}

    def commit(self, state: State, length: int, replay: Callable[[Any, int], State | None]) -> None:
        """Take the state after `length` new tokens; `replay(before, n)` gives the one after the first n of them.

        Raises:
            RuntimeError: the state has grown, and the cache is static.
        """
        if self.record_past:
            before = self.state  # the mixer got a copy, see `take`
            if self.is_static and before is not None:  # it is overwritten below
                before = {name: x.clone() for name, x in before.items()}
            self._log.append((before, length, replay))
        if self.is_static and self.state is not None and not torch.is_grad_enabled():
            # A compiled decode step of a static cache expects its tensors to stay where they are.
            for name, x in state.items():
                if x.shape != self.state[name].shape:
                    raise RuntimeError(
                        f"a static cache can't hold the state of a mixer that grows ('{name}' has become "
                        f"{tuple(x.shape)}): pass a DynamicCache, or leave cache_implementation out"
                    )
                if x is not self.state[name]:
                    self.state[name].copy_(x)
        else:
            self.state = state

    def activate_past_recording(self) -> None:
        """Remember each call from now on, so that `crop` can go back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens (transformers' sign: at most 0).

        Raises:
            ValueError: for a positive count, where this transformers version refuses it.
            RuntimeError: if those tokens were not recorded, since a recurrent state can't be undone without.
        """
        remove = compat.tokens_to_remove(tokens_to_remove, int(self.seen))
        if remove and self.state is not None and remove > sum(length for _, length, _ in self._log):
            raise RuntimeError(
                f"can't crop {remove} tokens off a linear-attention state: call cache.activate_past_recording() "
                "before the tokens that may have to be taken back"
            )
        while remove and self._log:
            before, length, replay = self._log.pop()
            taken = min(remove, length)
            state = before if taken == length else replay(before, length - taken)
            if state is None or self.state is None or not self.is_static:
                self.state = state
            else:
                for name, x in state.items():
                    self.state[name].copy_(x)
            if isinstance(self.seen, Tensor):
                self.seen.sub_(taken)
            else:
                self.seen -= taken
            remove -= taken
        # What is left was accepted by the caller: later crops only take back later tokens.
        self._log.clear()


class LinearStateAndConvLayer(LinearStateLayer, LinearAttentionLayer):
    """As `LinearStateLayer`, where a convolution or recurrence of the same decoder layer keeps its states in the slot
    beside attention (Falcon-H1). Those stay the stock layer's own, and may be filled before attention runs."""

    def __init__(self, like: Any) -> None:
        LinearStateLayer.__init__(self, like)
        for name, value in vars(like).items():
            self.__dict__.setdefault(name, value)

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(LinearAttentionLayer.is_croppable.__get__(self))

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        owner = LinearStateLayer if args else LinearAttentionLayer
        owner.lazy_initialization(self, *args, **kwargs)

    def offload(self) -> None:
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        LinearStateLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        LinearStateLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        LinearStateLayer.crop(self, tokens_to_remove)


def has_slot(cache: Any, layer: int) -> bool:
    """Whether `cache` has, or would make, a slot for `layer`."""
    cache = getattr(cache, "self_attention_cache", cache)
    return getattr(cache, "layer_class_to_replicate", None) is not None or layer < len(getattr(cache, "layers", ()))


def adopt(cache: Any, layer: int) -> LinearStateLayer:
    """The state slot of `layer` in `cache`, put in the place of the stock layer if it isn't there yet.

    Raises:
        RuntimeError: if the stock layer holds tokens already, which the mixer has never seen.
        TypeError: if `cache` isn't made of layers.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    if not hasattr(cache, "layers"):
        raise TypeError(
            f"converted layers can't use a {type(cache).__name__} (continuous batching isn't supported): "
            "pass a DynamicCache or StaticCache"
        )
    template = getattr(cache, "layer_class_to_replicate", None)
    while template is not None and len(cache.layers) <= layer:
        cache.layers.append(template())
    if layer >= len(cache.layers):
        raise RuntimeError(f"the cache has {len(cache.layers)} layers, but converted layer {layer} needs a slot in it")
    slot = cache.layers[layer]
    if isinstance(slot, LinearStateLayer):
        return slot
    if int(slot.get_seq_length()) > 0:
        raise RuntimeError(
            f"layer {layer} of the cache was filled by softmax attention (prefix tuning, or a cache of another model), "
            "but this layer is converted and can't continue from keys and values: start from an empty cache"
        )
    shared = isinstance(slot, LinearAttentionCacheLayerMixin)
    cache.layers[layer] = LinearStateAndConvLayer(slot) if shared else LinearStateLayer(slot)
    return cache.layers[layer]
