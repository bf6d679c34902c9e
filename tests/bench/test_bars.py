"""The summary of a suite, by hand."""

import pytest

from onchip.bench import bars

SIZES = {"batch": 1, "len_q": 16384, "len_k": 16384, "heads": 16, "kv_heads": 16, "dim": 128, "dtype": "bf16", "mask": "Causal", "keys": "dense", "dim_v": 0}


def row(group, x, seconds, op="prefill", flops=1e12, mod=None, **fields):
    """A row of a result; with `mod`, or of another pass, its sizes are those of an inner Problem."""
    sizes = {**SIZES, **fields}
    asked = {"op": op, "group": group, "x": x, "lengths": []}
    asked |= sizes if op == "prefill" else {"inner": {"op": "prefill", **sizes}, "mod": mod or ""}
    return {"problem": f"{op} {x}", "fields": asked, "seconds": seconds, "rate": {"amount": flops}, "cost": {"flops": flops}}


def found(rows, measure):
    return [bars.Bar(**bar) for bar in bars.summary(rows) if bar["measure"] == measure]


def test_speed_by_group_and_over_all():
    rows = [
        row("prefill d64 full", "1k", {"onchip": 1.0, "a": 2.0, "b": 0.5}),
        row("prefill d64 full", "4k", {"onchip": 1.0, "a": 8.0}),
        row("prefill d128 causal", "1k", {"onchip": 2.0, "a": 2.0}),
        row("other", "96", {"onchip": 1.0, "a": 0.25, "onchip kernel alone": 0.5}),
        row("other", "97", {"a": 0.25}),
    ]
    assert found(rows, "speed") == [
        bars.Bar("prefill d64 full", "a", "speed", 2, pytest.approx(4.0), 2.0, "1k"),
        bars.Bar("prefill d64 full", "b", "speed", 1, pytest.approx(0.5), 0.5, "1k"),
        bars.Bar("prefill d64 full", "the best peer", "speed", 2, pytest.approx(2.0), 0.5, "1k"),
        bars.Bar("prefill d128 causal", "a", "speed", 1, pytest.approx(1.0), 1.0, "1k"),
        bars.Bar("other", "a", "speed", 1, pytest.approx(0.25), 0.25, "96"),
        bars.Bar("all heads and masks", "a", "speed", 3, pytest.approx(16 ** (1 / 3)), 1.0, "prefill d128 causal, 1k"),
        bars.Bar("all heads and masks", "b", "speed", 1, pytest.approx(0.5), 0.5, "prefill d64 full, 1k"),
        bars.Bar("all heads and masks", "the best peer", "speed", 3, pytest.approx(4 ** (1 / 3)), 0.5, "prefill d64 full, 1k"),
        bars.Bar("all rows", "a", "speed", 4, pytest.approx(4**0.25), 0.25, "other, 96"),
        bars.Bar("all rows", "b", "speed", 1, pytest.approx(0.5), 0.5, "prefill d64 full, 1k"),
        bars.Bar("all rows", "the best peer", "speed", 4, 1.0, 0.25, "other, 96"),
    ]


def test_what_tritons_kernels_took_is_said_beside_it():
    rows = [
        row("prefill d64 full", "16k", {"onchip": 1.0, "onchip, Triton": 4.0, "a": 8.0}),
        row("w", "window", {"onchip": 0.5, "onchip, Triton": 0.4, "a": 1.0}, mask="Window(1024)"),
        row("other", "96", {"onchip": 1.0, "a": 2.0}),
    ]
    ours = [bar for bar in found(rows, "speed") if bar.group.endswith("by Triton")]
    assert ours == [
        bars.Bar("prefill d64 full, by Triton", "a", "speed", 1, pytest.approx(2.0), 2.0, "16k"),
        bars.Bar("w, by Triton", "a", "speed", 1, pytest.approx(2.5), 2.5, "window"),
        bars.Bar("all rows, by Triton", "a", "speed", 2, pytest.approx(5**0.5), 2.0, "prefill d64 full, 16k"),
    ]
    assert [bar.worst for bar in found(rows, "less time")] == [2.0, 10.0]


@pytest.mark.parametrize("op", ["prefill", "backward"])
def test_windows_and_packed_rows_stand_beside_their_partners(op):
    rows = [
        row("c", "16k", {"onchip": 6.0}, op),
        row("c", "8k", {"onchip": 1.0}, op, batch=4, len_q=8192, len_k=8192),
        row("w", "window", {"onchip": 0.5}, op, mask="Window(1024)"),
        row("p", "packed", {"onchip": 2.0}, op, flops=1.8e12, keys="packed", len_q=7000, len_k=7000, batch=8),
        row("p", "packed, d64", {"onchip": 2.0}, op, keys="packed", dim=64),
    ]
    assert found(rows, "less time") == [bars.Bar("w", f"{op} 16k", "less time", 1, pytest.approx(12.0), 12.0, "window")]
    assert found(rows, "rate") == [bars.Bar("p", f"{op} 8k", "rate", 1, pytest.approx(0.9), 0.9, "packed")]


def test_mods_stand_beside_the_plain_kernel_of_their_pass():
    rows = [
        row("price", "plain", {"onchip": 1.0}, "forward", mod="plain"),
        row("price", "softcap", {"onchip": 1.1}, "forward", mod="softcap"),
        row("price", "bias", {"onchip": 1.2}, "forward", mod="bias"),
        row("gym", "causal", {"onchip": 0.6}, "forward", flops=5e11, mod="causal"),
        row("gym", "latent", {"onchip": 9.0}, "forward", mod="latent", dim=192),
        row("price", "dropout", {"onchip": 1.4}, "forward", mod="dropout"),
        row("price", "dropout, causal", {"onchip": 0.8}, "forward", flops=5e11, mod="dropout, causal"),
        row("price", "softcap", {"onchip": 7.0}, "backward", mod="softcap"),
        row("price", "broken", {}, "forward", mod="broken"),
    ]
    assert found(rows, "time") == [bars.Bar("price", "plain", "time", 2, pytest.approx((1.1 * 1.2) ** 0.5), 1.2, "bias")]
    assert found(rows, "time a pair") == [bars.Bar("gym", "plain", "time a pair", 1, pytest.approx(1.2), pytest.approx(1.2), "causal")]
    assert bars.over_plain(rows[3], rows) == {"time": pytest.approx(0.6), "a pair": pytest.approx(1.2)}
    assert found(rows, "dropout") == [bars.Bar("price", "plain", "dropout", 2, pytest.approx((1.4 * 1.6) ** 0.5), pytest.approx(1.6), "dropout, causal")]
    assert [bool(bars.over_plain(one, rows)) for one in rows[4:]] == [False, True, True, False, False]


def test_memory_and_rows_that_did_not_run():
    step = row("step", "64k", {"onchip": 1.0, "a": 2.0}, "step") | {"memory": {"ideal": 100, "held": {"onchip": 110, "a": 140}}}
    assert [(bar.against, bar.worst) for bar in found([step], "memory")] == [("onchip", 1.1), ("a", 1.4)]
    broken = row("g", "x", {}) | {"rate": None, "cost": None}
    assert bars.summary([broken]) == bars.summary([]) == []
    assert bars.table(bars.summary([step])).row_count == 3
