"""Seconds of collectives between the ranks of a group, by the alpha-beta model.

In: bytes, a Fabric, a Group. Out: seconds. A message of b bytes takes alpha + b / bandwidth. With n ranks:

    ring all-reduce                   2 (n - 1) alpha + 2 (n - 1) / n b / bandwidth
    tree all-reduce                   2 log2(n) alpha + 2 b / bandwidth     (a double binary tree uses all links)
    all-gather, reduce-scatter        log2(n) alpha + (n - 1) / n b / bandwidth     (recursive doubling; b of the whole)
    send                              alpha + b / bandwidth

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Sanders,
Speck and Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

LINK_LATENCY, NETWORK_LATENCY = 5e-6, 15e-6  # seconds of a message within a node, between nodes
ACHIEVED_SHARE = 0.8  # of a nominal bandwidth


@dataclass(frozen=True, slots=True)
class Fabric:
    """The connections of a device.

    Args:
        link: bytes per second to the other devices of its node, in one direction.
        network: bytes per second of its node to others, for each device of the node.
        devices_per_node: devices that a node has.
    """

    link: float
    network: float
    devices_per_node: int


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: `size` of them, `per_node` on each node that they share."""

    size: int
    per_node: int

    @property
    def is_inside_node(self) -> bool:
        return self.size <= self.per_node


def make_group(size: int, fabric: Fabric, *, stride: int = 1) -> Group:
    """Make the group of every `stride`-th rank.

    >>> make_group(16, Fabric(1, 1, 8)), make_group(2, Fabric(1, 1, 8), stride=8)
    (Group(size=16, per_node=8), Group(size=2, per_node=1))
    """
    return Group(size, min(size, max(1, ceil(fabric.devices_per_node / stride))))


def compute_bandwidth(group: Group, fabric: Fabric) -> float:
    """Bytes per second of one rank: between nodes, rings of a group use the network of all its ranks of a node."""
    slowest = fabric.link if group.is_inside_node else min(fabric.link, group.per_node * fabric.network)
    return ACHIEVED_SHARE * slowest


def compute_all_reduce_seconds(num_bytes: float, group: Group, fabric: Fabric, *, num_calls: int = 1) -> float:
    """Seconds to sum a tensor over a group, in so many parts: by a ring or by trees, whichever is faster."""
    n = group.size
    if n == 1:
        return 0.0
    alpha, seconds = num_calls * _get_latency(group), 2 * num_bytes / compute_bandwidth(group, fabric)
    return min(2 * (n - 1) * alpha + (n - 1) / n * seconds, 2 * log2(n) * alpha + seconds)


def compute_all_gather_seconds(num_bytes: float, group: Group, fabric: Fabric, *, num_calls: int = 1) -> float:
    """Seconds to gather shards to a whole of so many bytes, or to reduce a whole to shards, in so many parts."""
    n = group.size
    return num_calls * log2(n) * _get_latency(group) + (n - 1) / n * num_bytes / compute_bandwidth(group, fabric)


def compute_send_seconds(num_bytes: float, group: Group, fabric: Fabric) -> float:
    """Seconds of a message to the next rank of a group, each rank over its own connection."""
    slowest = fabric.link if group.is_inside_node else min(fabric.link, fabric.network)
    return _get_latency(group) + num_bytes / (ACHIEVED_SHARE * slowest)


def _get_latency(group: Group) -> float:
    return LINK_LATENCY if group.is_inside_node else NETWORK_LATENCY
