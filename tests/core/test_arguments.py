"""What is no tensor, lies elsewhere or is no number is named, whatever row operator gets it."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import onchip
from onchip import dispatch
from onchip.models.rope import rope_table
from onchip.ops.diffusion import DDPM, denoise_step, noise_state, schedule

X, W, FAR = torch.ones(2, 3, 8), torch.ones(8), torch.ones(8, device="meta")
IDS, LEARNT = torch.zeros(2, 3, dtype=torch.int64), torch.ones((), requires_grad=True)
LOGITS, PAIR = torch.zeros(2, 40), onchip.Pair(torch.zeros(2), torch.zeros(2))
COUNTS = torch.zeros(2, 40, dtype=torch.int32)
HOW = onchip.Sampling(*(torch.ones(2, dtype=t) for t in (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)))


def _penalised(output, presence=PAIR[0]):
    return onchip.adjust_logits(LOGITS, penalties=onchip.Penalties(PAIR[0] + 1, presence, PAIR[0], output))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: onchip.rms_norm([1.0], W), "rms_norm: x is a list; give a tensor"),
        (lambda: onchip.rms_norm(X, W, residual=1.0), "rms_norm: residual is a float; give a tensor like x, or a Residual"),
        (lambda: onchip.rms_norm(X.to_sparse(), W), "rms_norm: x is a nested or sparse tensor; give a dense one"),
        (lambda: onchip.rms_norm(X, W.cfloat()), "rms_norm: weight is torch.complex64; give real numbers"),
        (lambda: onchip.rms_norm(X, W, after=onchip.SiluGate(X.cfloat())), "rms_norm: gate is torch.complex64; give real numbers"),
        (lambda: onchip.group_norm(X, 1, W[:3].cfloat()), "group_norm: weight is torch.complex64; give real numbers"),
        (lambda: onchip.rotary(X, X, W[None], norm=onchip.QKNorm(W.cfloat(), W, 1e-6)), "rotary: norm.q is torch.complex64, norm.k torch.float32; give floats"),
        (lambda: onchip.cross_entropy(X, IDS, in_place="no"), "cross_entropy: in_place is 'no'; give True or False"),
        (lambda: onchip.linear_cross_entropy(X, X[0], IDS, per_token=1), "linear_cross_entropy: per_token is 1; give True or False"),
        (lambda: onchip.sequence_log_probs(X, X[0], IDS, mean="yes"), "sequence_log_probs: mean is 'yes'; give True or False"),
        (lambda: onchip.layer_norm(X, residual=onchip.Residual(X, in_place="no")), "layer_norm: in_place is 'no'; give True or False"),
        (lambda: onchip.dropout_add(X, None, onchip.Dropout(0.5), training=LEARNT), r"dropout_add: training is torch.float32 \[\] on cpu; give True or False"),
        (lambda: onchip.layer_norm(X, (8,)), "layer_norm: weight is a tuple; give a tensor"),
        (lambda: onchip.rms_norm(X, W, eps=None), "rms_norm: eps is None; give a number"),
        (lambda: onchip.rms_norm(X, W, offset="1"), "rms_norm: offset is '1'; give a number"),
        (lambda: onchip.layer_norm(X, W, eps=LEARNT), r"layer_norm: eps is tensor\(1., requires_grad=True\); give a number"),
        (lambda: onchip.layer_norm(X, W, residual=onchip.Residual(None)), "layer_norm: residual is a NoneType; give a tensor"),
        (lambda: onchip.layer_norm(X, W, residual=onchip.Residual(X, dropout=0.1)), r"layer_norm: dropout is 0.1; give Dropout\(p\)"),
        (lambda: onchip.rms_norm(X, W, after=onchip.Modulate(1.0)), "rms_norm: scale is a float; give a tensor"),
        (lambda: onchip.group_norm(X, 1, [1.0] * 3), "group_norm: weight is a list"),
        (lambda: onchip.rotary(X, X, (X, X)), "rotary: table is a tuple"),
        (lambda: onchip.rope_append(X[0], [1.0], IDS[0], (1, 1)), "rope_append: table is a list"),
        (lambda: onchip.activate(X, bias=[1.0]), "activate: bias is a list"),
        (lambda: onchip.gated_act(X, onchip.Clipped(limit=None)), "gated_act: limit is None; give a number"),
        (lambda: onchip.softmax(X, temperature=LEARNT), r"softmax: temperature is tensor\(1., requires_grad=True\); give a number"),
        (lambda: onchip.softmax(X, mask=[True]), "softmax: mask is a list"),
        (lambda: onchip.cross_entropy(X, [0]), "cross_entropy: targets is a list"),
        (lambda: onchip.cross_entropy(X, IDS, 0.1), r"cross_entropy: terms is a float; give LossTerms\(...\)"),
        (lambda: onchip.cross_entropy(X, IDS, onchip.LossTerms(softcap=LEARNT)), "cross_entropy: terms.softcap is tensor"),
        (lambda: onchip.cross_entropy(X, IDS, onchip.LossTerms(class_weights=[1.0])), "cross_entropy: terms.class_weights is a list"),
        (lambda: onchip.cross_entropy(X, IDS, onchip.LossTerms(shard=(None, 0))), r"cross_entropy: terms.shard is a tuple; give Shard\(group, first, vocab\)"),
        (lambda: onchip.linear_cross_entropy(X, [1.0], IDS), "linear_cross_entropy: weight is a list"),
        (lambda: onchip.token_log_probs(X, X[0], IDS, None), r"token_log_probs: terms is a NoneType; give LossTerms\(...\)"),
        (lambda: onchip.divergence(X, X, counts=[True]), "divergence: counts is a list"),
        (lambda: onchip.linear_divergence((X, W), (X, [1.0])), "linear_divergence: teacher.weight is a list"),
        (lambda: onchip.dpo(PAIR, ([0.0], [0.0])), "dpo: log-probabilities 3 is a list"),
        (lambda: onchip.dpo(PAIR, PAIR, beta="0.1"), "dpo: beta is '0.1'; give a number"),
        (lambda: onchip.dpo(PAIR, PAIR, smoothing="a"), "dpo: smoothing is 'a'; give a number"),
        (lambda: onchip.dpo(None, PAIR), r"dpo: a NoneType is no pair of log-probabilities; give Pair\(chosen, rejected\)"),
        (lambda: onchip.simpo((*PAIR, PAIR[0])), r"simpo: a tuple is no pair of log-probabilities; give Pair\(chosen, rejected\)"),
        (lambda: onchip.cpo(PAIR, PAIR[0], weight="a"), "cpo: weight is 'a'; give a number"),
        (lambda: onchip.kto(*PAIR, PAIR[0] > 0, 0.0), "kto: divergence is a float; give a tensor"),
        (lambda: onchip.kto(*PAIR, PAIR[0] > 0, PAIR[0], weights=(1.0, 2.0, 3.0)), r"kto: weights is \(1.0, 2.0, 3.0\); give two numbers"),
        (lambda: onchip.grpo(*PAIR, PAIR[0], PAIR[0] > 0, onchip.Policy(clip=0.2)), "grpo: clip is 0.2; give two numbers"),
        (lambda: onchip.grpo(*PAIR, PAIR[0], PAIR[0] > 0, "dapo"), "grpo: how is a str; give GRPO, or a Policy"),
        (lambda: onchip.sample(LOGITS, (1.0, 5)), r"sample: how is a tuple; give Sampling\(...\)"),
        (lambda: onchip.sample(LOGITS, HOW._replace(seed=3)), "sample: how.seed is a int; give a tensor"),
        (lambda: onchip.sample(LOGITS, HOW._replace(top_p=None)), r"sample: how.top_p is None; give a tensor \[2\]"),
        (lambda: onchip.verify(LOGITS[:, None], (IDS,), HOW), r"verify: draft is a tuple; give Draft\(tokens, ...\)"),
        (lambda: onchip.adjust_logits(LOGITS, bias={1: 2.0}), r"adjust_logits: bias is a dict; give Bias\(...\)"),
        (lambda: onchip.embedding([1], X[0]), "embedding: ids is a list"),
        (lambda: onchip.dropout_add(X, 1.0, onchip.Dropout(0.5)), "dropout_add: residual is a float"),
        (lambda: denoise_step(X, X, schedule(onchip.DDIM(), 5), 0), "denoise_step: step is a int; give a tensor"),
        (lambda: denoise_step(X, None, schedule(onchip.DDIM(), 5), IDS[0, :1]), "denoise_step: output is a NoneType; give a tensor"),
        (lambda: onchip.cross_entropy(X, None), "cross_entropy: targets is a NoneType; give a tensor"),
        (lambda: onchip.rotary(X, None, X[0]), "rotary: k is a NoneType; give a tensor"),
        (lambda: onchip.rotary(X, X, None), "rotary: table is a NoneType; give a tensor"),
        (lambda: onchip.rope_append(X[0], X[0], None, (1, 1)), "rope_append: positions is a NoneType; give a tensor"),
        (lambda: onchip.linear_cross_entropy(X, None, IDS), "linear_cross_entropy: weight is a NoneType; give a tensor"),
        (lambda: onchip.sequence_log_probs(X, X[0], None), "token_log_probs: targets is a NoneType; give a tensor"),
        (lambda: onchip.divergence(X, None), "divergence: teacher is a NoneType; give a tensor"),
        (lambda: onchip.linear_divergence((X, None), (X, X[0])), "linear_divergence: student.weight is a NoneType; give a tensor"),
        (lambda: onchip.linear_divergence(None, (X, X[0])), r"linear_divergence: student is a NoneType, no head; give Head\(hidden, weight, bias\)"),
        (lambda: onchip.cpo(PAIR, None), "cpo: log-probabilities 3 is a NoneType; give a tensor"),
        (lambda: onchip.kto(*PAIR, None, PAIR[0][0]), "kto: desirable is a NoneType; give a tensor"),
        (lambda: onchip.grpo(*PAIR, None, PAIR[0] > 0), "grpo: advantages is a NoneType; give a tensor"),
        (lambda: onchip.log_probs(LOGITS, None), "log_probs: tokens is a NoneType; give a tensor"),
        (lambda: onchip.verify(LOGITS[:, None], onchip.Draft(None), HOW), "verify: draft.tokens is a NoneType; give a tensor"),
        (lambda: onchip.adjust_logits(LOGITS, bias=onchip.Bias(None, LOGITS)), "adjust_logits: bias.ids is a NoneType; give a tensor"),
        (lambda: _penalised(COUNTS, None), "adjust_logits: penalties.presence is a NoneType; give a tensor"),
        (lambda: _penalised([[1]]), r"adjust_logits: penalties.output is a list; give counts int32 \[2, 40\], or TokenIds"),
        (lambda: _penalised(onchip.TokenIds([[1], [2]])), "adjust_logits: penalties.output's ids is a list; give a tensor"),
        (lambda: onchip.embedding(IDS, None), "embedding: weight is a NoneType; give a tensor"),
        (lambda: onchip.simpo(PAIR, margin=True), "simpo: margin is True; give a number"),
        (lambda: onchip.token_log_probs(X, X[0], IDS, onchip.LossTerms(smoothing=W)), "token_log_probs: terms.smoothing is tensor"),
    ],
)
def test_what_is_none_is_named(call, words):
    with pytest.raises(TypeError, match=f"^{words}"):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: onchip.rms_norm(X, FAR), "rms_norm: weight is on meta, x on cpu; move one of them"),
        (lambda: onchip.layer_norm(X, W, residual=onchip.Residual(X, row_scale=X.to("meta"))), "layer_norm: row_scale is on meta, residual on cpu"),
        (lambda: onchip.group_norm(X, 1, bias=FAR), "group_norm: bias is on meta, x on cpu"),
        (lambda: onchip.rotary(X, X, X[0], IDS.to("meta")), "rotary: positions is on meta, q on cpu"),
        (lambda: onchip.cross_entropy(X, IDS, onchip.LossTerms(class_weights=FAR)), "cross_entropy: terms.class_weights is on meta, logits on cpu"),
        (lambda: onchip.cross_entropy(X, IDS, onchip.LossTerms(ignore_index=None)), "cross_entropy: terms.ignore_index is None; give a whole number"),
        (lambda: onchip.group_norm(X, 1.0), r"group_norm: x is \[2, 3, 8\], groups=1.0; give"),
        (lambda: onchip.group_norm(X, True), r"group_norm: x is \[2, 3, 8\], groups=True; give"),
        (lambda: onchip.embedding(IDS, X[0], padding_idx=True), r"embedding: padding_idx=True is no row of weight \[3, 8\]; give 0 to 2"),
        (lambda: noise_state(3, None), "noise_state: device is None; give a torch.device"),
        (lambda: schedule(onchip.DDIM(), 5, device="wrong"), "schedule: device is 'wrong'; give a torch.device"),
        (lambda: _penalised(COUNTS.to("meta")), "adjust_logits: penalties.output is on meta, logits on cpu"),
        (lambda: onchip.log_probs(LOGITS, IDS.to("meta")), "log_probs: tokens is on meta, logits on cpu"),
        (lambda: onchip.embedding(IDS.to("meta"), X[0]), "embedding: weight is on cpu, ids on meta"),
        (lambda: denoise_step(X.to("meta"), X.to("meta"), schedule(onchip.DDIM(), 5), IDS[0, :1]), "denoise_step: plan is on cpu, x on meta"),
    ],
)
def test_what_lies_elsewhere_or_is_not_whole_is_named(call, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        call()


@pytest.mark.parametrize("call", [onchip.activate, onchip.gated_act, onchip.hadamard, onchip.softmax, onchip.layer_norm])
def test_a_number_is_no_row(call):
    with pytest.raises(ValueError, match=rf"^{call.__name__}: (x is \[\]|width 0)"):
        call(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda call=call: call(X, W, eps=-1.0), f"{call.__name__}: eps is -1.0; give 0 or more") for call in (onchip.rms_norm, onchip.layer_norm)),
        (lambda: onchip.rms_norm(X, None, eps=math.nan), "rms_norm: eps is nan; give 0 or more"),
        (lambda: onchip.rms_norm(X, W, eps=math.nan), "rms_norm: eps is nan; give 0 or more"),
        (lambda: onchip.rms_norm(X, W, offset=math.nan), "rms_norm: offset is nan; give a number"),
        (lambda: onchip.group_norm(X, 1, eps=-1.0), "group_norm: eps is -1.0; give 0 or more"),
        (lambda: onchip.rms_norm(X, W, after=onchip.RowCodes(["int8"])), r"rms_norm: RowCodes\(\['int8'\]\) is not one of e4m3, int8"),
        (lambda: onchip.gated_act(X, onchip.Clipped(limit=-1.0)), "gated_act: limit is -1.0; give 0 or more"),
        (lambda: onchip.log_probs(LOGITS, IDS[:, 0], "3"), "log_probs: top='3' of a vocabulary of 40; give 0 to 20"),
        (lambda: onchip.divergence(X, X, temperature=1e-40), "divergence: temperature is 1e-40; give 1e-30 to 1e30"),
        (lambda: onchip.divergence(X, X, temperature=math.inf), "divergence: temperature is inf; give 1e-30 to 1e30"),
        (lambda: onchip.rms_norm(X, W, eps=10**5000), "rms_norm: eps is a int past 1.8e308, which no float holds; give a number below"),
        (lambda: onchip.cross_entropy(X, IDS, onchip.LossTerms(z_loss=10**400)), "cross_entropy: terms.z_loss is a int past 1.8e308"),
        (lambda: onchip.dpo(PAIR, PAIR, beta=10**400), "dpo: beta is a int past 1.8e308"),
    ],
)
def test_what_is_out_of_range_is_named(call, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        call()


HALF, TWO, ROWS = np.float32(0.5), np.int64(2), torch.ones(3, 8, requires_grad=True)
QKV, TABLE = torch.linspace(-1, 1, 3 * 16).view(3, 16), rope_table(8, 4, 1e4)


def _adamw(lr, betas):
    param = torch.nn.Parameter(W.clone())
    param.grad = W.clone()
    onchip.AdamW([param], lr, betas=betas, eps=lr, weight_decay=lr).step()
    return param.detach()


NUMPYS = {  # of each call numbers as numpy has them
    "rms_norm": (partial(onchip.rms_norm, X, W), {"eps": HALF, "offset": HALF}),
    "layer_norm": (partial(onchip.layer_norm, X, W), {"eps": HALF, "offset": HALF}),
    "group_norm": (lambda groups, eps: onchip.group_norm(X.transpose(0, 2), groups, eps=eps), {"groups": np.int64(3), "eps": HALF}),
    "embedding": (lambda padding_idx: torch.autograd.grad(onchip.embedding(IDS + 2, ROWS, padding_idx=padding_idx).sum(), ROWS)[0], {"padding_idx": TWO}),
    "cross_entropy": (lambda i, z: onchip.cross_entropy(X[0], torch.arange(3), onchip.LossTerms(ignore_index=i, z_loss=z)), {"i": TWO, "z": HALF}),
    "dropout_add": (lambda p, seed: onchip.dropout_add(X, X, onchip.Dropout(p, seed)), {"p": np.float16(0.5), "seed": TWO}),
    "dropout of a norm": (lambda p: onchip.rms_norm(X, W, residual=onchip.Residual(X, dropout=onchip.Dropout(p, 1)))[0], {"p": np.float16(0.5)}),
    "gated_act": (lambda alpha, limit: onchip.gated_act(X, onchip.Clipped(alpha, limit)), {"alpha": HALF, "limit": HALF}),
    "skinny_linear": (lambda eps, limit: onchip.skinny_linear(X[0], X[0, :2], norm=onchip.RowNorm(W, eps), act=onchip.Clipped(limit=limit)),
                      {"eps": HALF, "limit": HALF}),
    "dpo": (lambda beta, smoothing: onchip.dpo(PAIR, onchip.Pair(ROWS[0, :2], PAIR[1]), beta=beta, smoothing=smoothing), {"beta": HALF, "smoothing": HALF}),
    "denoise_step": (lambda guidance, clip: denoise_step(X, X.repeat(2, 1, 1), schedule(DDPM(clip), 5), IDS[0, :1], guidance=guidance,
                                                         state=noise_state(1, "cpu"))[0], {"guidance": HALF, "clip": HALF}),
    "rope_append": (lambda heads, eps, offset: onchip.rope_append(QKV.clone(), TABLE, IDS[0, :3] * 0, heads, norm=onchip.QKNorm(W[:4], W[:4], eps, offset))[0],
                    {"heads": (np.int64(2), np.int64(1)), "eps": HALF, "offset": HALF}),
    "AdamW": (_adamw, {"lr": HALF, "betas": (HALF, HALF)}),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMPYS)
def test_numbers_of_numpys_are_pythons(name, monkeypatch):
    """A launcher of Triton's knows Python's alone."""
    call, numbers = NUMPYS[name]
    launched, launch = [], dispatch.Decision.__dict__["launch"].func
    monkeypatch.setattr(dispatch.Decision, "launch", property(lambda self: lambda *args: [launched.extend(args), launch(self)(*args)][1]))
    out = call(**numbers)
    flat = [n for arg in launched for n in (arg if isinstance(arg, tuple) else (arg,))]
    assert (launched or name == "dpo") and not [n for n in flat if isinstance(n, np.generic)]
    plain = {what: tuple(one.item() for one in n) if isinstance(n, tuple) else n.item() for what, n in numbers.items()}
    torch.testing.assert_close(out, call(**plain), rtol=0, atol=0)
