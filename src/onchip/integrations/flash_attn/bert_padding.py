"""`flash_attn.bert_padding`: from padded batches to packed tokens and back. Gradients flow through all of it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` of `input`."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, ...]`, zero but for rows `indices`, which are `values`."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(rows `indices`, `input` itself)."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: Tensor,  # [batch, len, ...]
    attention_mask: Tensor,  # [batch, len], 1 or True at a token
    unused_mask: Tensor | None = None,  # [batch, len], 1 or True at a token that has room and is not used
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of both masks end to end.

    Returns (`[tokens, ...]`, their indices in the flat batch, offsets int32 `[batch + 1]`, the longest, tokens of the first mask int32 `[batch]`).
    """
    room = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = room.sum(-1, dtype=torch.int32)
    indices = room.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _offsets(lengths), int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor,  # [batch, len, ...]
    attention_mask_in_length: Tensor,  # [batch, len]: the lengths of the sequences that share a row, then zeros
) -> tuple[Tensor, Tensor, Tensor, int]:
    """As `unpad_input` where several sequences share a row: (tokens, indices, offsets int32 `[sequences + 1]`, the longest)."""
    room = torch.arange(attention_mask_in_length.shape[1], device=hidden_states.device) < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()]
    indices = room.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _offsets(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed `[tokens, ...]` back to `[batch, seqlen, ...]`, zeros where there is no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
