"""The mask of a tree of drafted tokens (SpecInfer, Miao et al., 2024)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.core.bands import Band, Full, Mask, Window
from onchip.core.parts import Exactly, by_name, check_sizes, check_tensor, check_whole
from onchip.core.trace import Place, readable


@dataclass(frozen=True, eq=False)
class Tree(Mask):
    """A tree of drafted tokens at the end of the keys: each sees all keys before the tree, and of the tree its ancestors and itself.

    Queries before the tree see all keys before it.

    ancestors   bool `[nodes, nodes]` or `[batch, nodes, nodes]`: row n is True at n and at its ancestors; `Tree.of(parents)` makes it.
    window      keys farther back are hidden, as of `Window(window)`: counted along the path, so siblings stand equally far from what both see. None: all seen.
    """

    ancestors: Tensor
    window: int | None = None

    __str__ = Mask.__str__
    key = property(by_name)

    def __post_init__(self):
        check_tensor("Tree", "ancestors", self.ancestors, (2, 3))
        if self.ancestors.dtype != torch.bool or self.ancestors.shape[-1] != self.ancestors.shape[-2] or not self.ancestors.shape[-1]:
            given, way = f"{self.ancestors.dtype} {list(self.ancestors.shape)}", "bool [nodes, nodes] or [batch, nodes, nodes], of 1 node or more"
            raise ValueError(f"Tree: ancestors are {given}; give {way}")
        if self.window is not None:
            check_whole("Tree", "window", self.window)
            Window(self.window)  # which says what is wrong with a number
            object.__setattr__(self, "depths", self.ancestors.sum(-1) - 1)  # how far each node stands behind the keys before the tree

    @classmethod
    def of(cls, parents: Tensor) -> "Tree":
        """From `parents` `[nodes]` or `[batch, nodes]`: the index of each node's parent, which comes before it; -1 for a root."""
        check_tensor("Tree", "parents", parents, (1, 2), integer=True)
        parents, nodes = parents.long(), parents.shape[-1]
        if readable(parents) and (parents >= torch.arange(nodes, device="cpu")).any():
            raise ValueError(f"Tree: parents are {parents.tolist()}; none may be its node or come after it; give an index before it, -1 for a root")
        seen = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(*parents.shape, nodes).clone()
        at = parents.clone()
        for _ in range(nodes):
            alive = at >= 0
            seen |= torch.nn.functional.one_hot(at.clamp(min=0), nodes).bool() & alive[..., None]
            at = torch.where(alive, parents.gather(-1, at.clamp(min=0)), at)
        return cls(seen)

    @property
    def name(self) -> str:
        return f"Tree({self.ancestors.shape[-1]}{'' if self.window is None else f', window {self.window}'})"

    @property
    def hull(self) -> Band:
        nodes = self.ancestors.shape[-1]
        return Full() if self.window is None else Window(self.window + nodes, None)  # of queries before the tree all keys before it are seen

    @property
    def tensors(self):
        return (self.ancestors,) if self.window is None else (self.ancestors, self.depths)

    def fits(self, *sizes):
        check_sizes("Tree", "ancestors", self.ancestors, "b**"[3 - self.ancestors.ndim :], sizes)
        nodes, keys = self.ancestors.shape[-1], sizes[3]
        if isinstance(keys, Exactly) and nodes > keys:
            raise ValueError(f"Tree: ancestors are of {nodes} nodes; this call has {keys} keys, of which the last are the nodes; give at most so many")

    def sees(self, at: Place):
        nodes = self.ancestors.shape[-1]
        row, col = at.row - at.len_k + nodes, at.j - at.len_k + nodes  # numbers in the tree; negative: before it
        inside = (torch.clamp(row, min=0), torch.clamp(col, min=0))
        batch = () if self.ancestors.ndim == 2 else (at.b,)
        seen = (col < 0) | ((row >= 0) & self.ancestors[(*batch, *inside)])
        if self.window is None:
            return seen
        stands, lies = (torch.where(n < 0, n, self.depths[(*batch, m)]) for n, m in zip((row, col), inside, strict=True))
        return seen & (stands - lies <= self.window)
