"""The messages of a collective, and when the last of them arrives on the links of a network.

Messages of a connection, from a sender to a receiver, follow one another. Connections share a link
fairly. A message arrives the latency after the link has sent it; meanwhile, the link sends others.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from ctl.inspect.predict.cost import Link, Network


@dataclasses.dataclass(eq=False)
class Message:
    """Of ``bytes``, from a replica to another, once those that it ``needs`` have arrived."""

    sender: int
    receiver: int
    bytes: float
    needs: list[Message] = dataclasses.field(default_factory=list)


def ring(members: Sequence[int], chunk: float, steps: int, before=()) -> Iterator[Message]:
    """In each step, every member passes on what it has received in the step before, and in the
    first one what has come ``before``."""
    last = {message.receiver: message for message in before}
    for _ in range(steps):
        sent = {}
        for sender, receiver in zip(members, [*members[1:], members[0]], strict=True):
            needs = [last[sender]] if sender in last else []
            sent[receiver] = Message(sender, receiver, chunk, needs)
            yield sent[receiver]
        last = sent


def hierarchical(hosts: int, per_host: int, size: float) -> Iterator[Message]:
    """Rings inside the hosts, a ring for each shard between them, rings inside again."""
    before: list[Message] = []
    inside = [range(host * per_host, (host + 1) * per_host) for host in range(hosts)]
    between = [range(index, hosts * per_host, per_host) for index in range(per_host)]
    for rings, chunk, steps in (
        (inside, size / per_host, per_host - 1),
        (between, size / per_host / hosts, 2 * (hosts - 1)),
        (inside, size / per_host, per_host - 1),
    ):
        messages = [m for members in rings for m in ring(members, chunk, steps, before)]
        yield from messages
        before = messages or before


def double_tree(hosts: int, per_host: int, size: float, chunks: int) -> Iterator[Message]:
    """Each of two trees sums half of the bytes, and sends the sums back."""
    firsts = [host * per_host for host in range(hosts)]
    other = firsts[::-1] if hosts % 2 == 0 else [*firsts[1:], firsts[0]]  # leaves are inner nodes
    for nodes in (firsts, other):
        root, parents = _in_order(nodes)
        parents |= {f + i: f + i - 1 for f in firsts for i in range(1, per_host)}
        children = collections.defaultdict(list)
        for child, parent in parents.items():
            children[parent].append(child)
        order = [root]  # a parent before its children
        for node in order:
            order += children[node]
        for _ in range(chunks):
            up: dict[int, Message] = {}
            down: dict[int, Message] = {}
            for node in order[:0:-1]:
                needs = [up[child] for child in children[node]]
                up[node] = Message(node, parents[node], size / 2 / chunks, needs)
            for node in order[1:]:
                parent = parents[node]
                needs = [down[parent]] if parent != root else [up[c] for c in children[root]]
                down[node] = Message(parent, node, size / 2 / chunks, needs)
            yield from (*up.values(), *down.values())


def _in_order(nodes: Sequence[int]) -> tuple[int, dict[int, int]]:
    """The root of a binary tree in which each second node is a leaf, and the parents."""
    at = 2 ** (len(nodes).bit_length() - 1) - 1
    parents: dict[int, int] = {}
    for part in filter(len, (nodes[:at], nodes[at + 1 :])):
        root, below = _in_order(part)
        parents |= below | {root: nodes[at]}
    return nodes[at], parents


def seconds(network: Network, messages: Iterable[Message]) -> float:
    """When the last of ``messages`` has arrived."""
    messages = [*messages]
    missing = {message: len(message.needs) for message in messages}
    after = collections.defaultdict(list)
    for message in messages:
        for needed in message.needs:
            after[needed].append(message)
    queues: dict[tuple[int, int], collections.deque] = collections.defaultdict(collections.deque)
    left: dict[Message, float] = {}  # bytes of those that are being sent
    arrivals: dict[Message, float] = {}
    now = 0.0

    def send(message: Message) -> None:
        queue = queues[message.sender, message.receiver]
        queue.append(message)
        if queue[0] is message:
            left[message] = message.bytes

    for message in messages:
        if not message.needs:
            send(message)
    while left or arrivals:
        users = collections.Counter(end for message in left for end in _ends(network, message))
        rates = {
            message: _link(network, message).beta / max(users[e] for e in _ends(network, message))
            for message in left
        }
        soonest = min([*(now + left[m] / rates[m] for m in left), *arrivals.values()])
        for message, rate in rates.items():
            left[message] -= rate * (soonest - now)
        now = soonest
        for message in [m for m in left if left[m] <= 1e-9 * m.bytes]:
            del left[message]
            arrivals[message] = now + _link(network, message).alpha
            queue = queues[message.sender, message.receiver]
            queue.popleft()
            if queue:
                left[queue[0]] = queue[0].bytes
        for message in [m for m in arrivals if arrivals[m] <= now * (1 + 1e-12)]:
            del arrivals[message]
            for other in after[message]:
                missing[other] -= 1
                if not missing[other]:
                    send(other)
    return now


def _link(network: Network, message: Message) -> Link:
    of_a_host = message.sender // network.per_host == message.receiver // network.per_host
    link = network.inner if of_a_host else network.outer
    assert link is not None
    return link


def _ends(network: Network, message: Message) -> Iterator[object]:
    """What it shares with other messages: the link of its sender, and that of its receiver."""
    size = 1 if _link(network, message) is network.inner else network.per_host
    yield "out", size, message.sender // size
    yield "in", size, message.receiver // size
