"""
Boosted trees as a contig model has them: the values of the leaves that a contig reaches add up to its log-odds.

Only what is needed to compute them is here, in NumPy: ``virnucpro train`` fits them by LightGBM. Legend: C contigs, I
inputs, N inner nodes of all trees, T trees, L leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from virnucpro.arrays import DoubleArray, FloatArray

    Int16Array = np.ndarray[Any, np.dtype[np.int16]]
    Int32Array = np.ndarray[Any, np.dtype[np.int32]]

CONTIGS_AT_ONCE = 1 << 6
"""What a contig takes for each tree stays in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class BoostedTrees:
    """Nodes and leaves of all trees, end to end; what follows a node has a greater number, so every way ends."""

    input_N: Int16Array
    """int16 (N,): the input that a node compares."""
    threshold_N: DoubleArray
    """float64 (N,): the first child is taken where the input is at most this, else the second."""
    children_N2: Int32Array
    """int32 (N, 2): a node, or the complement (~) of a leaf's number."""
    roots_T: Int32Array
    """int32 (T,): same as above."""
    values_L: DoubleArray
    """float64 (L,)."""

    def log_odds(self, x_CI: FloatArray) -> DoubleArray:
        """Return the sum of each contig's leaves, nats, float64 (C,)."""
        starts = range(0, len(x_CI), CONTIGS_AT_ONCE)
        return np.concatenate([np.zeros(0), *(self._of(x_CI[at : at + CONTIGS_AT_ONCE]) for at in starts)])

    def _of(self, x_CI: FloatArray) -> DoubleArray:
        # indexes of another type are converted in each call of take
        input_N, next_2N, roots_T = (x.astype(np.intp) for x in (self.input_N, self.children_N2.ravel(), self.roots_T))
        values = x_CI.ravel()
        reached = np.tile(roots_T, len(x_CI))
        of_contig = np.repeat(np.arange(len(x_CI)) * x_CI.shape[1], len(roots_T))
        ways = np.flatnonzero(reached >= 0)  # those that have not come to a leaf: each contig's through each tree
        while len(ways):
            node, row = reached.take(ways), of_contig.take(ways)
            is_above = values.take(row + input_N.take(node)) > self.threshold_N.take(node)
            node = next_2N.take(2 * node + is_above)
            reached[ways] = node
            ways = ways[node >= 0]
        leaves_CT = ~reached.reshape(len(x_CI), len(roots_T))
        return np.asarray(self.values_L[leaves_CT].sum(axis=1))

    def check(self, num_inputs: int) -> None:
        nodes, leaves = self.input_N.size, self.values_L.size
        next_ = np.concatenate([self.children_N2.ravel(), self.roots_T.ravel()])
        is_sound = (
            self.children_N2.shape == (nodes, 2)
            and self.threshold_N.shape == self.input_N.shape == (nodes,)
            and self.roots_T.ndim == self.values_L.ndim == 1
            and [x.dtype for x in (self.input_N, self.children_N2, self.roots_T)] == [np.int16, np.int32, np.int32]
            and self.threshold_N.dtype == self.values_L.dtype == np.float64
            and bool(((self.input_N >= 0) & (self.input_N < num_inputs)).all())
            and np.array_equal(np.sort(next_), np.arange(-leaves, nodes))  # each node and leaf is reached by one way
            and bool(((self.children_N2 > np.arange(nodes)[:, None]) | (self.children_N2 < 0)).all())
            and bool(np.isfinite(self.threshold_N).all() and np.isfinite(self.values_L).all())
        )
        if not is_sound:
            raise ValueError("the trees of the contig model do not fit together")

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        return {
            "input": self.input_N,
            "threshold": self.threshold_N,
            "children": self.children_N2,
            "roots": self.roots_T,
            "values": self.values_L,
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, np.ndarray[Any, Any]]) -> BoostedTrees:
        return cls(
            input_N=tensors["input"],
            threshold_N=tensors["threshold"],
            children_N2=tensors["children"],
            roots_T=tensors["roots"],
            values_L=tensors["values"],
        )
