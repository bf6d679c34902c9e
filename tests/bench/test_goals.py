"""What a suite is to reach, by hand."""

import pytest

from onchip.bench import goals


def row(group, x, seconds, amount=1e9, waits=False):
    asked = {"group": group, "x": x}
    return {"fields": asked, "seconds": seconds, "cost": {"bytes": amount}, "waits": waits}


def found(rows):
    made = goals.decode({"rows": rows, "device": {"kind": "cuda", "measured": {"bandwidth": 1e12}}})
    return {goal["what"]: goal for goal in made}


def test_goals_by_hand():
    made = found(
        [
            row("decode in bf16", "32x4k", {"onchip": 1e-3, "FlashInfer": 1.1e-3, "torch SDPA, dense keys": 0.9e-3}),
            row("decode in bf16", "128x8k", {"onchip": 2e-3, "FlashInfer": 3e-3}, 1.96e9),
            row("decode in bf16", "1x8k", {"onchip": 9e-6, "FlashInfer": 18e-6, "FlashInfer (CUDA cores)": 12e-6, "torch SDPA, dense keys": 9.9e-6}),
            row("decode in int4", "32x4k", {"onchip": 0.4e-3, "onchip, bf16": 1e-3}),
            row("decode in int4", "8x8k", {"onchip": 1e-3, "onchip, bf16": 1e-3}),
            row("other heads", "MHA", {"onchip": 1.25e-3}),
            row("uneven lengths", "128k and 63 of 512", {"onchip": 1.2e-3}, waits=True),
            row("uneven lengths", "even", {"onchip": 1e-3}),
            row("shared prefix", "64", {"onchip": 1e-3, "onchip, one by one": 5e-3}),
            row("latent (MLA), 128 heads", "1x8k", {"onchip": 1e-3, "FlashInfer (MLA)": 1.2e-3}),
            row("append", "int8", {"onchip": 2e-3, "FlashInfer": 4e-3}, 1.8e9),
            row("append", "e4m3", {"FlashInfer": 1e-3}),
        ]
    )
    measured = {what: (goal["measured"], goal["at"], goal["met"]) for what, goal in made.items()}
    assert measured["share of the copy bandwidth, bf16, large"] == (pytest.approx(0.98), "128x8k", True)
    assert measured["times the speed of FlashInfer or SDPA, whichever is faster"] == (0.0, "append, e4m3", False)  # ours did not run
    assert measured["times FlashInfer, bf16, small"] == (pytest.approx(4 / 3), "1x8k", True)
    assert measured["microseconds, bf16"] == (pytest.approx(9.0), "1x8k", True)
    assert measured["times our bf16, int4, large"] == (pytest.approx(2.5), "32x4k", False)
    assert measured["times our bf16, e4m3, large"] == (None, "", None)
    assert measured["share over that of 32x4k, other heads"] == (pytest.approx(0.8), "MHA", False)
    assert measured["times the time of even lengths"] == (pytest.approx(1.2), "128k and 63 of 512", False)
    assert measured["times one by one, shared prefix"] == (pytest.approx(5.0), "64", True)
    assert measured["times FlashInfer, MLA"] == (pytest.approx(1.2), "1x8k", True)
    assert measured["share of the copy bandwidth, append"] == (0.0, "e4m3", False)
    assert measured["rows that make the host wait"] == (1.0, "uneven lengths, 128k and 63 of 512", False)
    assert goals.table(list(made.values())).row_count == len(made)
    assert goals.cells(made["microseconds, bf16"]) == ("microseconds, bf16", "at most 10", "9", "1x8k", "yes")


def test_nothing_timed_is_nothing_said_but_of_what_failed():
    assert goals.decode({"rows": [row("append", "bf16", {"onchip": 1e-3})], "device": {"kind": "cpu"}}) == []
    failed = goals.decode({"rows": [row("append", "bf16", {"FlashInfer": 1e-3})], "device": {"kind": "cuda", "measured": {"bandwidth": 1e12}}})
    assert {goal["what"]: goal["met"] for goal in failed if goal["measured"] is not None} == {
        "times the speed of FlashInfer or SDPA, whichever is faster": False,
        "share of the copy bandwidth, append": False,
        "rows that make the host wait": True,
    }


def attended(rows, summary=()):
    made = goals.attention({"rows": rows, "summary": list(summary), "device": {"kind": "cuda", "measured": {"bandwidth": 1e12}}})
    return {goal["what"]: (goal["measured"], goal["at"], goal["met"]) for goal in made}


def test_goals_of_attention_by_hand():
    found = attended(
        [
            row(
                "backward d64 full",
                "1k",
                {"onchip": 1.0, "FlashAttention-4": 2.0, "cuDNN (torch)": 1.0, "FlashAttention-2 (torch)": 3.0, "onchip, Triton": 2.0},
            ),
            row("backward d64 full", "2k", {"onchip": 1.0, "FlashAttention-4": 0.9, "FlashAttention-2 (torch)": 1.5, "onchip, Triton": 2.0}),
            row("backward d256 causal", "1k", {"onchip": 1.0, "FlashAttention-4": 1.09}),
            row("backward, other shapes", "packed 64..8k", {"onchip": 1.0, "FlashAttention-4": 1.21}),
            row("backward, other shapes", "packed, drawn", {"onchip": 1.0, "FlashAttention-4": 1.0}),
            row("backward, other shapes", "window 1k", {"onchip": 1.0, "FlashAttention-4": 1.2}),
            row("backward d128 full", "1k", {"FlashAttention-4": 1.0}),  # ours was wrong
            row("backward, other shapes", "4 x 8k", {"onchip": 1.0, "FlashAttention-4": 0.5}),  # nothing is asked of it
            row("backward d128 causal, 32 heads over 4", "8k", {"onchip": 1.0, "FlashAttention-4": 1.3}),
        ],
        [
            {"group": "g", "against": "dense", "measure": "rate", "worst": 0.89, "at": "packed"},
            {"group": "f", "against": "onchip", "measure": "memory", "worst": 1.1, "at": "64k"},
            {"group": "f", "against": "onchip, Triton", "measure": "memory", "worst": 1.3, "at": "64k"},
            {"group": "f", "against": "cuDNN (torch)", "measure": "memory", "worst": 1.5, "at": "64k"},
        ],
    )
    assert found.pop("times the best peer, d64 and d128, mean over lengths") == (0.0, "backward d128 full", False)
    assert found.pop("times the best peer, d256, mean over lengths") == (pytest.approx(1.09), "backward d256 causal", False)
    assert found.pop("times the best peer, each length") == (0.0, "backward d128 full, 1k", False)
    assert found.pop("times the best peer, grouped heads, packed, window") == (pytest.approx(1.1), "packed", True)
    assert found.pop("times FlashAttention-2, by Triton, mean") == (pytest.approx((1.5 * 0.75) ** 0.5), "2 rows", False)
    assert found.pop("times FlashAttention-2, by Triton, each") == (pytest.approx(0.75), "backward d64 full, 2k", False)
    assert found.pop("rate of dense rows, packed") == (0.89, "g, packed, dense", False)
    assert found.pop("memory held over what must exist") == (1.3, "f, 64k, onchip, Triton", False)
    assert not found  # what was not timed is left out


def test_goals_of_eight_bits_and_of_scores_by_hand():
    eight = [row("prefill e4m3", f"d128 {mask} 16k", {"onchip": 1.0, "onchip, bf16": t}) for mask, t in (("full", 1.6), ("causal", 1.44))]
    assert attended(eight) == {"times our bf16, e4m3, d128 at 16k, mean of full and causal": (pytest.approx((1.6 * 1.44) ** 0.5), "d128 16k", True)}

    def priced(which, x, time):
        made = row(f"the price of a mod, {which}", x, {"onchip": 1.0})
        return {**made, "fields": made["fields"] | {"mod": x}, "over_plain": {"time": time}}

    made = [priced("forward", "softcap", 1.1), priced("backward", "softcap", 1.2), priced("forward", "plain", 1.0), priced("forward", "sinks", 1.0)]
    made += [priced("forward", "dropout", 1.4), priced("backward", "dropout, causal", 0.9)]  # shown, and nothing is asked of it
    made.append(row("attention-gym, forward", "sliding window", {"onchip": 1.0, "FlexAttention": 0.9}) | {"over_plain": None})  # no window of a pass
    flex = {"group": "the price of a mod, forward", "against": "FlexAttention", "measure": "speed", "worst": 0.9, "at": "softcap"}
    assert attended(made, [flex, {**flex, "group": "all rows", "worst": 0.8}]) == {
        "time over plain, softcap": (1.2, "backward", False),
        "time over plain, sinks": (1.0, "forward", True),
        "times FlexAttention": (0.9, "the price of a mod, forward, softcap", False),
    }
    assert goals.attention({"device": {"kind": "cpu"}, "rows": [], "summary": []}) == []
