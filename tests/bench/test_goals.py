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
