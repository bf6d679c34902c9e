"""A small decoder trained with onchip's operators and with plain torch: both end at the same loss."""

import pytest
import torch
import torch.nn.functional as F

import onchip
from onchip.core import settings
from onchip.core.masks import Causal
from onchip.models.rope import rope_table
from onchip.ops.activation import gated_act
from onchip.ops.linear_losses import linear_cross_entropy
from onchip.ops.lookup import embedding
from onchip.ops.norm import rms_norm
from onchip.ops.optim import AdamW
from onchip.ops.rotary import rotary

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, MLP, LAYERS = 512, 128, 4, 2, 32, 352, 4
BATCH, LENGTH, STEPS, LAST = 4, 48, 200, 20
EPS = 1e-6
HOW = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
QKV = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]


def text(device):
    """STEPS batches of LENGTH + 1 tokens: four of five follow from the one before, the others are drawn."""
    made = torch.Generator().manual_seed(1)
    follows = torch.randperm(VOCAB, generator=made)
    tokens = torch.randint(VOCAB, (STEPS, BATCH, LENGTH + 1), generator=made)
    known = torch.rand(tokens.shape, generator=made) < 0.8
    for n in range(1, LENGTH + 1):
        tokens[..., n] = torch.where(known[..., n], follows[tokens[..., n - 1]], tokens[..., n])
    return tokens.to(device)


def weights(device):
    made = torch.Generator().manual_seed(2)

    def new(*shape):
        return (torch.randn(shape, generator=made) * (0.02 if len(shape) == 2 else 0) + (len(shape) == 1)).to(device).requires_grad_()

    layer = {"norm": (HIDDEN,), "qkv": (sum(QKV), HIDDEN), "o": (HIDDEN, HEADS * DIM), "norm_mlp": (HIDDEN,), "gate_up": (2 * MLP, HIDDEN)}
    layers = [{name: new(*shape) for name, shape in (layer | {"down": (HIDDEN, MLP)}).items()} for _ in range(LAYERS)]
    return {"embed": new(VOCAB, HIDDEN), "layers": layers, "norm": new(HIDDEN), "head": new(VOCAB, HIDDEN)}


class Onchip:
    embed, turn, act, loss = (staticmethod(f) for f in (embedding, rotary, gated_act, linear_cross_entropy))

    @staticmethod
    def add_norm(x, residual, weight):
        return rms_norm(x, weight, eps=EPS, residual=residual)

    @staticmethod
    def attend(q, k, v):
        return onchip.attention(q, k, v, mask=Causal())

    @staticmethod
    def optimiser(params):
        return AdamW(params, **HOW)


class Torch:
    embed = staticmethod(F.embedding)

    @staticmethod
    def add_norm(x, residual, weight):
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, EPS), total

    @staticmethod
    def turn(q, k, table):
        cos, sin = (t.repeat(1, 2).unsqueeze(1).to(q.dtype) for t in table.chunk(2, -1))
        return (x * cos + torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1) * sin for x in (q, k))

    @staticmethod
    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    @staticmethod
    def act(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def loss(x, head, targets):
        return F.cross_entropy((x @ head.t()).float(), targets)

    @staticmethod
    def optimiser(params):
        return torch.optim.AdamW(params, **HOW)


def loss_of(ops, model, tokens, table, dtype):
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    x, residual = ops.embed(ids, model["embed"].to(dtype)), torch.zeros(*ids.shape, HIDDEN, dtype=dtype, device=ids.device)
    for layer in model["layers"]:
        w = {name: t.to(dtype) for name, t in layer.items()}
        y, residual = ops.add_norm(x, residual, w["norm"])
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in F.linear(y, w["qkv"]).split(QKV, -1))
        y, residual = ops.add_norm(F.linear(ops.attend(*ops.turn(q, k, table), v).flatten(2), w["o"]), residual, w["norm_mlp"])
        x = F.linear(ops.act(F.linear(y, w["gate_up"])), w["down"])
    y, _ = ops.add_norm(x, residual, model["norm"].to(dtype))
    return ops.loss(y.flatten(0, 1), model["head"].to(dtype), targets.flatten())


def train(ops, dtype, device):
    """Losses of the first step, and of the last LAST in the mean."""
    model, table = weights(device), rope_table(LENGTH, DIM, 1e4, device=device)
    params = [model["embed"], model["norm"], model["head"], *(t for layer in model["layers"] for t in layer.values())]
    optimiser, losses = ops.optimiser(params), []
    for tokens in text(device):
        loss = loss_of(ops, model, tokens, table, dtype)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.detach())
    return losses[0].item(), torch.stack(losses[-LAST:]).float().mean().item()


def check(dtype, device):
    (first, ours), (_, theirs) = (train(ops, dtype, device) for ops in (Onchip, Torch))
    assert ours < 0.7 * first, f"nothing was learnt: {first:.3f} at first, {ours:.3f} at last"
    assert abs(ours / theirs - 1) < 0.005, f"{ours:.4f}, with plain torch {theirs:.4f}"


@pytest.mark.skipif(settings.INTERPRET.read(), reason="200 steps of a model take hours in the interpreter")
def test_a_decoder_ends_at_the_loss_of_plain_torch():
    check(torch.float32, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoder_on_a_gpu(dtype, device):
    """In bfloat16 the weights that are trained stay float32, as in mixed precision."""
    check(dtype, device)
