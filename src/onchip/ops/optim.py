"""AdamW, and the clipping of gradients by their norm, over lists of tensors: one launch each, nothing read back by the host."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import check_numbers, check_pair
from onchip.core.problem import SHORT, Rows
from onchip.dispatch import select

MOMENTS = ("exp_avg", "exp_avg_sq")


class Hyper(NamedTuple):
    """The numbers of a step; `lr` may be a tensor on the device, so that a CUDA graph follows a schedule."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float


class Clip(NamedTuple):
    """The norm of all gradients, float64 [] on the device, and what it may be at most."""

    norm: Tensor
    most: float


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) as torch.optim.AdamW computes it, with clipping in the same pass.

    max_norm   gradients whose norm over all groups is larger are scaled down to it, in registers: `p.grad` stays as it is. None: not clipped.
    moments    dtype of the two moments: float32 (also beside bfloat16 parameters), or bfloat16, which halves their memory.
    What a group holds is looked at in each step, also what was put there since, and refused before anything is changed.
    Parameters may lie in any order without gaps (channels_last). Sparse or complex ones are refused, and amsgrad and maximize in a group.
    `step()` returns nothing but the closure's loss, and is one graph break to torch.compile, as torch's own (fullgraph=True refuses it); `norm` is the norm of
    the last step's gradients, a float64 tensor on the device; None where there were none, or nothing is clipped. Steps are counted on
    the device, so that a CUDA graph of a step goes on counting: capture after one plain step, and keep gradients where they are
    (`zero_grad(set_to_none=False)`).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_norm: float | None = None,
        moments: torch.dtype = torch.float32,
        kernel: str = "auto",
    ):
        if max_norm is not None:
            check_numbers("AdamW", max_norm=max_norm)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"AdamW: max_norm={max_norm}; give a positive number, or None not to clip")
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"AdamW: moments={moments}; give torch.float32 or torch.bfloat16")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.max_norm, self.moments, self.kernel = max_norm, moments, kernel
        self.norm: Tensor | None = None
        self._plans: defaultdict[int, dict] = defaultdict(dict)  # what a kernel knows of each batch's lists
        self._constants: dict[tuple, Tensor] = {}

    def step(self, closure: Callable | None = None):
        return _untraced(self, closure) if torch.compiler.is_dynamo_compiling() else self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable | None):
        loss, self.norm = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._batches()
        clip = self._clip(batches) if self.max_norm is not None and batches else None
        for n, (group, lists) in enumerate(batches):
            steps = self.state[lists[0][0]]["step"].add_(1)
            powers = self._on_device(tuple(group["betas"]), steps.device) ** steps
            lr = group["lr"]
            hyper = Hyper(lr if isinstance(lr, Tensor) else float(lr), *map(float, (*group["betas"], group["eps"], group["weight_decay"])))
            self._select("adamw", lists).launch(lists, self._plans[n], hyper, powers, clip)
        return loss

    def add_param_group(self, param_group: dict) -> None:
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def state_dict(self) -> dict:
        """As torch.optim.AdamW reads it, too: a count for each parameter, float32 on the CPU, where here one on the device is for all."""
        made = super().state_dict()
        counts = {id(state["step"]): state["step"] for state in made["state"].values()}
        counts = {key: count.to("cpu", torch.float32) for key, count in counts.items()}
        return made | {"state": {n: state | {"step": counts[id(state["step"])].clone()} for n, state in made["state"].items()}}

    def __getstate__(self) -> dict:
        """Of copies and pickles."""
        return super().__getstate__() | {name: getattr(self, name) for name in ("max_norm", "moments", "kernel", "norm")}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__({"_plans": defaultdict(dict), "_constants": {}} | self.__dict__ | state)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Also of torch.optim.AdamW. Moments keep their dtype (torch would round them to the parameters'); equal counts of steps become one again."""
        for group in state_dict["param_groups"]:
            _check_group(group)
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        counts: dict[tuple, Tensor] = {}
        for p, given in ((p, state_dict["state"][n]) for p, n in zip(params, numbers, strict=True) if n in state_dict["state"]):
            count = float(given["step"])
            moments = {name: torch.empty_like(p, dtype=self._moments(p)).copy_(given[name]) for name in MOMENTS}
            self.state[p] = moments | {"step": counts.setdefault((count, p.device), torch.full((), count, dtype=torch.float64, device=p.device))}

    def _clip(self, batches: list) -> Clip:
        norms = [self._select("grad_norm", lists).launch(lists, self._plans[n]) for n, (_, lists) in enumerate(batches)]
        self.norm = norms[0] if len(norms) == 1 else torch.stack(norms).square().sum().sqrt()
        return Clip(self.norm, float(self.max_norm))

    def _batches(self) -> list[tuple[dict, tuple[list[Tensor], ...]]]:
        """(group, lists of p, g, m and v) of one dtype and count of steps each."""
        for group in self.param_groups:
            _check_group(group)
        holders = Counter(id(state["step"]) for state in self.state.values() if state)
        batches = []
        for group in self.param_groups:
            found: dict[tuple, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    self._check(p, group["lr"])
                    found.setdefault((p.dtype, id(self.state[p].get("step"))), []).append(p)
            for params in found.values():
                step = self.state[params[0]].get("step")
                if step is None:
                    step = torch.zeros((), dtype=torch.float64, device=params[0].device)
                    for p in params:
                        self.state[p] |= {name: torch.zeros_like(p, dtype=self._moments(p)) for name in MOMENTS} | {"step": step}
                elif holders[id(step)] > len(params):  # another batch counts by itself; what has no gradient does not count
                    step = step.clone()
                    for p in params:
                        self.state[p]["step"] = step
                batches.append((group, (params, [_in_order(p.grad, p) for p in params], *([self.state[p][name] for p in params] for name in MOMENTS))))
        if len({p.device for _, lists in batches for p in lists[0]}) > 1:
            raise ValueError("AdamW: parameters lie on several devices; give an optimiser for each")
        return batches

    def _check(self, p: Tensor, lr: float | Tensor) -> None:
        if isinstance(lr, Tensor) and lr.device != p.device:
            raise ValueError(f"AdamW: lr is a tensor on {lr.device}, a parameter is on {p.device}; give a float, or a tensor there")
        if p.grad.is_sparse or p.is_complex() or p.grad.dtype != p.dtype:
            raise ValueError(f"AdamW: a parameter is {p.dtype}, its gradient {p.grad.dtype} ({p.grad.layout}); give dense real ones of one dtype")
        if not p.is_contiguous() and torch.empty_like(p, device="meta").stride() != p.stride():
            raise ValueError(f"AdamW: a parameter of shape {list(p.shape)} has strides {p.stride()}, with gaps; give contiguous ones, updated in place")

    def _moments(self, p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else self.moments

    def _select(self, op: str, lists: tuple[list[Tensor], ...]):
        p = lists[0]
        words = "" if op == "grad_norm" else f"{SHORT[lists[2][0].dtype]} moments"
        return select(Rows(op, len(p), sum(t.numel() for t in p), p[0].dtype, words), p[0].device, self.kernel)

    def _on_device(self, numbers: tuple[float, ...], device: torch.device) -> Tensor:
        """Float64, copied once, from pinned memory."""
        key = (numbers, device)
        if key not in self._constants:
            made = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            self._constants[key] = made if device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
        return self._constants[key]


@torch._disable_dynamo  # torch.compiler.disable would import dynamo with this file
def _untraced(optimiser: AdamW, closure: Callable | None):
    return optimiser._step(closure)


def _check_group(group: dict) -> None:
    """In each step, of each group: what asks of everything what kind it is (3 us) is left for numbers that are no floats in their range."""
    lr, betas, eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    plain = type(lr) is type(eps) is type(decay) is float and type(betas) is tuple and len(betas) == 2 and type(betas[0]) is type(betas[1]) is float
    if not (plain and 0 <= lr < math.inf and 0 <= betas[0] < 1 and 0 <= betas[1] < 1 and 0 <= eps < math.inf and 0 <= decay < math.inf):
        _check_numbers(lr, betas, eps, decay)
    if group.get("amsgrad") or group.get("maximize") or (decay and not group.get("decoupled_weight_decay", True)):
        raise ValueError("AdamW: a group has amsgrad, maximize or weight decay as Adam's, which this step does not know; use torch.optim.AdamW or Adam")


def _check_numbers(lr: float | Tensor, betas: tuple[float, float], eps: float, decay: float) -> None:
    check_pair("AdamW", betas=betas)
    check_numbers("AdamW", **({} if isinstance(lr, Tensor) else {"lr": lr}), eps=eps, weight_decay=decay)
    rate = lr.ndim == 0 if isinstance(lr, Tensor) else 0 <= lr < math.inf
    if not all(0 <= beta < 1 for beta in betas) or not 0 <= eps < math.inf or not 0 <= decay < math.inf or not rate:
        given = f"lr={lr}, betas={betas}, eps={eps}, weight_decay={decay}"
        raise ValueError(f"AdamW: {given}; betas lie in [0, 1), the others are not negative numbers, or lr a tensor []")


def _in_order(g: Tensor, p: Tensor) -> Tensor:
    """A gradient as its parameter lies."""
    if p.is_contiguous():
        return g.contiguous()
    return g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)


__all__ = ["AdamW", "Hyper"]
