"""A forward pass for CPUs of models of the Llama architecture, where no gradient is required.

It computes what transformers' own forward computes, in the same order and types, and differs in
where results are written. More than half of transformers' time in bfloat16 is spent on elementwise
operations, and most of that on memory: each writes to a new block, which the C library takes from
cold or unmapped memory (a cast of 400 x 576 numbers takes 210 us to a new block and 22 us to one in
the processor's cache). Here a forward allocates its buffers once for all layers, and normalizes and
gates blocks of rows that fit into the cache. Products alone are in new memory: written to buffers
they take as long (5.48 and 5.46 CPU s for four positions with 24 prompts).

Padding is not computed: the tokens of all rows are concatenated, except in attention. Grouped heads
share their keys and values without copies. In bfloat16 a few rows (decoding) are multiplied by
weights that oneDNN has packed in advance, which is twice as fast; the packed copy takes as much
memory as the weights.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from swarm.engine.cpu_product import QuickLinear, add_product, multiply
from swarm.engine.decode import SlotCache, cache_argument, can_share_prefix
from swarm.engine.lora import LoraLinear

ARCHITECTURES = ("LlamaModel", "MistralModel", "Qwen2Model")
"""Classes of transformers with the same forward, as long as attention is full in all layers."""

BLOCK_ELEMENTS = 1 << 17
"""Numbers per block of rows that is normalized; in float32 a quarter of a usual L2 cache."""

PACKED_ROWS = 128
"""Rows up to which products with packed weights are faster in bfloat16."""

GROUP_RATIO = 0.75
"""Rows at least this much as long as the first of a group attend together with it."""


class AttentionGroup(NamedTuple):
    """Consecutive rows of a batch that attend together, without columns in which all are padded."""

    rows: slice
    width: int
    """Number of columns, the last of the batch."""
    tokens: slice
    """Range of their real tokens among those of the batch."""
    real: torch.Tensor | None
    """Indices of these in the [rows * width] tokens of the group; `None` if all are real."""


class TokenLayout(NamedTuple):
    """Layout of the N real tokens of a batch of R rows and T columns, padded on the left."""

    shape: tuple[int, int]
    """R and T."""
    real: torch.Tensor | None
    """[N], indices in the flattened batch; `None` if N = R * T."""
    groups: tuple[AttentionGroup, ...]
    """The rows by similar length."""
    mask: torch.Tensor | None
    """Added to attention scores, [R or 1, 1, T, S], -inf where a key is not attended; `None` if
    attention is causal and nothing else."""


def lay_out_tokens(
    shape: tuple[int, int], mask: torch.Tensor | None, past: int, dtype: torch.dtype
) -> TokenLayout:
    """Return the layout of a batch.

    Args:
        shape: R and T.
        mask: [R, past + T], 1 where a token is real, or [R, 1, 1, S] for T = 1; `None` if all are.
        past: Number of cached columns.
        dtype: Type of the attention scores.
    """
    rows, columns = shape
    whole = AttentionGroup(slice(0, rows), columns, slice(0, rows * columns), None)
    padded = mask is not None and not bool(mask.all())
    attended = None
    if mask is not None and mask.dim() == 4:
        attended = mask
    else:
        if columns > 1 and (past or padded):
            attended = torch.ones(1, 1, columns, past + columns, dtype=torch.bool).tril(past)
        if mask is not None and padded:
            keys = mask.bool()[:, None, None, :]
            attended = keys if attended is None else keys & attended
    scores = None
    if attended is not None:
        scores = torch.zeros(attended.shape, dtype=dtype).masked_fill_(~attended, -torch.inf)
    if mask is None or not padded or columns == 1:
        return TokenLayout(shape, None, (whole,), scores)
    real = mask[:, past:].bool()
    if not bool((real.cummax(1).values == real).all()):  # not padded on the left
        return TokenLayout(shape, None, (whole,), scores)
    index = real.flatten().nonzero()[:, 0]
    if past:  # a group would have to skip columns between cached and new keys
        whole = AttentionGroup(whole.rows, columns, slice(0, len(index)), index)
        return TokenLayout(shape, index, (whole,), scores)
    # Consecutive rows of similar length; rows come with the longest first.
    groups: list[AttentionGroup] = []
    lengths, start, token = real.sum(1).tolist(), 0, 0
    for row in range(1, rows + 1):
        longest = max(lengths[start:row])
        if row < rows and GROUP_RATIO * longest <= lengths[row] <= longest:
            continue
        count, places = sum(lengths[start:row]), None
        if count < longest * (row - start):
            places = real[start:row, columns - longest :].flatten().nonzero()[:, 0]
        tokens = slice(token, token + count)
        groups.append(AttentionGroup(slice(start, row), longest, tokens, places))
        start, token = row, token + count
    return TokenLayout(shape, index, tuple(groups), scores)


class Buffers:
    """Memory of one forward, reused by all layers.

    Args:
        config: Configuration of the model.
        count: Number of tokens, N.
        layout: Their layout.
        dtype: Type of the model.
        particles: The position of each token, [N]; `None` is the first for all.
    """

    def __init__(
        self,
        config: Any,
        count: int,
        layout: TokenLayout,
        dtype: torch.dtype,
        particles: torch.Tensor | None,
    ) -> None:
        new = partial(torch.empty, dtype=dtype)
        size = config.hidden_size
        head = getattr(config, "head_dim", None) or size // config.num_attention_heads
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        self.head, self.particles = head, particles
        self.block = max(1, min(count, BLOCK_ELEMENTS // size))
        self.wide_block = max(1, min(count, 2 * self.block))
        self.normed, self.attended = new(count, size), new(count, queries)
        self.half = new(count * queries // 2)
        self.exact, self.squares = (torch.empty(self.block, size) for _ in range(2))
        # Padding stays zero: only real tokens are written.
        padded = 0 if layout.real is None else layout.shape[0] * layout.shape[1]
        self.padded = [torch.zeros(padded, width, dtype=dtype) for width in (queries, keys, keys)]


class CpuForward:
    """Forward of a model and of its output head, which calls the original ones for gradients.

    Args:
        model: A causal language model of `ARCHITECTURES`, frozen, on the CPU.
        packed: Whether a few rows in bfloat16 are multiplied by packed copies of the weights, which
            must never change then.
    """

    def __init__(self, model: Any, packed: bool) -> None:
        self.decoder, self.head = model.base_model, model.get_output_embeddings()
        (self._cache_keyword,) = cache_argument(self.decoder, None)
        self._decode_original, self._head_original = self.decoder.forward, self.head.forward
        self._packed: dict[nn.Linear, torch.Tensor] | None = {} if packed else None

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Map hidden states [..., H] to logits [..., vocabulary]."""
        rows = states.flatten(0, -2)
        if torch.is_inference_mode_enabled() and len(rows) <= PACKED_ROWS:
            return self._multiply(self.head, rows, None).view(*states.shape[:-1], -1)
        original: torch.Tensor = self._head_original(states)
        return original

    def decode(self, *args: Any, **given: Any) -> Any:
        """See the forward of the model's class; returns hidden states [R, T, H] and the cache."""
        from transformers import DynamicCache
        from transformers.modeling_outputs import BaseModelOutputWithPast

        names = ("input_ids", "attention_mask", "position_ids", self._cache_keyword, "use_cache")
        input_ids, mask, positions, cache, use_cache = map(given.get, names)
        known, particles = self._find_particles()
        if (
            args
            or not torch.is_inference_mode_enabled()
            or input_ids is None
            or positions is None
            or not known
            or not (mask is None or mask.dim() == 2 or input_ids.shape[1] == 1)
            or not (cache is None or type(cache) in (DynamicCache, SlotCache))
            or any(given[name] is not None for name in given.keys() - set(names))
        ):
            return self._decode_original(*args, **given)
        if cache is None and use_cache:
            cache = DynamicCache(config=self.decoder.config)
        past = 0 if cache is None else cache.get_seq_length()
        rows, columns = input_ids.shape
        layout = lay_out_tokens((rows, columns), mask, past, self.decoder.dtype)
        ids, positions = input_ids.flatten(), positions.expand(rows, columns).flatten()
        if particles is not None:
            particles = particles.repeat_interleave(columns)
        if layout.real is not None:
            ids, positions = ids[layout.real], positions[layout.real]
            particles = None if particles is None else particles[layout.real]
        states = self._run_layers(ids, positions, layout, cache, particles)
        if layout.real is not None:
            padded = states.new_zeros(rows * columns, states.shape[1])
            states = padded.index_copy_(0, layout.real, states)
        return BaseModelOutputWithPast(
            last_hidden_state=states.view(rows, columns, -1), **{self._cache_keyword: cache}
        )

    def _find_particles(self) -> tuple[bool, torch.Tensor | None]:
        """Return whether all layers are of a known kind, and the positions of the rows."""
        particles = None
        for layer in self.decoder.layers:
            for name, module in (*layer.self_attn.named_children(), *layer.mlp.named_children()):
                linear = module
                if isinstance(module, LoraLinear):
                    linear, particles = module.linear, module.routing.particles
                if name.endswith("_proj") and type(linear) not in (nn.Linear, QuickLinear):
                    return False, None
        return True, particles

    def _run_layers(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        layout: TokenLayout,
        cache: Any,
        particles: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the normalized states [N, H] of N tokens, each of its position in `particles`."""
        decoder = self.decoder
        states: torch.Tensor = decoder.embed_tokens(ids)
        buffers = Buffers(decoder.config, len(ids), layout, states.dtype, particles)
        cosine, sine = decoder.rotary_emb(states[None], position_ids=positions[None])
        angles = cosine[0][:, None], sine[0][:, None]
        for number, layer in enumerate(decoder.layers):
            self._normalize(layer.input_layernorm, states, buffers)
            self._attend(layer.self_attn, number, angles, layout, cache, buffers)
            output = layer.self_attn.o_proj
            states.add_(self._multiply(output, buffers.attended, particles))
            self._normalize(layer.post_attention_layernorm, states, buffers)
            self._feed_forward(layer.mlp, states, buffers)
        self._normalize(decoder.norm, states, buffers)
        return buffers.normed

    @staticmethod
    def _normalize(norm: Any, states: torch.Tensor, buffers: Buffers) -> None:
        """Write RMSNorm of the states [N, H] to `buffers.normed`; scales are in float32."""
        exact = states.dtype == torch.float32
        for start in range(0, len(states), buffers.block):
            rows = states[start : start + buffers.block]
            out = buffers.normed[start : start + buffers.block]
            single = rows if exact else buffers.exact[: len(rows)].copy_(rows)
            squares = torch.mul(single, single, out=buffers.squares[: len(rows)])
            scale = squares.mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
            if exact:
                torch.mul(single, scale, out=out)
            else:
                out.copy_(single.mul_(scale))
            out.mul_(norm.weight)

    def _attend(
        self,
        attention: Any,
        number: int,
        angles: tuple[torch.Tensor, torch.Tensor],
        layout: TokenLayout,
        cache: Any,
        buffers: Buffers,
    ) -> None:
        """Write the attention of `buffers.normed` to `buffers.attended`, before the output."""
        normed = buffers.normed
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        real = [self._multiply(one, normed, buffers.particles) for one in projections]
        for turned in real[:2]:
            _rotate(turned.view(len(turned), -1, buffers.head), *angles, buffers.half)
        if layout.real is not None:
            real = [
                padded.index_copy_(0, layout.real, tokens)
                for padded, tokens in zip(buffers.padded, real, strict=True)
            ]
        query, key, value = (
            tensor.view(*layout.shape, -1, buffers.head).transpose(1, 2) for tensor in real
        )
        past = 0
        if cache is not None:
            past = cache.get_seq_length(number)
            key, value = cache.update(key, value, number)
        for group in layout.groups:
            first = query.shape[2] - group.width
            keys = slice(0 if past else first, None)
            mask = layout.mask
            out = nn.functional.scaled_dot_product_attention(
                query[group.rows, :, first:],
                key[group.rows, :, keys],
                value[group.rows, :, keys],
                attn_mask=None if mask is None else mask[group.rows, :, first:, keys],
                is_causal=mask is None and group.width > 1,
                scale=attention.scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            tokens = out.transpose(1, 2).reshape(-1, buffers.attended.shape[1])
            target = buffers.attended[group.tokens]
            if group.real is None:
                target.copy_(tokens)
            else:
                torch.index_select(tokens, 0, group.real, out=target)

    def _feed_forward(self, mlp: Any, states: torch.Tensor, buffers: Buffers) -> None:
        """Add the feed-forward network of `buffers.normed` to the states."""
        for start in range(0, len(states), buffers.wide_block):
            block = slice(start, start + buffers.wide_block)
            rows = buffers.normed[block]
            particles = None if buffers.particles is None else buffers.particles[block]
            gate = self._multiply(mlp.gate_proj, rows, particles)
            torch.ops.aten.silu.out(gate, out=gate)
            gate.mul_(self._multiply(mlp.up_proj, rows, particles))
            states[block].add_(self._multiply(mlp.down_proj, gate, particles))

    def _multiply(
        self, module: Any, rows: torch.Tensor, particles: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a linear layer's output for `rows` [N, in]."""
        adapted = module if isinstance(module, LoraLinear) else None
        linear = module if adapted is None else adapted.linear
        merged = None if adapted is None else adapted.merged
        few = rows.dtype == torch.bfloat16 and len(rows) <= PACKED_ROWS
        if few and merged is None and self._packed is not None:
            if (packed := self._packed.get(linear)) is None:
                packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
                self._packed[linear] = packed
            given = rows.contiguous(), packed, linear.bias
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*given, "none", [], "")
        else:
            out = multiply(rows, linear.weight if merged is None else merged, linear.bias)
        if adapted is not None and merged is None and adapted.shares is not None:
            add_product(out, adapted.project_down(rows, particles), adapted.up)
        return out


def _rotate(
    heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, memory: torch.Tensor
) -> None:
    """Rotate heads [N, h, d] in place by angles [N, 1, d] of d / 2 pairs (arXiv 2104.09864)."""
    count, number, size = heads.shape
    middle = size // 2
    first, second = heads[..., :middle], heads[..., middle:]
    turned = memory[: count * number * middle].view(count, number, middle)
    torch.mul(first, sine[..., middle:], out=turned)
    crossed = second * sine[..., :middle]
    first.mul_(cosine[..., :middle]).sub_(crossed)
    second.mul_(cosine[..., middle:]).add_(turned)


def install_cpu_forward(model: Any, spare: int) -> None:
    """Replace the forward of a frozen model on the CPU, if it is of a known architecture.

    Args:
        model: A causal language model of transformers.
        spare: Bytes that may be taken for packed weights; they must never change then.
    """
    decoder, config = model.base_model, model.config.get_text_config()
    known = (
        type(decoder).__name__ in ARCHITECTURES
        and type(decoder).__module__.startswith("transformers.")
        and config.hidden_act == "silu"
        and config._attn_implementation == "sdpa"
        and can_share_prefix(model)
    )
    if known:
        size = sum(weight.numel() * weight.dtype.itemsize for weight in model.parameters())
        # oneDNN refuses to pack bfloat16 for processors without its instructions.
        packed = size < spare and torch.backends.mkldnn.is_available()
        packed = packed and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        replaced = CpuForward(model, packed=packed)
        decoder.forward, replaced.head.forward = replaced.decode, replaced.compute_logits
