"""Rotary tables beside transformers' own: stretched by length, and with several positions a token."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2_vl.modeling_qwen2_vl import rotate_half

from onchip.models.rope import rope_rows, rope_table
from onchip.ops.fused import rope_append

HALVES = slice(0, 16), slice(16, 32)  # cosines and sines


@pytest.mark.parametrize("positions", [100, 128, 129, 1000])
def test_dynamic(positions):
    """As of a sequence of so many positions: what is stretched depends on the length."""
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=128, rope_parameters=scaling)
    frequencies, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=positions)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    ours = rope_table(positions, 32, 1e4, {**scaling, "original_max_position_embeddings": 128})
    torch.testing.assert_close(ours, torch.cat((angles.cos(), angles.sin()), 1) * factor, atol=2e-4, rtol=0)


LISTS = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [1.0 + i for i in range(16)]}


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128, **LISTS}, 128),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128, **LISTS}, 129),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.25, **LISTS}, 300),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.25}, 100),
        ({"rope_type": "proportional", "factor": 8.0}, 100),
    ],
    ids=str,
)
def test_by_lists_and_by_a_part(scaling, positions):
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters={"rope_theta": 1e4, **scaling})
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=positions)
    angles = torch.outer(torch.arange(positions).float(), frequencies)
    ours = rope_table(positions, 32, 1e4, scaling)
    torch.testing.assert_close(ours, torch.cat((angles.cos(), angles.sin()), 1) * factor, atol=2e-4, rtol=0)


def test_a_dict_that_lacks_something():
    for scaling, words in (
        ({"rope_type": "spiral"}, "rope_type 'spiral' is not one of default, linear"),
        ({"rope_type": "linear"}, "^rope_table: rope_type 'linear' without factor; give it in `scaling`$"),
        ({"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8, **LISTS}, "long_factor has 16 numbers for 8 frequencies; give one"),
    ):
        with pytest.raises(ValueError, match=words):
            rope_table(9, 16, 1e4, scaling)


def test_sections_of_three_positions():
    """Qwen2-VL: time, height and width turn 4, 6 and 6 of 16 frequencies."""
    tokens, sections = 7, (4, 6, 6)
    table, positions = rope_table(50, 32, 1e4), torch.randint(50, (3, tokens))
    qkv = torch.randn(tokens, 3 * 32)
    q, k, _ = qkv.clone().view(tokens, 3, 32).unbind(1)
    cos, sin = (torch.cat([t[axis] for axis, t in enumerate(table[positions][..., part].split(sections, -1))], -1).repeat(1, 2) for part in HALVES)
    rows = rope_rows(table, positions, [axis for axis, count in enumerate(sections) for _ in range(count)])
    ours = rope_append(qkv, rows, torch.arange(tokens), (1, 1))
    for got, x in zip(ours, (q, k), strict=False):
        torch.testing.assert_close(got[:, 0], x * cos + rotate_half(x) * sin)


def test_two_axes_with_the_same_frequencies():
    """A picture: the first half of the pairs by the row, the second by the column, as two rotations of half a head each."""
    tokens, dim = 6, 32
    half, positions = rope_table(20, dim // 2, 1e4), torch.randint(20, (2, tokens))
    cos, sin = half.chunk(2, 1)
    rows = rope_rows(torch.cat((cos, cos, sin, sin), 1), positions, [0] * 8 + [1] * 8)
    qkv = torch.randn(tokens, 3 * dim)
    before = qkv.clone().view(tokens, 3, dim)
    q, _, _ = rope_append(qkv, rows, torch.arange(tokens), (1, 1), layout="interleaved")
    for axis, part in ((0, slice(0, 16)), (1, slice(16, 32))):
        alone = before[..., part].reshape(tokens, -1).clone()
        right, _, _ = rope_append(alone, half, positions[axis], (1, 1), layout="interleaved")
        torch.testing.assert_close(q[:, 0, part], right[:, 0])


def test_axes_that_do_not_fit():
    table, positions = rope_table(8, 16, 1e4), torch.zeros(2, 3, dtype=torch.int64)
    for axes in ([0] * 7, [0] * 7 + [2]):
        with pytest.raises(ValueError, match=r"rope_rows: . axes .* for 8 frequencies and 2 positions a token; give one for each frequency"):
            rope_rows(table, positions, axes)


def test_positions_that_are_none():
    table, positions, axes = rope_table(16, 8, 1e4), torch.zeros(2, 3, dtype=torch.int64), [0, 0, 1, 1]
    rows = "give 0 to 15, rows of the table, or a longer rope_table"
    for given, wrong, words in (
        ((table, positions - 1, axes), ValueError, f"positions are -1 to -1; {rows}"),
        ((table, positions + 100, axes), ValueError, f"positions are 100 to 100; {rows}"),
        ((table, positions.float(), axes), ValueError, r"positions are torch.float32 \[2, 3\]; give int64 \[axes, tokens\]"),
        ((table, positions[0], axes), ValueError, r"positions are torch.int64 \[3\]; give int64 \[axes, tokens\]"),
        ((table, positions[None], axes), ValueError, r"positions are torch.int64 \[1, 2, 3\]"),
        ((table, [[0], [1]], axes), TypeError, "positions is a list; give a tensor"),
        ((table[0], positions, axes), ValueError, r"table is torch.float32 \[8\]; give floats"),
        ((table, positions, [0, 0, 1, 0.5]), ValueError, "4 axes .* for 4 frequencies and 2 positions a token"),
    ):
        with pytest.raises(wrong, match=f"^rope_rows: {words}"):
            rope_rows(*given)
    assert torch.equal(rope_rows(table, positions.int() + 15, axes), table[15].expand(3, -1))


@pytest.mark.parametrize("scaling", [{}, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, {"rope_freqs": [1.0] * 16},
                                     {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 8, **LISTS}])  # fmt: skip
def test_a_default_device_of_the_users(scaling):
    positions, axes = torch.zeros(2, 3, dtype=torch.int64), [0, 1] * 8
    with torch.device("meta"):
        table = rope_table(16, 32, 1e4, scaling, "cpu")
        rows = rope_rows(table, positions, axes)
        assert rope_table(16, 32, 1e4, scaling).is_meta
    assert torch.equal(table, rope_table(16, 32, 1e4, scaling)) and torch.equal(rows, rope_rows(table, positions, axes))


def test_what_a_scaling_lacks_is_named():
    for words, dim, theta, scaling in (
        (r"rope_type 'ntk' is not one of default, linear, dynamic, llama3, yarn, longrope, proportional", 8, 1e4, {"rope_type": "ntk"}),
        (r"rope_type 'yarn' without factor, original_max_position_embeddings; give it in `scaling`", 8, 1e4, {"type": "yarn"}),
        (
            r"rope_type 'llama3' without low_freq_factor; give it",
            8,
            1e4,
            {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4, "original_max_position_embeddings": 64},
        ),
        (r"dim is 7, theta 10000.0; give an even number .for 'dynamic' 4 or more., and more than 1", 7, 1e4, None),
        (r"dim is 2, ", 2, 1e4, {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 64}),
        (r"dim is 8, theta '1'", 8, "1", None),
        (r"factor is '2'; it must be a number above 0", 8, 1e4, {"rope_type": "linear", "factor": "2"}),
        (r"short_factor is .'a'.; it must be a list of numbers above 0", 8, 1e4, {"rope_type": "longrope", "short_factor": ["a"]}),
        (r"original_max_position_embeddings is 0; it must be an integer of 2", 8, 1e4, {"rope_type": "yarn", "original_max_position_embeddings": 0}),
        (
            r"rope_type 'llama3': low_freq_factor is 4, high_freq_factor 4; the high",
            8,
            1e4,
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 64},
        ),
        (
            r"rope_type 'yarn': beta_fast is 1, beta_slow 32; the fast one must not be the smaller",
            8,
            1e4,
            {"rope_type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 32, "original_max_position_embeddings": 64},
        ),
    ):
        with pytest.raises(ValueError, match=f"^rope_table: {words}"):
            rope_table(10, dim, theta, scaling)
