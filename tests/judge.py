"""The rule by which results are judged: our error against float64, beside the error torch makes in the same dtype."""

import torch


def assert_as_good_as_torch(ours, low, truth, slack=2.0):
    """`ours` may err `slack` times as much as `low` (torch in the same dtype; of several ways, the one that errs most), plus one rounding of the output.

    Infinities must agree in place and sign; NaN never passes.
    """
    truth = truth.double()
    finite = truth.isfinite()
    assert not ours.isnan().any(), f"{int(ours.isnan().sum())} of {ours.numel()} results are NaN"
    assert torch.equal(ours.double()[~finite], truth[~finite]), "infinities differ"
    if not finite.any():
        return
    low = low if isinstance(low, tuple) else (low,)
    error, *theirs = ((x.double() - truth)[finite].abs().max().item() for x in (ours, *low))
    torch_error = max(theirs)
    rounding = torch.finfo(ours.dtype).eps * truth[finite].abs().max().item()
    assert error <= slack * torch_error + rounding, f"error {error:.2e}; torch makes {torch_error:.2e}, one rounding is {rounding:.2e}"


def poisoned(shape, dtype, device):
    """A tensor of NaN: what no kernel may read, and every kernel must overwrite."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def hardware(truth, dtype, device):
    """What float32 on a GPU errs beside torch's: its exp2 is good to two ulps, and LSE is rounded in base 2 and again in base e. For `low`; () elsewhere."""
    if dtype != torch.float32 or device.type != "cuda":
        return ()
    largest = truth[truth.isfinite()].abs()
    return (truth + 2 * torch.finfo(dtype).eps * (largest.max().item() if largest.numel() else 0.0),)
